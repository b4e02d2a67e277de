"""The bridge over the transport between hosts, ZeroMQ with CURVE: the default.

Who takes part in it has proved the job's secret before a byte of it is read, and all that goes over it is
encrypted (transport/). The ends meet through the rail's store, on a thread of their own; what is begun before
that is sent then. From one end to another there is one stream of messages, and what is received takes them in
their order: one that comes before it is awaited is kept. Letters have a queue of their own beside that.

Whether the other hosts live is known from elsewhere (failure_detector.py). An end that is closed says
goodbye; of one whose connection ends without that, what is under way is given up after the heartbeat bound,
by which a link that was cut may come back.

A message of up to 64 KB is one frame. A longer one goes in pieces (transport/framing.py), so each piece is
on its way while the next one is encrypted. Large tensors come in chunks from whoever calls, several of which
are under way at once; so while one is added up others travel.
"""

from __future__ import annotations

import atexit
import ctypes
import queue
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

import torch

from torchestra.engine import progress
from torchestra.engine.multihost.bridge import BridgeError
from torchestra.engine.multihost.failure_detector import heartbeat_bound
from torchestra.errors import DistError, InvalidArgumentError
from torchestra.store import PrefixStore, Store
from torchestra.store.secret import SECRET_ADVICE
from torchestra.transport.addresses import INTERFACE_VARIABLE, own_address
from torchestra.transport.message import Message
from torchestra.transport.rendezvous import meet
from torchestra.transport.transport import Transport

__all__ = ["CurveBridge"]

_DATA, _LETTER = 1, 2
_ONE_FRAME_BYTES = 64 << 10
_PATIENCE_SECONDS, _CLOSE_SECONDS = 0.2, 1.0
_CLOSED = "this end is closed"
_ADVICE = f"See {INTERFACE_VARIABLE} in docs/guides/several-hosts.md"

_Places = Sequence[tuple[int, torch.Tensor]]
"""Ends, and what comes from or goes to each of them."""


class _Transfer:
    """See Pending.

    Attributes:
        left: by end, how many of its messages have not been sent or received yet. The lock of the ends
            guards it.
    """

    def __init__(self, receives: _Places, sends: _Places) -> None:
        self.left = Counter(end for end, _ in (*receives, *sends))
        self._error = ""
        self._under_way = threading.Lock()
        if self.left:
            self._under_way.acquire()

    def finish_one(self, end: int) -> bool:
        """A message has been sent or received; whether it was the last."""
        self.left[end] -= 1
        if self.left[end] == 0:
            del self.left[end]
        if self.left or self._error:
            return False
        self._under_way.release()
        return True

    def fail(self, why: str) -> None:
        """Have it end with an error."""
        if self.left and not self._error:
            self._error = why
            self._under_way.release()

    def wait(self, seconds: float) -> bool:
        if not self._under_way.acquire(timeout=max(0.0, seconds)):
            return False
        self._under_way.release()
        if self._error:
            raise BridgeError(self._error)
        return True


class _Ends:
    """The connections to the other ends; what the threads have of the bridge.

    Attributes:
        opened: set when the ends have met, or when that has failed.
    """

    def __init__(self, store: Store, host: int, size: int, names: Sequence[str], seconds: float) -> None:
        secret = store.secret
        if secret is None:
            raise InvalidArgumentError(
                f"{names[host]} and the ranks on other hosts have no secret by which to know each other;"
                f" {SECRET_ADVICE}"
            )
        self._store, self._secret = PrefixStore("curve", store.clone()), secret
        self._host, self._seconds = host, seconds
        self._others = {end: names[end] for end in range(size) if end != host}
        self._names = names
        # A finaliser may interrupt whoever holds it, and close the bridge.
        self._lock = threading.RLock()
        self._awaited: defaultdict[int, deque[tuple[_Transfer, torch.Tensor]]] = defaultdict(deque)
        self._come: defaultdict[int, deque[Message]] = defaultdict(deque)
        self._letters: defaultdict[int, queue.SimpleQueue[Message | None]] = defaultdict(queue.SimpleQueue)
        self._under_way: set[_Transfer] = set()
        self._queued: list[tuple[int, torch.Tensor, _Transfer]] = []
        self._gone: dict[int, str] = {}
        self._is_open = self._is_closed = False
        self._error = ""
        self.opened = threading.Event()
        self._wire = Transport(
            names[host],
            own_address(store),
            None,
            None,
            self._arrived,
            self._lost,
            _ADVICE,
            heartbeat_bound(),
        )
        threading.Thread(target=self._open, name="torchestra-curve-opening", daemon=True).start()

    def _open(self) -> None:
        """Meet the other ends, and send what is queued."""
        error = ""
        try:
            ends = range(len(self._names))
            meet(self._wire, self._store, self._secret, self._host, ends, self._others, self._seconds)
        except (DistError, OSError) as failure:
            error = str(failure)
        with self._lock:
            self._error, self._is_open = self._error or error, not error
            if error:
                for transfer in tuple(self._under_way):
                    transfer.fail(error)
                self._under_way.clear()
            else:
                for queued in self._queued:
                    self._send(*queued)
            self._queued.clear()
        self.opened.set()

    def refuse_if_over(self) -> None:
        """Raise if nothing can be begun any more."""
        if self._error:
            raise BridgeError(self._error)

    def begin(self, receives: _Places, sends: _Places) -> _Transfer:
        """Begin to receive and to send; what is empty is not sent."""
        receives = [place for place in receives if place[1].numel()]
        sends = [place for place in sends if place[1].numel()]
        transfer = _Transfer(receives, sends)
        with self._lock:
            self.refuse_if_over()
            if transfer.left:
                self._under_way.add(transfer)
            for end, tensor in sends:
                if self._is_open:
                    self._send(end, tensor, transfer)
                else:
                    self._queued.append((end, tensor, transfer))
            for end, tensor in receives:
                if self._come[end]:
                    self._take(self._come[end].popleft(), transfer, tensor)
                elif end in self._gone:
                    transfer.fail(self._gone[end])
                else:
                    self._awaited[end].append((transfer, tensor))
        return transfer

    def _send(self, end: int, tensor: torch.Tensor, transfer: _Transfer) -> None:
        if end in self._gone:
            transfer.fail(self._gone[end])
            return

        def done() -> None:
            with self._lock:
                self._finish_one(transfer, end)

        place = (tensor.data_ptr(), tensor.numel())
        parts = [place] if tensor.numel() <= _ONE_FRAME_BYTES else [(0, 0), place]
        self._wire.post(end, _DATA, 0, parts, tensor, done)

    def _finish_one(self, transfer: _Transfer, end: int) -> None:
        if transfer.finish_one(end):
            self._under_way.discard(transfer)

    def _arrived(self, message: Message) -> None:
        """On the thread of the connections."""
        end = message.source
        if message.kind == _LETTER:
            self._letters[end].put(message)
            return
        with self._lock:
            if not self._awaited[end]:
                self._come[end].append(message)
                return
            transfer, tensor = self._awaited[end].popleft()
            self._take(message, transfer, tensor)

    def _take(self, message: Message, transfer: _Transfer, tensor: torch.Tensor) -> None:
        """Put what has come where it belongs."""
        length = len(message.text) + sum(storage.nbytes() for storage in message.storages)
        if length > tensor.numel():
            transfer.fail(f"{length} bytes came from {self._names[message.source]}, not {tensor.numel()}")
            return
        if message.storages:
            ctypes.memmove(tensor.data_ptr(), message.storages[0].data_ptr(), length)
        else:
            ctypes.memmove(tensor.data_ptr(), bytes(message.text), length)
        self._finish_one(transfer, message.source)

    def _lost(self, end: int, how: str) -> None:
        """On the thread of the connections: nothing will come from an end any more."""
        why = f"{self._names[end]} {how}"
        with self._lock:
            self._gone[end] = why
            for transfer in tuple(self._under_way):
                if end in transfer.left:
                    transfer.fail(why)
                    self._under_way.discard(transfer)
            self._awaited[end].clear()
        self._letters[end].put(None)

    def write(self, letter: torch.Tensor, end: int) -> None:
        with self._lock:
            self.refuse_if_over()
            if end in self._gone:
                raise BridgeError(self._gone[end])
        self._wire.post(end, _LETTER, 0, [(letter.data_ptr(), letter.numel())], letter)

    def letters(self, end: int, length: int) -> Iterator[torch.Tensor]:
        while (message := self._letters[end].get()) is not None and not self._is_closed:
            if len(message.text) > length:
                raise BridgeError(f"a letter of {len(message.text)} bytes came from {self._names[end]}")
            yield torch.frombuffer(bytearray(message.text), dtype=torch.uint8)
        raise BridgeError(self._error or self._gone[end])

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._error = self._error or _CLOSED
            for transfer in tuple(self._under_way):
                transfer.fail(self._error)
            self._under_way.clear()
            self._awaited.clear()
            self._queued.clear()
        for end in self._others:
            self._letters[end].put(None)
        self._wire.close(_PATIENCE_SECONDS, _CLOSE_SECONDS)


class CurveBridge:
    """See Bridge. The ends meet while the first operations wait.

    Args:
        store: one that only the ends of this rail, and only for this purpose, use; it knows the job's secret.
        host, size: which end this is, and how many there are.
        names: what to call the ends in messages.
        seconds: how long to look for the others.

    Raises:
        InvalidArgumentError: there is no secret.
        DistNetworkError: it cannot listen on this host.
    """

    kind = "curve"

    def __init__(self, store: Store, host: int, size: int, names: Sequence[str], seconds: float) -> None:
        self.host = host
        self.size = size
        self._others = [end for end in range(size) if end != host]
        self._ends = _Ends(store, host, size, names, seconds)
        self._close = weakref.finalize(self, self._ends.close)
        self._close.atexit = False
        _bridges.add(self)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, seconds: float) -> _Transfer:
        return self.tell(output, tensor, seconds)

    def tell(self, output: torch.Tensor, tensor: torch.Tensor, seconds: float) -> _Transfer:
        rows = output.view(self.size, -1) if output.numel() else [output] * self.size
        rows[self.host][: tensor.numel()].copy_(tensor)
        receives = [(end, rows[end]) for end in self._others]
        return self._ends.begin(receives, [(end, tensor) for end in self._others])

    def broadcast(self, tensor: torch.Tensor, root: int, seconds: float) -> _Transfer:
        if root == self.host:
            return self._ends.begin([], [(end, tensor) for end in self._others])
        return self._ends.begin([(root, tensor)], [])

    def exchange(
        self,
        output: torch.Tensor,
        expected: Sequence[int],
        tensor: torch.Tensor,
        sent: Sequence[int],
        seconds: float,
    ) -> _Transfer:
        places, pieces, host = output.split(list(expected)), tensor.split(list(sent)), self.host
        places[host][: sent[host]].copy_(pieces[host])
        receives = [(end, places[end]) for end in self._others]
        return self._ends.begin(receives, [(end, pieces[end]) for end in self._others])

    def has_met(self, seconds: float) -> bool:
        if not self._ends.opened.wait(seconds):
            return False
        self._ends.refuse_if_over()
        return True

    def send(self, tensor: torch.Tensor, end: int, seconds: float) -> _Transfer:
        return self._ends.begin([], [(end, tensor)])

    def receive(self, tensor: torch.Tensor, end: int, seconds: float) -> _Transfer:
        return self._ends.begin([(end, tensor)], [])

    def write(self, letter: torch.Tensor, end: int) -> object:
        self._ends.write(letter, end)
        return None

    def letters(self, end: int, length: int, awaited: Callable[[], bool]) -> Iterator[torch.Tensor]:
        return self._ends.letters(end, length)

    def hurry(self) -> None:
        pass  # letters come at once

    def close(self) -> None:
        self._close()


_bridges: weakref.WeakSet[CurveBridge] = weakref.WeakSet()


def _close_at_exit() -> None:
    """What has been sent is to leave before the process does."""
    progress.let_tasks_end()
    for bridge in tuple(_bridges):
        bridge.close()


atexit.register(_close_at_exit)
