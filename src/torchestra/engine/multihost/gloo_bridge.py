"""The bridge over Gloo, as torch brings it: the default between hosts.

Gloo finds its ends through the group's store. Its connections carry data only: the store, which asks for the
job's secret, decides which processes may take part.

All operations consist of Gloo's sends and receives. Its collectives are slower: those run on threads of
Gloo's own, one after the other, and two ends that exchange tensors over a link of 1 Gbit/s need 1.2 to 1.8
times as long as the link does; sends and receives that have all been begun at once need 1.01 times. They
begin on the thread that calls. A thread of the bridge waits for their end, because a wait of Gloo's cannot be
interrupted, and breaks all connections when its time is up.

That is also how a bridge is closed amid an operation: a wait for nothing, for a millisecond, breaks the
connections, which the other ends see. This end's own wait is stopped as well, as Gloo leaves some out
(gloo_works.py).

A receive of Gloo's also takes what is shorter than it.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from torchestra.engine import progress
from torchestra.engine.multihost.bridge import Bridge, BridgeError, PeerTensors
from torchestra.engine.multihost.gloo_store import store_for_gloo
from torchestra.engine.multihost.gloo_works import WorksWaiter
from torchestra.store import Store
from torchestra.system.kept_errors import without_frames
from torchestra.system.limits import start_thread
from torchestra.transport.addresses import own_address

_TAG, _NEVER_SENT = 0, 1
_SLACK_SECONDS = 60.0  # a waiting caller gives an operation up before Gloo does
_CLOSE_SECONDS = 1.0
_log = logging.getLogger(__name__)


class _Transfer:
    """See Pending.

    Args:
        begin: begins it, once the ends have met; returns what to wait for.
        timeout: how long to wait for that.
        tensors: kept alive until it has ended.
        ends: with which end each of what to wait for is exchanged.
    """

    def __init__(
        self,
        begin: Callable[[], Sequence[Any]],
        timeout: timedelta,
        tensors: Sequence[torch.Tensor] = (),
        ends: Sequence[int] = (),
    ) -> None:
        self._ends, self._ended = ends, 0
        self._begin: Callable[[], Sequence[Any]] | None = begin
        self._works: Sequence[Any] = ()
        self._timeout = timeout
        self._tensors = tensors
        self._error: BaseException | None = None
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def begin(self) -> None:
        """Begin it; :meth:`wait` raises the error if that fails."""
        assert self._begin is not None
        try:
            self._works = self._begin()
        except Exception as error:
            self.fail(error)
        self._begin = None

    def fail(self, error: BaseException) -> None:
        """Make it end with an error, unless it has one."""
        self._error = self._error or without_frames(error)  # these refer to tensors, as the program to this

    def run(self, waiter: WorksWaiter) -> None:
        """Complete it, on the bridge's thread."""
        if self._begin is not None and self._error is None:
            self.begin()
        try:
            for _ in waiter.wait(self._works, self._timeout):
                self._ended += 1
        except Exception as error:
            self.fail(error)
        self._works, self._tensors = (), ()
        self._under_way.release()

    def has_ended(self) -> bool:
        return not self._under_way.locked()

    def wait(self, timeout_s: float) -> bool:
        if not self._under_way.acquire(timeout=max(0.0, timeout_s)):
            return False
        self._under_way.release()
        if self._error is not None:
            raise _failure(self._error) from self._error
        return True

    def awaited(self) -> Sequence[int]:
        return self._ends[self._ended :]


class _Ends:
    """The connections to the other ends, and the part of the bridge that its thread uses.

    Attributes:
        group: Gloo's, once it is made. ``store`` has the half of its store that is not in C++.
        is_closed: a thread that looks for the other ends shall give up.
        is_open: the ends have met.
        lock: guards that, and the order in which transfers begin.
        queued: transfers that begin when the ends have met; all at once, since some may end only when others
            have begun.
        error: why they have not met.
        waiter: waits on the bridge's thread.
    """

    def __init__(self, host: int, size: int) -> None:
        self.waiter = WorksWaiter()
        self.host = host
        self.size = size
        self.others = [end for end in range(size) if end != host]
        self.is_closed = self.is_open = False
        self.lock = threading.Lock()
        self.queued: list[_Transfer] = []
        self.error: BaseException | None = None
        self.group: Any = None
        self.store: Any = None

    def open(self, store: Store, timeout_s: float) -> list[Any]:
        """Meet the other ends, and begin what is queued."""
        try:
            self._meet(store, timeout_s)
        except Exception as error:
            self.error = without_frames(error)
        with self.lock:
            if self.is_closed and self.error is None:
                self.error = BridgeError("this end is closed")
            self.is_open = self.error is None
            for transfer in self.queued:
                if self.error is None:
                    transfer.begin()
                else:
                    transfer.fail(self.error)
            self.queued.clear()
        if self.error is not None:
            raise self.error
        return []

    def _meet(self, store: Store, timeout_s: float) -> None:
        """Find the other ends, and connect to them: later nothing begins with a wait for a connection."""
        c10d, timeout = _bindings(), timedelta(seconds=timeout_s)
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [_device(store)]
        options._threads = 1
        options._timeout = timeout
        self.store = store_for_gloo(store, self.host, self.size, timeout_s, lambda: self.is_closed)
        self.group = c10d.ProcessGroupGloo(self.store, self.host, self.size, options)
        greeting, greetings = torch.zeros(1, dtype=torch.uint8), torch.empty(self.size, dtype=torch.uint8)
        rows = greetings.split(1)
        receives = [(end, rows[end]) for end in self.others]
        greeted = self.begin(receives, [(end, greeting) for end in self.others])
        for _ in self.waiter.wait(greeted, timeout):
            pass

    def begin(self, receives: PeerTensors, sends: PeerTensors) -> list[Any]:
        works = [self.group.recv([tensor], end, _TAG) for end, tensor in receives]
        return works + [self.group.send([tensor], end, _TAG) for end, tensor in sends]

    def break_off(self) -> None:
        """End all waits of Gloo's with an error, on all ends."""
        for end in self.others:
            try:
                never = self.group.recv([torch.empty(1, dtype=torch.uint8)], end, _NEVER_SENT)
                never.wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue


class GlooBridge(Bridge):
    """See Bridge.

    Args:
        store: one that only the ends of this rail, and only for this purpose, use.
        host, size: which end this is, and how many there are.
        timeout_s: how long to look for the others.
    """

    kind = "gloo"

    def __init__(self, store: Store, host: int, size: int, timeout_s: float) -> None:
        super().__init__(host, size)
        self._ends = _Ends(host, size)
        self._tasks: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        name = f"torchestra-gloo-{host}"
        self._thread = threading.Thread(
            target=_serve, args=(self._tasks, self._ends.waiter), name=name, daemon=True
        )
        self._stop = weakref.finalize(self, self._tasks.put, None)
        self._stop.atexit = False
        start_thread(self._thread)
        self._last = _Transfer(partial(self._ends.open, store, timeout_s), timedelta())
        self._tasks.put(self._last)
        _bridges.add(self)

    def begin(self, receives: PeerTensors, sends: PeerTensors, timeout_s: float) -> _Transfer:
        ends, timeout = self._ends, timedelta(seconds=timeout_s + _SLACK_SECONDS)
        both = (*receives, *sends)
        tensors, others = [tensor for _, tensor in both], [end for end, _ in both]
        transfer = _Transfer(partial(ends.begin, receives, sends), timeout, tensors, others)
        with ends.lock:
            if ends.is_closed:
                raise BridgeError("Gloo: this end is closed")
            if ends.error is not None:
                raise _failure(ends.error) from ends.error
            if ends.is_open:
                transfer.begin()
            else:
                ends.queued.append(transfer)
            self._tasks.put(transfer)
            self._last = transfer
        return transfer

    def close(self) -> None:
        ends = self._ends
        with ends.lock:  # a transfer that began now would begin after its connections have been broken
            if ends.is_closed:
                return
            ends.is_closed = True
            amid_transfer = ends.is_open and not self._last.has_ended()
        if amid_transfer:
            ends.break_off()
        ends.waiter.stop()
        self._stop()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)
            if amid_transfer and self._thread.is_alive():
                _log.warning(
                    "Gloo: the thread %s waits on for a message whose connection is broken, and keeps memory"
                    " and descriptors until the operation's time-out: this build of torch lets nobody end it",
                    self._thread.name,
                )


def _serve(transfers: queue.SimpleQueue[_Transfer | None], waiter: WorksWaiter) -> None:
    while (transfer := transfers.get()) is not None:
        transfer.run(waiter)
        del transfer


def _failure(error: BaseException) -> BridgeError:
    return BridgeError(f"Gloo: {str(error).splitlines()[0]}")


_bridges: weakref.WeakSet[GlooBridge] = weakref.WeakSet()


def _give_up_at_exit() -> None:
    """Close at exit: a thread that returns from Gloo to a finished interpreter would end the process."""
    progress.await_running_tasks()
    for bridge in tuple(_bridges):
        bridge.close()


atexit.register(_give_up_at_exit)


def _bindings() -> Any:
    from torch._C import _distributed_c10d

    return _distributed_c10d


def _device(store: Store) -> Any:
    """Return a Gloo device that listens at the address from which this host reaches the store.

    Each group has one of its own, because groups that connect lazily mix up their connections otherwise.
    """
    return _bindings().ProcessGroupGloo.create_device(hostname=own_address(store), lazy_init=True)
