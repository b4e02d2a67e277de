"""The operations of a group on tensors of a device, by torch's backend for it (engine/device/).

A communicator of its own runs them, with its own engine and queue; its checks, layouts and coalesced
operations are those of every communicator. But its queue runs operations on the host at once, when they are
called. For their order on the device see engine/device/stream_scheduler.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from torchestra.communicator.communicator import Communicator
from torchestra.communicator.queue import RAISED_BY_ALL, Operation, OperationQueue
from torchestra.communicator.work import Work
from torchestra.engine.device.agreement import Agreement
from torchestra.engine.device.engine import DeviceEngine
from torchestra.engine.device.nccl import open_nccl
from torchestra.engine.device.stream_scheduler import CudaScheduler, DeviceEvent, StreamScheduler
from torchestra.errors import InvalidArgumentError
from torchestra.store import PrefixStore, Store
from torchestra.system.kept_errors import fresh
from torchestra.tensors import checks
from torchestra.tensors.contiguity import make_contiguous, write_back
from torchestra.types import ReduceOp, Timeout

_CLOSE_SECONDS = 5.0
_POLL_SECONDS = 0.05


class DeviceWork(Work):
    """A Work whose :meth:`wait` makes the device wait, not the host.

    Without a time-out, ``wait()`` returns once everything that the caller launches later runs after the
    operation. ``synchronize()``, ``is_completed()``, a wait with a time-out and the future concern its end.
    """

    def __init__(self, description: str, engine: DeviceEngine, *, held: bool = False) -> None:
        super().__init__(description, held=held)
        self.event: DeviceEvent | None = None
        self._engine = engine
        self._filled: list[Any] = []

    def begin(self, event: DeviceEvent, filled: list[Any]) -> None:
        """Note, for the communicator, that the operation was launched and ends at the event."""
        self.event, self._filled = event, filled

    def result(self) -> list[Any]:
        if self.event is None or self._ended:
            return super().result()
        self.wait()
        return self._filled if self._keeps_result else []

    def wait(self, timeout: Timeout | None = None) -> bool:
        if timeout is not None or self.event is None:
            super().wait(timeout)
        if self.event is None:
            return True
        if self._exception is not None:
            raise fresh(self._exception)
        if self.event.error is None and not self._ended:
            self._engine.refuse()
        self.event.join()
        if self.event.error is not None:
            raise fresh(self.event.error)
        return True

    def synchronize(self) -> None:
        """Block until the operation has ended: then its tensors can be used on every stream."""
        super().wait()
        self.wait()

    def is_completed(self) -> bool:
        return super().is_completed() or (self.event is not None and self.event.is_done())

    def finish(self, result: list[Any], source: int = -1, dequeue: Callable[[], None] | None = None) -> None:
        if self.event is None:  # one of several coalesced operations: it ends here
            self.event = self._engine.scheduler.event()
        super().finish(result, source, dequeue)


class StreamQueue(OperationQueue):
    """Run operations on the host at once; they follow each other on the device."""

    engine: DeviceEngine

    def new_work(self, description: str, *, held: bool = False) -> Work:
        return DeviceWork(f"{description} of group {self.name!r}", self.engine, held=held)

    def _run_or_queue(
        self, operation: Operation, description: str, async_op: bool, operations: int
    ) -> Work | None:
        result: list[Any] = []
        engine = self.engine
        try:
            engine.refuse()
            with self.lock:
                event = engine.scheduler.run(lambda: result.extend(operation(None)), async_op=async_op)
            if event.error is not None and not isinstance(event.error, RAISED_BY_ALL):
                self.leave(description, event.error)
        except BaseException as error:
            # It is unknown how much of it was launched: some take more than one of torch's operations.
            if not isinstance(error, RAISED_BY_ALL):
                self.leave(description, error)
            raise
        if not async_op:
            return None
        work = cast(DeviceWork, self.new_work(description))
        work.begin(event, result)
        self.end_with(work, result, -1, operation)
        return work

    def end_with(self, work: DeviceWork, result: list[Any], source: int, held: object) -> None:
        """Have the Work end when the device reaches its event. ``held`` lives until then."""
        event = work.event
        assert event is not None

        def end(failure: BaseException | None, held: object = held) -> None:
            if (error := failure or event.error) is not None:
                work.fail(error)
            else:
                work.finish(result, source)

        self.engine.watch.tell(event.is_done, end)

    def close(self) -> None:
        self.closed = True
        if not self.engine.is_aborted:
            self.engine.watch.drain(_CLOSE_SECONDS)
        self.engine.close()


class DeviceMessages:
    """Send and receive tensors of a device; see point_to_point.Messages."""

    def __init__(self, communicator: Communicator, queue: StreamQueue) -> None:
        self._communicator = communicator
        self._queue = queue

    def batch(
        self, messages: Sequence[tuple[bool, torch.Tensor, int]], timeout_s: float | None = None
    ) -> list[Work]:
        """Begin to send (True) and receive tensors to and from ranks, in no order; return a Work for each."""
        batch = []
        for is_send, tensor, rank in messages:
            name = "isend" if is_send else "irecv"
            self._queue.refuse_if_closed(name)
            checked = checks.check_tensor(tensor, "tensor", name, written=not is_send)
            batch.append((is_send, make_contiguous(checked), rank))
        limit = self._communicator.limit(timeout_s)
        with self._queue.lock:
            begun = self._queue.engine.messages(batch, limit, together=len(batch) > 1)
            return [
                self._message(begun, is_send, tensor, buffer, rank)
                for (is_send, buffer, rank), (_, tensor, _) in zip(batch, messages, strict=True)
            ]

    def _message(
        self, begun: Any, is_send: bool, tensor: torch.Tensor, buffer: torch.Tensor, rank: int
    ) -> Work:
        """Return the Work of a message that has been begun."""
        queue = self._queue
        name = f"{'isend to' if is_send else 'irecv from'} rank {rank} of group {queue.name!r}"
        work = DeviceWork(name, queue.engine)
        is_elsewhere = not is_send and buffer.data_ptr() != tensor.data_ptr()
        put = partial(write_back, [tensor], [buffer]) if is_elsewhere else None
        work.begin(queue.engine.scheduler.after(begun, put), [tensor])
        queue.end_with(work, [tensor], -1 if is_send else rank, buffer)
        return work


class Devices:
    """A communicator's delegation: makes the communicator for its device on first use.

    Attributes:
        agreement: the ranks' agreement on their devices.
    """

    def __init__(
        self,
        base: Communicator,
        agreement: Agreement,
        scheduler: StreamScheduler,
        open_backend: Callable[[], tuple[Any, Any]],
    ) -> None:
        self.agreement = agreement
        self._base = base
        self._scheduler = scheduler
        self._open_backend = open_backend
        self._engine: DeviceEngine | None = None
        self._made: Communicator | None = None
        self._making = threading.Lock()

    def serve(self, tensors: Sequence[torch.Tensor], op: ReduceOp | None = None) -> Communicator | None:
        """See Delegation."""
        device = self.agreement.device
        for tensor in tensors:
            if tensor.device != device:
                raise InvalidArgumentError(
                    f"a tensor is on {tensor.device}, but rank {self._base.rank} of group {self._base.name!r}"
                    f" has {device}, as was agreed when the group was made: call"
                    " torch.cuda.set_device(local_rank) before, or give device_id="
                )
        if op is not None and not DeviceEngine.reduces(tensors[0].dtype, op):
            return None
        if any(tensor.is_quantized for tensor in tensors):
            return None
        return self.communicator()

    def communicator(self) -> Communicator:
        """Return the communicator for the device."""
        with self._making:
            if self._made is None:
                base = self._base
                engine = self._engine = DeviceEngine(
                    base.engine, self._scheduler, base.name, self._open_backend
                )
                queue = StreamQueue(engine, base.name)
                self._made = Communicator(engine, base.name, base.timeout_s, queue)
                self._made.messages = DeviceMessages(self._made, queue)
                base.uses_device = True
                queue.closed = base.closed
            self._made.timeout_s = self._base.timeout_s
            return self._made

    def finish(self) -> None:
        """Wait until the operations on the device have ended; raise the error of a failed one."""
        assert self._engine is not None
        while not self._engine.watch.drain(_POLL_SECONDS):
            self._engine.refuse()
        self._engine.refuse()

    def drain(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until the operations on the device have ended."""
        if self._engine is not None:
            self._engine.watch.drain(timeout_s)

    def close(self) -> None:
        """Leave the group on the device."""
        with self._making:
            self._base.uses_device = False
            if self._made is not None and not self._made.closed:
                self._made.close()


def delegate(base: Communicator, store: Store, agreement: Agreement | None) -> None:
    """Have a communicator delegate operations on CUDA tensors, if that is agreed.

    Args:
        store: a store that only the ranks of the group use.
    """
    if agreement is None:
        return

    def open_backend() -> tuple[Any, Any]:
        own = PrefixStore("nccl", store)
        return open_nccl(own, base.rank, base.size, base.name, base.timeout_s)

    base.delegation = Devices(base, agreement, CudaScheduler(agreement.device), open_backend)


def agreement_of(communicator: Communicator) -> Agreement | None:
    """Return the agreement of a group's ranks on their devices; None if the group does not delegate."""
    delegation = communicator.delegation
    return None if delegation is None else cast(Agreement, delegation.agreement)
