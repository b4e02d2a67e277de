"""Plain calls of torch.distributed's most common functions, which skip torch's own Python.

That takes some three microseconds, where a small operation takes half of one. A call is plain if

* it is synchronous, and its group is torchestra's, serves the CPU and has no hooks;
* no operations are being coalesced, and no mode of torch is on in this thread;
* its tensors are the CPU's, of no subclass and not complex, its reduction is named by a constant of torch's,
  and a root, source or destination is a rank of the default group.

Every other call runs torch's function. Both ways end in the same operation of the group with the same
arguments, so ranks may differ in which they go.

Each function has torch's signature and is written out, as the methods in operations.py are, which serve
torch's functions and its C++: one more call would take a tenth of their time.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from torchestra.communicator.comm_debug import modes_on
from torchestra.communicator.communicator import Communicator
from torchestra.errors import DistError
from torchestra.interop.redirection import redirect
from torchestra.interop.torch_distributed.errors import as_torch_error
from torchestra.interop.torch_distributed.group import TorchestraGroup
from torchestra.types import ReduceOp

_Function = Callable[..., Any]
_SUM = c10d.ReduceOp.SUM
_NAMES = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_CONSTANTS = {id(getattr(c10d.ReduceOp, name)): getattr(ReduceOp, name) for name in _NAMES}
"""By torch's constant, which lives as long as the process; its value takes as long to compare as all else."""
_Tensor = torch.Tensor
_function_modes_on = torch._C._len_torch_function_stack


def serve_plain_calls() -> None:
    """Make these functions, as far as this torch has them, run plain calls on groups of torchestra."""
    for names, make in _SERVED.items():
        function = next((each for name in names.split() if (each := getattr(c10d, name, None))), None)
        if function is not None:
            redirect(function, make)


def _communicator(group: Any) -> Communicator | None:
    """Return what runs a plain call on a group; None if no call on it is plain at present."""
    ours = c10d._world.default_pg if group is None else group
    if (
        type(ours) is not TorchestraGroup  # its __class__ is Gloo's under the switch
        or c10d._world.pg_coalesce_state
        or modes_on()
        or _function_modes_on()
    ):
        return None
    fast: Communicator | None = ours._fast_path
    return fast


def _is_plain(tensor: Any) -> bool:
    return tensor.__class__ is _Tensor and tensor.is_cpu and not tensor.is_complex()


def _communicator_of_all(group: Any, rank: Any) -> Communicator | None:
    """Return likewise what runs a call with a rank in it, which must be a number in the default group."""
    if rank.__class__ is not int or not (group is None or group is c10d._world.default_pg):
        return None
    fast = _communicator(group)
    return fast if fast is not None and 0 <= rank < fast.size else None


def _all_reduce(original: _Function) -> _Function:
    def all_reduce(tensor: Any, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Any:
        fast, reduction = _communicator(group), _CONSTANTS.get(id(op))
        if fast is None or reduction is None or async_op or not _is_plain(tensor):
            return original(tensor, op, group, async_op)
        try:
            return fast.all_reduce(tensor, reduction)
        except DistError as error:
            raise as_torch_error(error) from error.__cause__

    return all_reduce


def _reduce(original: _Function) -> _Function:
    def reduce(
        tensor: Any,
        dst: int | None = None,
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Any:
        fast, reduction = _communicator_of_all(group, dst), _CONSTANTS.get(id(op))
        if fast is None or reduction is None or async_op or group_dst is not None or not _is_plain(tensor):
            return original(tensor, dst, op, group, async_op, group_dst)
        try:
            return fast.reduce(tensor, reduction, dst)  # type: ignore[arg-type]
        except DistError as error:
            raise as_torch_error(error) from error.__cause__

    return reduce


def _broadcast(original: _Function) -> _Function:
    def broadcast(
        tensor: Any,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Any:
        fast = _communicator_of_all(group, src)
        if fast is None or async_op or group_src is not None or not _is_plain(tensor):
            return original(tensor, src, group, async_op, group_src)
        try:
            return fast.broadcast(tensor, src)  # type: ignore[arg-type]
        except DistError as error:
            raise as_torch_error(error) from error.__cause__

    return broadcast


def _all_gather_single(original: _Function) -> _Function:
    def all_gather_single(
        output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        fast = _communicator(group)
        if fast is None or async_op or not _is_plain(input_tensor) or not _is_plain(output_tensor):
            return original(output_tensor, input_tensor, group, async_op)
        try:
            return fast.all_gather_into_tensor(output_tensor, input_tensor)
        except DistError as error:
            raise as_torch_error(error) from error.__cause__

    return all_gather_single


def _reduce_scatter_single(original: _Function) -> _Function:
    def reduce_scatter_single(
        output: Any,
        input: Any,  # noqa: A002
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        fast, reduction = _communicator(group), _CONSTANTS.get(id(op))
        if fast is None or reduction is None or async_op or not _is_plain(input) or not _is_plain(output):
            return original(output, input, op, group, async_op)
        try:
            return fast.reduce_scatter_tensor(output, input, reduction)
        except DistError as error:
            raise as_torch_error(error) from error.__cause__

    return reduce_scatter_single


def _all_to_all_single(original: _Function) -> _Function:
    def all_to_all_single(
        output: Any,
        input: Any,  # noqa: A002
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        fast = _communicator(group)
        uneven = output_split_sizes is not None or input_split_sizes is not None
        if fast is None or async_op or uneven or not _is_plain(input) or not _is_plain(output):
            return original(output, input, output_split_sizes, input_split_sizes, group, async_op)
        try:
            return fast.all_to_all_single(output, input)
        except DistError as error:
            raise as_torch_error(error) from error.__cause__

    return all_to_all_single


def _barrier(original: _Function) -> _Function:
    def barrier(
        group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: timedelta | None = None
    ) -> Any:
        fast = _communicator(group)
        if fast is None or async_op or device_ids is not None or timeout is not None:
            more = () if timeout is None else (timeout,)  # which torch 2.10 does not take
            return original(group, async_op, device_ids, *more)
        try:
            return fast.barrier()
        except DistError as error:
            raise as_torch_error(error) from error.__cause__

    return barrier


def _send(original: _Function) -> _Function:
    def send(
        tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
    ) -> Any:
        fast = _communicator_of_all(group, dst)
        if fast is None or group_dst is not None or dst == fast.rank or not _is_plain(tensor):
            return original(tensor, dst, group, tag, group_dst)
        try:
            return fast.send(tensor, dst, tag)  # type: ignore[arg-type]
        except DistError as error:
            raise as_torch_error(error) from error.__cause__

    return send


def _recv(original: _Function) -> _Function:
    def recv(
        tensor: Any, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
    ) -> Any:
        fast = _communicator_of_all(group, src)
        if fast is None or group_src is not None or src == fast.rank or not _is_plain(tensor):
            return original(tensor, src, group, tag, group_src)
        try:
            return fast.recv(tensor, src, tag)
        except DistError as error:
            raise as_torch_error(error) from error.__cause__

    return recv


_SERVED: dict[str, Callable[[_Function], _Function]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather_single all_gather_into_tensor": _all_gather_single,
    "reduce_scatter_single reduce_scatter_tensor": _reduce_scatter_single,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
    "send": _send,
    "recv": _recv,
}
"""By torch's name for a function, and by that of older versions: what makes the function in its place."""
