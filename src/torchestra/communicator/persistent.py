"""Operations that are set up once and started again and again (MPI-4, "Persistent Communication").

The work that an ordinary operation repeats on every call is done once: its arguments are checked, the
engine's plan is looked up, tensors that are not contiguous get buffers, and if the engine has kernels, kernel
and arguments are fixed (:meth:`~torchestra.engine.interface.Engine.prepare`). If there are entries
(entries.py), a start then runs only machine code (native_persistent.py); else, with nothing pending, a
synchronous one takes a lock and calls the kernel. Other ranks cannot tell it from an ordinary operation.

An engine prepares when the operation's turn first comes, not before: memory that the kernels share (the
tables by peer) belongs to the running operation.

The addresses that are kept are valid until a storage is resized, which gives it other memory. So every start
compares addresses and lengths; and so does an operation that had to wait for its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler

from torchestra.communicator import point_to_point, profiling
from torchestra.communicator.communicator import Communicator
from torchestra.communicator.work import Work
from torchestra.engine.interface import Prepared
from torchestra.engine.operations import Collective
from torchestra.errors import DistError, InvalidArgumentError, NotReadyError
from torchestra.system.untraced import untraced
from torchestra.tensors.arguments import Call, pieces
from torchestra.tensors.contiguity import make_contiguous, write_back
from torchestra.types import ReduceOp, Timeout

__all__ = [
    "PersistentCall",
    "PersistentCollective",
    "PersistentMessage",
    "PersistentOperation",
    "copies_between",
]


@untraced
class PersistentOperation:
    """An operation on fixed tensors that can be started many times; made by ``all_reduce_init`` and its like.

    It is *inactive* at first, *active* from its start until the program has waited for it, and then inactive
    again. To be used by one thread at a time. It may be dropped: an operation that was started runs anyway.
    On a rank that is not in the group it does nothing.

    Args:
        name: of the operation, for messages.
        tensors: the tensors whose memory must not be replaced.
        communicator: of the group; None on a rank that is not in it.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor] = (),
        communicator: Any = None,
    ) -> None:
        self.name = name
        self.group: object = None
        """The group; this reference keeps it from being left."""
        self._communicator = communicator
        self._memory = [(tensor, tensor.data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors]
        self._work: Work | None = None
        self._source = -1

    def start(self) -> None:
        """Begin the operation; its tensors must not be touched until :meth:`wait` has returned.

        Raises:
            NotReadyError: it is active. Nothing was sent.
            InvalidArgumentError: a tensor has other memory than when the operation was set up. Nothing was
                sent.
            DistError: any error that the ordinary operation raises when it is called.
        """
        self.check()
        self._set_work(self._begin())

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Block until the operation is done, at once if it is inactive; then it can be started again.

        Args:
            timeout: how long to wait here; default: as long as the operation itself may take.

        Returns:
            True.

        Raises:
            CollectiveTimeoutError: ``timeout`` has passed; the operation goes on, and stays active.
            DistError: the operation has failed; it is inactive.
        """
        work = self._work
        if work is None:
            return True
        try:
            return work.wait() if timeout is None else work.wait(timeout)
        finally:
            if work.is_completed():
                self._set_work(None)
                self._end(work)

    def __call__(self) -> None:
        """Do what :meth:`start` and :meth:`wait` do; raise the same errors."""
        self.start()
        self.wait()

    def is_active(self) -> bool:
        """Return whether it was started and not waited for since."""
        return self._work is not None

    def is_completed(self) -> bool:
        """Return whether :meth:`wait` would not block."""
        return self._work is None or self._work.is_completed()

    def source_rank(self) -> int:
        """Return the sender's rank in the group, if this is a receive that was waited for; else -1."""
        return self._source

    def check(self) -> None:
        """Raise the error of :meth:`start` if the operation cannot be started."""
        if self.is_active():
            raise NotReadyError(
                f"{self.name}: this persistent operation was started before; call its wait() first"
            )
        if self._communicator is not None:
            self._communicator.queue.refuse_if_closed(self.name)
        if moved := self._moved():
            raise InvalidArgumentError(f"{self.name}: {moved}")

    def _moved(self) -> str:
        """Describe the tensor that has other memory than before; return "" if there is none."""
        for tensor, address, nbytes in self._memory:
            storage = tensor.untyped_storage()
            if tensor.data_ptr() != address or storage.nbytes() != nbytes:
                return (
                    f"a tensor, now of shape {tuple(tensor.shape)}, has been given other memory, or its"
                    f" storage was resized (from {nbytes} to {storage.nbytes()} bytes), since the persistent"
                    " operation was made; make a new one for it"
                )
        return ""

    def _begin(self) -> Work:
        """Begin it in the group's order."""
        return Work.finished(self.name, [])

    def _set_work(self, work: Work | None) -> None:
        """Make it active with a Work, or inactive with None."""
        self._work = work

    def _end(self, work: Work) -> None:
        """Note the sender's rank when the operation has ended."""

    def __repr__(self) -> str:
        state = "active" if self.is_active() else "inactive"
        return f"<{type(self).__name__.lstrip('_')} {self.name}, {state}>"


@untraced
class PersistentCollective(PersistentOperation):
    """A persistent collective on the tensors of ``call``, which were checked."""

    def __init__(
        self,
        communicator: Communicator,
        row: Collective,
        call: Call,
        given: Sequence[torch.Tensor],
        op: ReduceOp | None,
        root: int | None,
    ) -> None:
        engine = communicator.engine
        name = row.name if op is None else f"{row.name}({op.name})"
        super().__init__(name, () if engine.is_fake else given, communicator)
        self._plan = engine.plan(row, call.dtype, op, root)
        self._factor = None if op is None else op.factor
        self._reads = call.inputs or call.outputs
        inputs, outputs = call.inputs, call.outputs
        if not engine.is_fake:
            inputs = [make_contiguous(tensor) for tensor in inputs]
            if self._factor is not None:
                inputs = [torch.empty_like(tensor) for tensor in inputs]
            outputs = inputs if row.in_place else [make_contiguous(tensor) for tensor in outputs]
        self._pieces = pieces(call, inputs, outputs)
        self._copied_in = copies_between(inputs, call.inputs)
        self._copied_out = (
            copies_between(call.outputs, outputs) if row.fills(root, self._communicator.rank) else []
        )
        self._queue = communicator.queue
        self._prepared: Prepared | None = None
        self._direct: Prepared | None = None

    def _begin(self) -> Work:
        work = self._queue.run(self._perform, self.name, True, reads=self._reads)
        assert work is not None
        return work

    def _perform(self, site: str | None) -> list[Any]:
        """Run the operation, whose turn it is."""
        communicator = self._communicator
        if moved := self._moved():
            raise DistError(f"{self.name}: {moved}")
        if self._prepared is None:
            self._prepared = communicator.engine.prepare(self._plan, *self._pieces)
            if not (self._copied_in or self._copied_out):
                self._direct = self._prepared
        for buffer, tensor in self._copied_in:
            buffer.copy_(tensor.detach())
            if self._factor is not None:
                communicator.engine.scale(buffer, self._factor)
        self._prepared(communicator.timeout_s, site)
        for tensor, buffer in self._copied_out:
            tensor.detach().copy_(buffer)
        return []

    def __call__(self) -> None:
        """See :meth:`PersistentOperation.__call__`; reaches the kernel in as few steps as possible."""
        communicator = self._communicator
        if (
            (direct := self._direct) is not None
            and not self.is_active()
            and not communicator.thread.pending
            and not self._queue.closed
            and not self._queue.state.started
            and not profiler._is_profiler_enabled
        ):
            for tensor, address, nbytes in self._memory:
                if tensor.data_ptr() != address or tensor.untyped_storage().nbytes() != nbytes:
                    break
            else:
                state = self._queue.state
                with communicator.lock:
                    try:
                        state.general = 1
                        if state.inside:
                            self._queue.await_entry()
                        if state.started:
                            self._queue.end_started()  # by another thread, since it was looked at above
                        direct(communicator.timeout_s)
                    finally:
                        state.general = 0
                return
        self.check()
        self._queue.run(self._perform, self.name, reads=self._reads)


@untraced
class PersistentMessage(PersistentOperation):
    """A persistent message from or to the memory of a tensor, which was checked."""

    def __init__(
        self, communicator: Communicator, name: str, tensor: torch.Tensor, rank: int | None, tag: int
    ) -> None:
        self._sends = name == "send"
        self._tensor, self._rank = tensor, rank
        self._buffer, self._tag = point_to_point.checked(
            communicator, tensor, tag, f"{name}_init", written=not self._sends
        )
        super().__init__(name, () if communicator.engine.is_fake else [tensor], communicator)

    def _begin(self) -> Work:
        communicator = self._communicator
        begin: Callable[..., Work] = point_to_point.begin_receive
        description = "recvAnySource" if self._rank is None else "recv"
        if self._sends:
            write_back([self._buffer], [self._tensor])
            begin, description = point_to_point.begin_send, "send"
        start = partial(begin, communicator, self._tensor, self._buffer, self._rank, self._tag)
        if profiler._is_profiler_enabled and profiling.wanted():
            with profiling.recorded(description, [self._tensor]):
                return start()
        return start()

    def _end(self, work: Work) -> None:
        self._source = work.source_rank()

    def __call__(self) -> None:
        """See :meth:`PersistentOperation.__call__`."""
        if profiler._is_profiler_enabled:
            super().__call__()
            return
        self.check()
        communicator = self._communicator
        if self._sends:
            write_back([self._buffer], [self._tensor])
            communicator.send(self._buffer, self._rank, self._tag)
            return
        self._source = communicator.recv(self._buffer, self._rank, self._tag)
        if not communicator.engine.is_fake:
            write_back([self._tensor], [self._buffer])


@untraced
class PersistentCall(PersistentOperation):
    """A persistent operation that calls the ordinary one at every start, for tensors not in host memory."""

    def __init__(self, communicator: Communicator, name: str, begin: Callable[[], Work | None]) -> None:
        super().__init__(name, (), communicator)
        self._start = begin

    def _begin(self) -> Work:
        return self._start() or Work.finished(self.name, [])

    def _end(self, work: Work) -> None:
        if self.name == "recv":
            self._source = work._source_rank()


def copies_between(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the pairs (target, source) that must be copied: those that are not in the same memory."""
    pairs = zip(targets, sources, strict=True)
    return [(target, source) for target, source in pairs if target.data_ptr() != source.data_ptr()]
