"""The operations of a group of torch.distributed, run on torchestra's engine.

torch.distributed's Python calls these methods directly; its C++ parts (the reducer of
DistributedDataParallel, functional collectives) through pybind11, which finds them by name. So they have
torch's names and take torch's options. Most call the same method of a :class:`torchestra.ProcessGroup`; they
are derived from the table of operations. The most common have fast paths, since a small operation takes less
time than torch.distributed's own Python code around it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from torchestra.communicator.comm_debug import counted_as, is_watched, modes_on
from torchestra.communicator.communicator import Communicator
from torchestra.communicator.queue import CoalescedOperation, describe_coalesced
from torchestra.communicator.work import Work
from torchestra.errors import DistError, InvalidArgumentError
from torchestra.interop.torch_distributed.errors import as_torch_error
from torchestra.interop.torch_distributed.hooks import OperationHooks
from torchestra.interop.torch_distributed.options import convert_argument, reduction
from torchestra.interop.torch_distributed.works import FinishedWork, TorchestraWork, joined
from torchestra.process_group import ProcessGroup
from torchestra.process_group.forms import FORMS
from torchestra.process_group.tensor_lists import check_pieces
from torchestra.system.untraced import untraced
from torchestra.types import ReduceOp, Timeout

_SUM: Any = c10d.ReduceOp.SUM
_UNCOUNTED = contextlib.nullcontext()
_UNSET = timedelta(milliseconds=-1)
_BLOCKS = {"allgather_into_tensor": "_allgather_base_", "reduce_scatter_tensor": "_reduce_scatter_base_"}
_OPERATORS = {
    form.name: _BLOCKS.get(form.name, f"{form.name}_")
    for form in FORMS
    if hasattr(torch.ops.c10d, _BLOCKS.get(form.name, f"{form.name}_"))
}
"""By method: torch's operator for it, which passes the dispatcher where a group is C++."""


@untraced
class CoalescedBlock:
    """A block of coalesced operations: collectives start at its end, messages at once."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._collecting = contextlib.ExitStack()
        self._steps: list[CoalescedOperation] = self._collecting.enter_context(
            group.communicator.queue.coalescing()
        )
        self.messages: list[Work] = []

    def run(self) -> Work:
        self._collecting.close()
        works = self.messages
        if self._steps:
            description = describe_coalesced(self._steps)
            work = self._group.communicator.queue.run_coalesced(self._steps, description, async_op=True)
            assert work is not None
            works = [*works, work]
        return works[0] if len(works) == 1 else joined(works, "coalesced operations")

    def drop(self) -> None:
        """Abort the group instead of running the operations, because other ranks may wait for them."""
        self._collecting.close()
        if self._steps:
            error = DistError("an exception ended their block")
            self._group.communicator.queue.leave(describe_coalesced(self._steps), error)


@untraced
class Operations:
    """Runs the operations of a group of torch.distributed, which all ranks call in one order, messages apart.

    Attributes:
        inner: the group of torchestra.
    """

    inner: ProcessGroup
    _size: int
    _hooks: OperationHooks
    # None while the group has hooks.
    _fast_path: Communicator | None
    _block: CoalescedBlock | None

    def _other_group_on(self, device: str) -> Any:
        """Return the group that serves a type of device, or None if this one does."""
        raise NotImplementedError

    def _other_group_for(self, values: Sequence[Any]) -> Any:
        """Return the group that serves the first tensor of some arguments, or None if this one does."""
        tensor = _first_tensor(values)
        return None if tensor is None else self._other_group_on(tensor.device.type)

    # -- fast paths (each written out: one more call takes a tenth of their time), and the general path

    def _forward(self, name: str, torch_name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the same method of torchestra's group, or torch's of the group that serves the device."""
        if self._hooks:
            return self._hooks.around(name, args, kwargs, lambda: self._begin(name, torch_name, args, kwargs))
        return self._begin(name, torch_name, args, kwargs)

    def _begin(self, name: str, torch_name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        other = self._other_group_for([*args, *kwargs.values()])
        if other is not None:
            return getattr(other, torch_name)(*args, **kwargs)
        try:
            with counted_as(_OPERATORS.get(name)) if modes_on() else _UNCOUNTED:
                work = getattr(self.inner, name)(
                    *map(convert_argument, args),
                    **{key: convert_argument(value) for key, value in kwargs.items()},
                )
        except DistError as error:
            raise as_torch_error(error) from error.__cause__
        return TorchestraWork(work)

    def allreduce(self, tensors: Any = None, opts: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Replace the tensor on every rank with the reduction of all ranks' tensors."""
        fast = self._fast_path
        if (
            fast is not None
            and not (modes_on() and is_watched())
            and opts.__class__ is c10d.AllreduceOptions
            and tensors.__class__ is list
            and len(tensors) == 1
            and tensors[0].is_cpu
        ):
            op = ReduceOp.SUM if opts.reduceOp == _SUM else reduction(opts.reduceOp)
            try:
                work = fast.all_reduce(tensors[0], op, opts.asyncOp, _seconds(opts))
            except DistError as error:
                raise as_torch_error(error) from error.__cause__
            return FinishedWork(tensors) if work is None else TorchestraWork(work)
        return self._forward("allreduce", "allreduce", (tensors, opts, *args), kwargs)

    def broadcast(self, tensors: Any = None, opts: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Replace every rank's tensor with the root's."""
        fast = self._fast_path
        if (
            fast is not None
            and not (modes_on() and is_watched())
            and opts.__class__ is c10d.BroadcastOptions
            and tensors.__class__ is list
            and len(tensors) == 1
            and tensors[0].is_cpu
            and 0 <= opts.rootRank < self._size
        ):
            try:
                work = fast.broadcast(tensors[0], opts.rootRank, opts.asyncOp, _seconds(opts))
            except DistError as error:
                raise as_torch_error(error) from error.__cause__
            return FinishedWork(tensors) if work is None else TorchestraWork(work)
        return self._forward("broadcast", "broadcast", (tensors, opts, *args), kwargs)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:  # noqa: A002
        """Put every rank's tensor, one after the other, into the output."""
        fast = self._fast_path
        if (
            fast is not None
            and not (modes_on() and is_watched())
            and opts.__class__ is c10d.AllgatherOptions
            and output.is_cpu
            and input.is_cpu
        ):
            try:
                work = fast.all_gather_into_tensor(output, input, opts.asyncOp, _seconds(opts))
            except DistError as error:
                raise as_torch_error(error) from error.__cause__
            return FinishedWork([output]) if work is None else TorchestraWork(work)
        return self._forward("allgather_into_tensor", "all_gather_single", (output, input, opts), {})

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:  # noqa: A002
        """Reduce the ranks' inputs, and put this rank's piece of the result into its output."""
        fast = self._fast_path
        if (
            fast is not None
            and not (modes_on() and is_watched())
            and opts.__class__ is c10d.ReduceScatterOptions
            and output.is_cpu
            and input.is_cpu
        ):
            op = ReduceOp.SUM if opts.reduceOp == _SUM else reduction(opts.reduceOp)
            try:
                work = fast.reduce_scatter_tensor(output, input, op, opts.asyncOp, _seconds(opts))
            except DistError as error:
                raise as_torch_error(error) from error.__cause__
            return FinishedWork([output]) if work is None else TorchestraWork(work)
        return self._forward("reduce_scatter_tensor", "reduce_scatter_single", (output, input, opts), {})

    def all_to_all_single(
        self,
        output: Any,
        input: Any,  # noqa: A002
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Send each rank a range of the input's rows, and receive a range of the output's from each."""
        fast = self._fast_path
        if (
            fast is not None
            and not (modes_on() and is_watched())
            and opts.__class__ is c10d.AllToAllOptions
            and not output_split_sizes
            and not input_split_sizes
            and output.is_cpu
            and input.is_cpu
        ):
            try:
                work = fast.all_to_all_single(output, input, None, None, opts.asyncOp, _seconds(opts))
            except DistError as error:
                raise as_torch_error(error) from error.__cause__
            return FinishedWork([output]) if work is None else TorchestraWork(work)
        args = (output, input, output_split_sizes, input_split_sizes, opts)
        return self._forward("alltoall_base", "all_to_all_single", args, kwargs)

    def barrier(self, opts: Any = None, **kwargs: Any) -> Any:
        """Wait until every rank has called this, and its earlier operations are done."""
        fast = self._fast_path
        if fast is not None and opts.__class__ is c10d.BarrierOptions:
            try:
                work = fast.barrier(opts.asyncOp, _seconds(opts))
            except DistError as error:
                raise as_torch_error(error) from error.__cause__
            return FinishedWork([]) if work is None else TorchestraWork(work)
        return self._forward("barrier", "barrier", (opts,), kwargs)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:  # noqa: A002
        """Put every rank's tensor, one after the other, into the root's output (torch since 2.15)."""
        outputs = []
        if opts.rootRank == self.inner.rank():
            check_pieces(output, input, self._size, "gather_single")
            if not output.is_contiguous():
                raise InvalidArgumentError("gather_single: the output must be contiguous")
            outputs = [list(output.view(self._size, *input.shape).unbind(0))]
        return self._forward("gather", "gather", (outputs, [input], opts), {})

    # -- messages, and the rest

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        """Begin to send a tensor to a rank of the group; only the two ranks take part."""
        return self._message("send", tensors, dstRank, tag)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        """Begin to receive a tensor from a rank of the group; only the two ranks take part."""
        return self._message("recv", tensors, srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Begin to receive from whichever rank sends first."""
        return self._message("recv_anysource", tensors, tag)

    def _message(self, name: str, *args: Any) -> Any:
        if self._hooks:
            return self._hooks.around(name, args, {}, lambda: self._begin_message(name, args))
        return self._begin_message(name, args)

    def _begin_message(self, name: str, args: Sequence[Any]) -> Any:
        other = self._other_group_for(args)
        if other is not None:
            return getattr(other, name)(*args)
        try:
            work = getattr(self.inner, name)(*args)
        except DistError as error:
            raise as_torch_error(error) from error.__cause__
        if self._block is not None:
            self._block.messages.append(work)
        return TorchestraWork(work)

    def monitored_barrier(self, timeout: Timeout | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called this; else rank 0 tells which are missing."""
        try:
            self.inner.monitored_barrier(timeout, wait_all_ranks)
        except DistError as error:
            raise as_torch_error(error) from error.__cause__

    def _start_coalescing(self, device: torch.device) -> None:
        if (other := self._other_group_on(torch.device(device).type)) is not None:
            other._start_coalescing(device)
            return
        if self._block is not None:
            self._block.drop()  # torch's manager does not end its block if an exception leaves it
        self._block = CoalescedBlock(self.inner)

    def _end_coalescing(self, device: torch.device) -> Any:
        if (other := self._other_group_on(torch.device(device).type)) is not None:
            return other._end_coalescing(device)
        block, self._block = self._block, None
        if block is None:
            raise RuntimeError("_end_coalescing() was called without _start_coalescing()")
        return TorchestraWork(block.run())


def _seconds(opts: Any) -> float | None:
    """Return the time-out of an operation's options, None for the group's."""
    timeout = opts.timeout
    return None if timeout == _UNSET else timeout.total_seconds()


def _first_tensor(values: Sequence[Any]) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)) and (found := _first_tensor(value)) is not None:
            return found
    return None


def _forwarding(name: str, torch_name: str) -> Callable[..., Any]:
    def method(self: Operations, *args: Any, **kwargs: Any) -> Any:
        return self._forward(name, torch_name, args, kwargs)

    method.__name__ = torch_name
    method.__doc__ = f"See :meth:`torchestra.ProcessGroup.{name}`."
    return method


def _add_methods(name: str, torch_names: Sequence[str]) -> None:
    """Give :class:`Operations` the method of torchestra's name by all of torch's names for it."""
    known = next((vars(Operations)[each] for each in torch_names if each in vars(Operations)), None)
    for torch_name in torch_names:
        if torch_name not in vars(Operations):
            setattr(Operations, torch_name, known or _forwarding(name, torch_name))


for _form in FORMS:
    _add_methods(_form.name, [_form.name, *_form.aliases])
