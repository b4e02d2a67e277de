"""Collectives through which gradients flow, in the form of torch.distributed.nn.functional.

They are for losses that join what several ranks have computed. Each is to be called by every rank of the
group in the same order, and so is backward(), in which the transposed collective runs: sums go back as sums,
what was sent comes back. Tensors are returned; what is given stays as it is, but for outputs that are named
so. Roots are global ranks. Derivatives of derivatives can be taken.

Raised: what the functions of :mod:`torchestra.collectives.functions` raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.autograd import Function

from torchestra.collectives import functions
from torchestra.types import ReduceOp
from torchestra.world.init import AnyGroup, get_rank, get_world_size

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

Tensors = tuple[torch.Tensor, ...]


def broadcast(tensor: torch.Tensor, src: int, group: AnyGroup | None = None) -> torch.Tensor:
    """The tensor of rank ``src``, whose gradient is the sum of all ranks' gradients; the others' is zero."""
    return cast(torch.Tensor, _through(_Broadcast, src, group, tensor))


def gather(tensor: torch.Tensor, dst: int = 0, group: AnyGroup | None = None) -> Tensors:
    """All ranks' tensors, which are of one shape, on rank ``dst``; zeros on the others."""
    return cast(Tensors, _through(_Gather, dst, group, tensor))


def scatter(tensors: Sequence[torch.Tensor], src: int = 0, group: AnyGroup | None = None) -> torch.Tensor:
    """Tensor number p of rank ``src`` on rank p. The other ranks give tensors of the same shapes."""
    return cast(torch.Tensor, _through(_Scatter, src, group, *tensors))


def reduce(
    tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, group: AnyGroup | None = None
) -> torch.Tensor:
    """The reduction of all ranks' tensors on rank ``dst``, its own tensor on each other one."""
    return cast(torch.Tensor, _through(_Reduce, dst, op, group, tensor))


def all_reduce(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, group: AnyGroup | None = None
) -> torch.Tensor:
    """The reduction of all ranks' tensors; its gradient is reduced by the same operation."""
    return cast(torch.Tensor, _through(_AllReduce, op, group, tensor))


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: AnyGroup | None = None,
) -> torch.Tensor:
    """Put the reduction of all ranks' tensors number p into the output of rank p, and return it."""
    return cast(torch.Tensor, _through(_ReduceScatter, op, group, output, *input_list))


def all_gather(tensor: torch.Tensor, group: AnyGroup | None = None) -> Tensors:
    """All ranks' tensors, which are of one shape."""
    return cast(Tensors, _through(_AllGather, group, tensor))


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: AnyGroup | None = None
) -> torch.Tensor:
    """Put all ranks' tensors, one after the other, into the output, and return it."""
    return cast(torch.Tensor, _through(_AllGatherFlat, output_tensor, group, input_tensor))


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: AnyGroup | None = None,
) -> Tensors:
    """Send tensor number p to rank p, and put what it sends here into output number p; the outputs."""
    return cast(Tensors, _through(_AllToAll, group, list(output_tensor_list), *input_tensor_list))


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AnyGroup | None = None,
) -> torch.Tensor:
    """Send ranges of the input's rows to the ranks, and put theirs into the output's rows; the output."""
    return cast(
        torch.Tensor, _through(_AllToAllSingle, group, output, output_split_sizes, input_split_sizes, input)
    )


def _through(function: type[Function], *arguments: Any) -> Any:
    return function.apply(*arguments)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that may be written to."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, src: int, group: AnyGroup | None, tensor: torch.Tensor) -> torch.Tensor:
        ctx.src, ctx.group = src, group
        result = _own(tensor)
        functions.broadcast(result, src, group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, _through(_Collect, ctx.src, ctx.group, grad)


class _Collect(Function):
    """What a broadcast is transposed: the sum on the root, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, dst: int, group: AnyGroup | None, tensor: torch.Tensor) -> torch.Tensor:
        ctx.dst, ctx.group = dst, group
        result = _own(tensor)
        functions.reduce(result, dst, ReduceOp.SUM, group)
        return result if get_rank() == dst else result.zero_()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, _through(_Broadcast, ctx.dst, ctx.group, grad)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, dst: int, group: AnyGroup | None, tensor: torch.Tensor) -> Tensors:
        ctx.dst, ctx.group = dst, group
        results = [torch.zeros_like(tensor) for _ in range(get_world_size(group))]
        functions.gather(tensor.detach(), results if get_rank() == dst else None, dst, group)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, _through(_Scatter, ctx.dst, ctx.group, *grads)


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, src: int, group: AnyGroup | None, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.src, ctx.group = src, group
        result = torch.zeros_like(tensors[0])
        sources = [tensor.detach() for tensor in tensors]
        functions.scatter(result, sources if get_rank() == src else None, src, group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, *_through(_Gather, ctx.src, ctx.group, grad)


class _Reduce(Function):
    @staticmethod
    def forward(
        ctx: Any, dst: int, op: ReduceOp, group: AnyGroup | None, tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.dst, ctx.group = dst, group
        result = _own(tensor)
        functions.reduce(result, dst, op, group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, None, _through(_Broadcast, ctx.dst, ctx.group, grad)


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, op: ReduceOp, group: AnyGroup | None, tensor: torch.Tensor) -> torch.Tensor:
        ctx.op, ctx.group = op, group
        result = _own(tensor)
        functions.all_reduce(result, op, group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, _through(_AllReduce, ctx.op, ctx.group, grad)


class _ReduceScatter(Function):
    @staticmethod
    def forward(
        ctx: Any, op: ReduceOp, group: AnyGroup | None, output: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.group = group
        functions.reduce_scatter(output.detach(), [tensor.detach() for tensor in inputs], op, group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, None, *_through(_AllGather, ctx.group, grad)


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, group: AnyGroup | None, tensor: torch.Tensor) -> Tensors:
        ctx.group = group
        results = [torch.empty_like(tensor) for _ in range(get_world_size(group))]
        functions.all_gather(results, tensor.detach(), group)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        own = torch.empty_like(grads[0])
        return None, _through(_ReduceScatter, ReduceOp.SUM, ctx.group, own, *grads)


class _AllGatherFlat(Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, group: AnyGroup | None, tensor: torch.Tensor) -> torch.Tensor:
        ctx.group, ctx.shape = group, tensor.shape
        functions.all_gather_into_tensor(output.detach(), tensor.detach(), group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        pieces = grad.reshape(get_world_size(ctx.group), *ctx.shape).unbind()
        own = torch.empty_like(pieces[0])
        return None, None, _through(_ReduceScatter, ReduceOp.SUM, ctx.group, own, *pieces)


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, group: AnyGroup | None, outputs: list[torch.Tensor], *inputs: torch.Tensor
    ) -> Tensors:
        ctx.group, ctx.shapes = group, [tensor.shape for tensor in inputs]
        targets = [output.detach() for output in outputs]
        functions.all_to_all(targets, [tensor.detach() for tensor in inputs], group)
        return tuple(targets)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        outputs = [grads[0].new_empty(shape) for shape in ctx.shapes]
        return None, None, *_through(_AllToAll, ctx.group, outputs, *grads)


class _AllToAllSingle(Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: AnyGroup | None,
        output: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        tensor: torch.Tensor,
    ) -> torch.Tensor:
        ctx.group, ctx.shape, ctx.splits = group, tensor.shape, (input_splits, output_splits)
        functions.all_to_all_single(output.detach(), tensor.detach(), output_splits, input_splits, group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        output = grad.new_empty(ctx.shape)
        return (
            None,
            None,
            None,
            None,
            _through(_AllToAllSingle, ctx.group, output, *ctx.splits, grad.contiguous()),
        )
