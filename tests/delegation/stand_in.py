"""torch's ProcessGroupGloo in the place of NCCL, and the CPU in the place of a GPU.

Everything is as for NCCL but for what makes the backend, and the scheduler: here a thread stands for the
streams of a device, which does one operation after the other while the program goes on.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

import torchestra as dist
from torchestra.communicator.device import Devices
from torchestra.engine.device.agreement import Agreement
from torchestra.engine.device.stream_scheduler import DeviceEvent, Refuse, StreamScheduler
from torchestra.engine.device.torch_store import store_for_torch
from torchestra.store import PrefixStore

CPU = torch.device("cpu")


class ThreadEvent(DeviceEvent):
    """The end of what a thread does."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.ended = threading.Event()

    def is_done(self) -> bool:
        return self.ended.is_set()

    def join(self) -> None:
        while not self.ended.wait(0.05):
            pass


class EndOfWork(DeviceEvent):
    """The end of a Work of torch's, and of what follows it."""

    def __init__(self, work: Any, then: Callable[[], object] | None, refuse: Refuse) -> None:
        self.error = None
        self._work = work
        self._then = then
        self._refuse = refuse
        self._lock = threading.Lock()

    def is_done(self) -> bool:
        if not self._work.is_completed():
            return False
        with self._lock:
            then, self._then = self._then, None
            if then is not None:
                then()
        return True

    def join(self) -> None:
        while not self.is_done():
            self._refuse()
            time.sleep(0.0005)
        self._work.wait()


_Tasks = queue.SimpleQueue[tuple[Callable[[], None], ThreadEvent] | None]


class ThreadScheduler(StreamScheduler):
    """A thread in the place of a device's streams, which ends when nothing refers to this any more."""

    def __init__(self) -> None:
        self.device = CPU
        self.refuse: Refuse = lambda: None
        self._tasks: _Tasks = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._tasks,), name="stand-in", daemon=True).start()
        weakref.finalize(self, self._tasks.put, None).atexit = False

    def run(self, operation: Callable[[], None], *, async_op: bool) -> DeviceEvent:
        event = ThreadEvent()
        self._tasks.put((operation, event))
        if not async_op:
            event.join()
            if event.error is not None:
                raise event.error
        return event

    def order_after(self, work: Any, refuse: Refuse) -> None:
        EndOfWork(work, None, refuse).join()

    def after(self, work: Any, then: Callable[[], object] | None) -> DeviceEvent:
        return EndOfWork(work, then, self.refuse)

    def event(self) -> DeviceEvent:
        event = ThreadEvent()
        event.ended.set()
        return event

    def here(self) -> Callable[[], AbstractContextManager[Any]]:
        return contextlib.nullcontext


def _serve(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        operation, event = task
        try:
            operation()
        except Exception as error:
            event.error = error
        event.ended.set()
        del task, operation, event  # they refer to the scheduler


class Waited:
    """A Work that somebody waits for."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


class Gloo:
    """ProcessGroupGloo, which an abort breaks off, and which notes what is asked of it."""

    def __init__(self, group: Any, calls: list[str]) -> None:
        self._group = group
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        self._calls.append(name)
        return getattr(self._group, name)

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        """NCCL leaves the tensors of the other ranks as they are, but Gloo does not."""
        if self._group.rank() != options.rootRank:
            tensors = [tensor.clone() for tensor in tensors]
        return self._group.reduce(tensors, options)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> Any:
        """Gloo's Work of this only ends when it is waited for."""
        self._calls.append("_reduce_scatter_base")
        return Waited(self._group._reduce_scatter_base(output, tensor, options))

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Likewise."""
        return Waited(self._group.send(tensors, rank, tag))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Likewise."""
        return Waited(self._group.recv(tensors, rank, tag))

    def abort(self) -> None:
        """A wait for nothing that times out breaks the connections."""
        for rank in range(self._group.size()):
            if rank != self._group.rank():
                with contextlib.suppress(RuntimeError):
                    never = self._group.recv([torch.empty(1, dtype=torch.uint8)], rank, 1)
                    never.wait(timedelta(milliseconds=1))


def _open(base: Any, store: Any, calls: list[str]) -> tuple[Gloo, Any]:
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)]
    options._threads = 2
    options._timeout = timedelta(seconds=60)
    adapter = store_for_torch(store, base.timeout_s)
    return Gloo(c10d.ProcessGroupGloo(adapter, base.rank, base.size, options), calls), adapter


class StandIn:
    """Replace the default group's communicator.

    Attributes:
        communicator: for the device.
        base: the group's own.
        calls: which methods of torch's backend have been called.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.base = group.communicator
        self.calls: list[str] = []
        store = PrefixStore(f"stand-in/{group.group_name}", group.store)
        agreement = Agreement(CPU, [f"device {rank}" for rank in range(group.size())])
        scheduler = ThreadScheduler()
        self.devices = Devices(self.base, agreement, scheduler, partial(_open, self.base, store, self.calls))
        self.base.delegation = self.devices
        self.communicator: Any = self.devices.communicator()
        scheduler.refuse = self.communicator.engine.refuse
        # It is in the place of the group's, of which nobody asks these of a device's.
        self.communicator.barrier, self.communicator.drain = self.base.barrier, self.base.drain


@contextlib.contextmanager
def delegating(group: dist.ProcessGroup | None = None) -> Iterator[StandIn]:
    """Have a group (default: the default group) do all operations on tensors by the stand-in."""
    chosen = dist.group.WORLD if group is None else group
    stand_in = StandIn(chosen)
    chosen.communicator = stand_in.communicator
    try:
        yield stand_in
    finally:
        chosen.communicator = stand_in.base
