"""Differentiable collectives, in the form of torch.distributed.nn.functional.

They are for losses that combine the results of several ranks. Every rank of the group must call them in the
same order, and backward() too, which runs the transposed collective: the gradient of a sum is a sum, and the
gradient of a sent tensor goes back to its sender. The functions return their results, and change no argument
except outputs. Roots are global ranks. Derivatives of derivatives can be taken, since each
backward calls a function of this module.

They raise the errors of :mod:`torchestra.collectives.functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Union, cast

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
_Run = Callable[..., Union[torch.Tensor, Tensors]]


class _Collective(Function):
    """Runs a collective on tensors, and its transpose on their gradients."""

    @staticmethod
    def forward(ctx: Any, run: _Run, transposed: _Run, *tensors: torch.Tensor) -> torch.Tensor | Tensors:
        ctx.transposed = transposed
        return run(*[tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        found = ctx.transposed(*grads)
        return None, None, *((found,) if isinstance(found, torch.Tensor) else found)


def _one(run: _Run, transposed: _Run, *tensors: torch.Tensor) -> torch.Tensor:
    """Run a collective that returns one tensor."""
    return cast(torch.Tensor, _Collective.apply(run, transposed, *tensors))  # type: ignore[no-untyped-call]


def _several(run: _Run, transposed: _Run, *tensors: torch.Tensor) -> Tensors:
    """Run a collective that returns several tensors."""
    return cast(Tensors, _Collective.apply(run, transposed, *tensors))  # type: ignore[no-untyped-call]


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, so that a collective may overwrite the copy."""
    return tensor.clone(memory_format=torch.contiguous_format)


def broadcast(tensor: torch.Tensor, src: int, group: AnyGroup | None = None) -> torch.Tensor:
    """Return the tensor of rank ``src``, whose gradient is the sum of all ranks'; the others' is zero."""

    def run(tensor: torch.Tensor) -> torch.Tensor:
        result = _own(tensor)
        functions.broadcast(result, src, group)
        return result

    return _one(run, lambda grad: _sum_on(grad, src, group), tensor)


def _sum_on(tensor: torch.Tensor, dst: int, group: AnyGroup | None) -> torch.Tensor:
    """Return the sum on the root, zeros on the other ranks: the transpose of a broadcast."""

    def run(tensor: torch.Tensor) -> torch.Tensor:
        result = _own(tensor)
        functions.reduce(result, dst, ReduceOp.SUM, group)
        return result if get_rank() == dst else result.zero_()

    return _one(run, lambda grad: broadcast(grad, dst, group), tensor)


def gather(tensor: torch.Tensor, dst: int = 0, group: AnyGroup | None = None) -> Tensors:
    """Return all ranks' tensors, which are of one shape, on rank ``dst``; zeros on the others."""

    def run(tensor: torch.Tensor) -> Tensors:
        results = [torch.zeros_like(tensor) for _ in range(get_world_size(group))]
        functions.gather(tensor, results if get_rank() == dst else None, dst, group)
        return tuple(results)

    return _several(run, lambda *grads: scatter(grads, dst, group), tensor)


def scatter(tensors: Sequence[torch.Tensor], src: int = 0, group: AnyGroup | None = None) -> torch.Tensor:
    """Return tensor p of rank ``src`` on rank p. The other ranks pass tensors of the same shapes."""

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(tensors[0])
        functions.scatter(result, list(tensors) if get_rank() == src else None, src, group)
        return result

    return _one(run, lambda grad: gather(grad, src, group), *tensors)


def reduce(
    tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, group: AnyGroup | None = None
) -> torch.Tensor:
    """Return the reduction of all ranks' tensors on rank ``dst``; on every other rank, its own tensor."""

    def run(tensor: torch.Tensor) -> torch.Tensor:
        result = _own(tensor)
        functions.reduce(result, dst, op, group)
        return result

    return _one(run, lambda grad: broadcast(grad, dst, group), tensor)


def all_reduce(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, group: AnyGroup | None = None
) -> torch.Tensor:
    """Return the reduction of all ranks' tensors; its gradient is reduced by the same operation."""

    def run(tensor: torch.Tensor) -> torch.Tensor:
        result = _own(tensor)
        functions.all_reduce(result, op, group)
        return result

    return _one(run, lambda grad: all_reduce(grad, op, group), tensor)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: AnyGroup | None = None,
) -> torch.Tensor:
    """Put the reduction of all ranks' p-th tensors into the output of rank p, and return it."""

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        functions.reduce_scatter(result := output.detach(), list(tensors), op, group)
        return result

    return _one(run, lambda grad: all_gather(grad, group), *input_list)


def all_gather(tensor: torch.Tensor, group: AnyGroup | None = None) -> Tensors:
    """Return all ranks' tensors, which are of one shape."""

    def run(tensor: torch.Tensor) -> Tensors:
        results = [torch.empty_like(tensor) for _ in range(get_world_size(group))]
        functions.all_gather(results, tensor, group)
        return tuple(results)

    return _several(run, lambda *grads: _reduce_scattered(grads, group), tensor)


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: AnyGroup | None = None
) -> torch.Tensor:
    """Put all ranks' tensors, one after the other, into the output, and return it."""
    shape = input_tensor.shape

    def run(tensor: torch.Tensor) -> torch.Tensor:
        functions.all_gather_into_tensor(result := output_tensor.detach(), tensor, group)
        return result

    def transposed(grad: torch.Tensor) -> torch.Tensor:
        return _reduce_scattered(grad.reshape(get_world_size(group), *shape).unbind(), group)

    return _one(run, transposed, input_tensor)


def _reduce_scattered(tensors: Sequence[torch.Tensor], group: AnyGroup | None) -> torch.Tensor:
    """Return this rank's part of the ranks' sum: the transpose of an all_gather."""
    return reduce_scatter(torch.empty_like(tensors[0]), tensors, ReduceOp.SUM, group)


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: AnyGroup | None = None,
) -> Tensors:
    """Send tensor p to rank p, and put the one received from it into output p; return the outputs."""
    shapes = [tensor.shape for tensor in input_tensor_list]

    def run(*tensors: torch.Tensor) -> Tensors:
        outputs = [output.detach() for output in output_tensor_list]
        functions.all_to_all(outputs, list(tensors), group)
        return tuple(outputs)

    def transposed(*grads: torch.Tensor) -> Tensors:
        return all_to_all([grads[0].new_empty(shape) for shape in shapes], grads, group)

    return _several(run, transposed, *input_tensor_list)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AnyGroup | None = None,
) -> torch.Tensor:
    """Send ranges of the input's rows to the ranks, and put theirs into the output's rows; return it."""
    shape = input.shape

    def run(tensor: torch.Tensor) -> torch.Tensor:
        result = output.detach()
        functions.all_to_all_single(result, tensor, output_split_sizes, input_split_sizes, group)
        return result

    def transposed(grad: torch.Tensor) -> torch.Tensor:
        own = grad.new_empty(shape)
        return all_to_all_single(own, grad.contiguous(), input_split_sizes, output_split_sizes, group)

    return _one(run, transposed, input)
