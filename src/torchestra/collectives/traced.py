"""What torch.compile traces in place of a collective: the functional one, and a copy of what it returns.

So a function that is compiled with ``fullgraph=True`` may call collectives that change their tensors. With
``async_op=True``, and on ranks that are not in the group, the graph breaks, and the collective runs as it is.
So do messages, unless torch is told to trace them (``TORCHDYNAMO_ENABLE_P2P_COMPILATION=1``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from torchestra.process_group import NonMember, ProcessGroup
from torchestra.system.untraced import untraced
from torchestra.types import ReduceOp
from torchestra.world.init import AnyGroup
from torchestra.world.traced import break_graph, default_while_traced


def trace_in_place_of(function: Callable[..., Any]) -> None:
    """Have torch.compile trace what stands here for a function, if anything does, and never itself."""
    untraced(function, inlined=_TRACED.get(function.__name__))


def _is_traced(group: AnyGroup | None, differs: bool) -> bool:
    if differs or not (group is None or isinstance(group, ProcessGroup)):
        break_graph()
        return False
    return True


def traced_member(group: AnyGroup | None) -> ProcessGroup:
    """Return the group that a traced operation is of."""
    assert not isinstance(group, NonMember)  # the graph is broken for those
    return default_while_traced() if group is None else group


def _name(group: AnyGroup | None) -> str:
    return traced_member(group).group_name


def _put(tensor: torch.Tensor, result: torch.Tensor) -> None:
    tensor.detach().copy_(result.view(tensor.shape))


def _all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> None:
    if _is_traced(group, async_op):
        from torchestra import functional

        _put(tensor, functional.all_reduce(tensor, op, _name(group)))


def _all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> None:
    if _is_traced(group, async_op):
        from torchestra import functional

        gathered = functional.all_gather_tensor(input_tensor.reshape(-1), 0, _name(group))
        _put(output_tensor, gathered)


def _all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> None:
    if _is_traced(group, async_op or any(each.shape != tensor.shape for each in tensor_list)):
        from torchestra import functional

        gathered = functional.all_gather_tensor(tensor.reshape(-1), 0, _name(group))
        for output, piece in zip(tensor_list, gathered.chunk(len(tensor_list)), strict=True):
            _put(output, piece)


def _reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch.distributed's name
    op: ReduceOp = ReduceOp.SUM,
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> None:
    if _is_traced(group, async_op):
        from torchestra import functional

        piece = functional.reduce_scatter_tensor(input.reshape(-1), op, 0, _name(group))
        _put(output, piece)


def _all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch.distributed's name
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> None:
    if _is_traced(group, async_op):
        from torchestra import functional

        received = functional.all_to_all_single(input, output_split_sizes, input_split_sizes, _name(group))
        _put(output, received)


def _broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: AnyGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> None:
    if _is_traced(group, async_op or (src is None) == (group_src is None)):
        from torchestra import functional

        root = traced_member(group).to_group_rank(cast(int, src)) if group_src is None else group_src
        _put(tensor, functional.broadcast(tensor, root, _name(group)))


def _peer(group: AnyGroup | None, rank: int | None, group_rank: int | None) -> int:
    return traced_member(group).to_group_rank(cast(int, rank)) if group_rank is None else group_rank


def is_message_traced(group: AnyGroup | None, rank: int | None, group_rank: int | None) -> bool:
    """Return whether a message to or from this rank is traced; if not, the graph is broken."""
    from torchestra.functional import messages

    return _is_traced(group, not messages.are_traced() or (rank is None) == (group_rank is None))


def _isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: AnyGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Any:
    if is_message_traced(group, dst, group_dst):
        from torchestra.functional import messages

        return messages.begin_send(tensor, _peer(group, dst, group_dst), tag, _name(group))
    return None


def _irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: AnyGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Any:
    if is_message_traced(group, src, group_src):
        from torchestra.functional import messages

        return messages.begin_receive(tensor, _peer(group, src, group_src), tag, _name(group))
    return None


def _send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: AnyGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    _isend(tensor, dst, group, tag, group_dst).wait()


def _recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: AnyGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    _irecv(tensor, src, group, tag, group_src).wait()
    return traced_member(group).to_global_rank(cast(int, group_src)) if src is None else src


_TRACED: dict[str, Callable[..., Any]] = {
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_reduce": _all_reduce,
    "all_to_all_single": _all_to_all_single,
    "broadcast": _broadcast,
    "irecv": _irecv,
    "isend": _isend,
    "recv": _recv,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "send": _send,
}
