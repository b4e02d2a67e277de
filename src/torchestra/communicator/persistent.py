"""Operations that are set up once and started again and again (MPI-4, "Persistent Communication").

The work that an ordinary operation repeats on every call is done once: its arguments are checked, the
engine's plan is looked up, tensors that are not contiguous get buffers, and if the engine has kernels, kernel
and arguments are fixed (:meth:`~torchestra.engine.interface.Engine.prepare`). If there are entries
(entries.py), a synchronous start then runs only machine code (engine/entries/persistent.py); else, with
nothing pending, it takes a lock and calls the kernel. Other ranks cannot tell it from an ordinary operation.

An engine prepares when the operation's turn first comes, not before: memory that the kernels share (the
tables by peer) belongs to the running operation.

The addresses that are kept are valid until a storage is resized, which gives it other memory. So every start
compares addresses and lengths; and so does an operation that had to wait for its turn.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd import profiler

from torchestra.communicator import point_to_point, profiling
from torchestra.communicator.entries import request_of_collective, request_of_message
from torchestra.communicator.host_staging import is_on_gpu, tensors_in
from torchestra.communicator.work import Work
from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.entries import persistent as native
from torchestra.engine.entries.running import WORDS
from torchestra.engine.entry_layout import Request
from torchestra.engine.interface import Prepared
from torchestra.engine.native.callable_type import NativeCallable, bind
from torchestra.engine.native.kernel import address_of
from torchestra.engine.operations import Collective
from torchestra.errors import DistError, InvalidArgumentError, NotReadyError
from torchestra.tensors.arguments import Call, check_call, pieces
from torchestra.tensors.contiguity import made_plain, write_back
from torchestra.tensors.override import OverriddenError
from torchestra.types import ReduceOp, Timeout

if TYPE_CHECKING:
    from torchestra.communicator.communicator import Communicator

__all__ = ["PersistentOperation", "persistent_collective", "persistent_message"]

_KNOWN = (torch.Tensor, torch.nn.Parameter)


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
        self._memory = [
            (tensor, tensor.data_ptr(), storage, storage.nbytes())
            for tensor in tensors
            for storage in (tensor.untyped_storage(),)
        ]
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
        if self._work is not None:
            raise NotReadyError(
                f"{self.name}: this persistent operation was started before; call its wait() first"
            )
        if self._communicator is not None:
            self._communicator.queue.refuse_if_closed(self.name)
        if moved := self._moved():
            raise InvalidArgumentError(f"{self.name}: {moved}")

    def _moved(self) -> str:
        """Describe the tensor that has other memory than before; return "" if there is none."""
        for tensor, address, storage, nbytes in self._memory:
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


class _Collective(PersistentOperation):
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
            inputs = [made_plain(tensor) for tensor in inputs]
            if self._factor is not None:
                inputs = [torch.empty_like(tensor) for tensor in inputs]
            outputs = inputs if row.in_place else [made_plain(tensor) for tensor in outputs]
        self._pieces = pieces(call, inputs, outputs)
        self._copied_in = _copies(inputs, call.inputs)
        self._copied_out = _copies(call.outputs, outputs) if row.fills(root, self._communicator.rank) else []
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
            and self._work is None
            and not communicator.thread.pending
            and not self._queue.closed
            and not profiler._is_profiler_enabled
        ):
            for tensor, address, storage, nbytes in self._memory:
                if tensor.data_ptr() != address or storage.nbytes() != nbytes:
                    break
            else:
                state = self._queue.state
                with communicator.lock:
                    try:
                        state.general = 1
                        if state.inside:
                            self._queue.await_entry()
                        direct(communicator.timeout_s)
                    finally:
                        state.general = 0
                return
        self.check()
        self._queue.run(self._perform, self.name, reads=self._reads)


class _Message(PersistentOperation):
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


class _Native(NativeCallable, PersistentOperation):
    """A persistent operation that machine code runs once it has a request; else Python does."""

    _request: Request | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Until there is a request, use one that has only the general way.
        self._unbound = Request(general=type(self)._call_by_python)
        self._bind(native.call_in_general, self._unbound)

    @staticmethod
    def _call_by_python(operation: Any) -> None:
        """Run a call in Python."""
        raise NotImplementedError

    def _bind(self, function: Any, request: Request) -> None:
        bind(self, address_of(function), ctypes.addressof(request))

    def _set_work(self, work: Work | None) -> None:
        super()._set_work(work)
        if self._request is not None:
            self._request.active = int(work is not None)

    def _may_be_bound(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether machine code can read the tensors."""
        return self._request is None and all(type(tensor) in _KNOWN for tensor in tensors)


class _NativeCollective(_Native, _Collective):
    """A collective that machine code runs from its second start on."""

    @staticmethod
    def _call_by_python(operation: Any) -> None:
        _Collective.__call__(operation)

    def _perform(self, site: str | None) -> list[Any]:
        result = super()._perform(site)
        access, direct = self._communicator.entries.access, cast(Any, self._direct)
        tensors = [tensor for tensor, _, _, _ in self._memory]
        if access is not None and direct is not None and direct.name in WORDS and self._may_be_bound(tensors):
            general = type(self)._call_by_python
            self._request = request_of_collective(self._communicator, access, general, tensors, direct)
            self._request.active = int(self._work is not None)
            self._bind(native.collective, self._request)
        return result


class _NativeMessage(_Native, _Message):
    """A message that machine code sends or receives."""

    @staticmethod
    def _call_by_python(operation: Any) -> None:
        _Message.__call__(operation)

    def __init__(
        self, communicator: Communicator, name: str, tensor: torch.Tensor, rank: int | None, tag: int
    ) -> None:
        super().__init__(communicator, name, tensor, rank, tag)
        access = communicator.entries.access
        if access is None or _copies([self._buffer], [tensor]) or not self._may_be_bound([tensor]):
            return
        kind, peer = DTYPE_CODE[tensor.dtype], -1 if rank is None else rank
        words = (tensor.data_ptr(), tensor.nbytes, kind, peer, self._tag)
        general = type(self)._call_by_python
        self._request = request_of_message(communicator, access, general, tensor, words, sends=self._sends)
        self._request.source = -1
        self._bind(native.send if self._sends else native.recv, self._request)

    def source_rank(self) -> int:
        return self._source if self._request is None or self._sends else self._request.source

    def _end(self, work: Work) -> None:
        super()._end(work)
        if self._request is not None:
            self._request.source = self._source


class _Ordinary(PersistentOperation):
    """A persistent operation that calls the ordinary one at every start, for tensors not in host memory."""

    def __init__(self, communicator: Communicator, name: str, begin: Callable[[], Work | None]) -> None:
        super().__init__(name, (), communicator)
        self._start = begin

    def _begin(self) -> Work:
        return self._start() or Work.finished(self.name, [])

    def _end(self, work: Work) -> None:
        if self.name == "recv":
            self._source = work._source_rank()


def persistent_collective(
    communicator: Communicator,
    row: Collective,
    output: Any,
    input: Any,  # noqa: A002 - the row's word
    op: ReduceOp | None,
    root: int | None,
    splits: tuple[Any, Any],
) -> PersistentOperation:
    """Return a persistent operation of any row of the table; arguments as of Communicator.collective()."""
    engine, name = communicator.engine, f"{row.name}_init"
    communicator.queue.refuse_if_closed(name)
    ordinary = partial(communicator.collective, row, output, input, op, root, splits, async_op=True)
    if engine.delegates:
        return _Ordinary(communicator, row.name, ordinary)
    try:
        call = check_call(
            replace(row, name=name),
            output,
            input,
            op,
            root,
            splits,
            engine.rank,
            engine.size,
            not engine.is_fake,
        )
    except OverriddenError:
        return _Ordinary(communicator, row.name, ordinary)
    given = list(tensors_in([output, input]))
    if not engine.is_fake and not all(tensor.is_cpu for tensor in given):
        return _Ordinary(communicator, row.name, ordinary)
    kind = _Collective if communicator.entries.access is None else _NativeCollective
    return kind(communicator, row, call, given, op, root)


def persistent_message(
    communicator: Communicator, name: str, tensor: torch.Tensor, rank: int | None, tag: int
) -> PersistentOperation:
    """Return a persistent ``send`` or ``recv`` (its ``name``); ``rank`` is None to receive from any."""
    communicator.queue.refuse_if_closed(f"{name}_init")
    if communicator.engine.delegates or (isinstance(tensor, torch.Tensor) and is_on_gpu(tensor)):
        begin = communicator.isend if name == "send" else communicator.irecv
        return _Ordinary(communicator, name, partial(begin, tensor, rank, tag))  # type: ignore[arg-type]
    kind = _Message if communicator.entries.access is None else _NativeMessage
    return kind(communicator, name, tensor, rank, tag)


def _copies(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the pairs (target, source) that must be copied: those that are not in the same memory."""
    pairs = zip(targets, sources, strict=True)
    return [(target, source) for target, source in pairs if target.data_ptr() != source.data_ptr()]
