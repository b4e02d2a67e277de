"""The functional collectives: they change nothing, and return tensors that are waited for when used.

Each is to be called by every rank of the group, in the same order. ``group`` is a :data:`Group`; a rank's
number within it counts, not the global one. Reduce operations are given by name, ``"sum"``, ``"avg"``,
``"product"``, ``"min"``, ``"max"``, ``"band"``, ``"bor"``, ``"bxor"``, or as a :class:`ReduceOp`.

The collective runs while the program goes on; until the result was used (or :func:`wait_tensor` called) the
input must not be changed. In compiled programs the compiler ensures that.

Results are detached from the autograd graph, except for the functions that end in ``_autograd``: there a
gradient goes back through the transposed collective, which every rank of the group must run as well.

Raised by all of them, before anything was sent: the errors of :mod:`torchestra.functional.groups` for an
invalid group, and InvalidArgumentError for shapes; when the result is used, the errors of the collectives of
:mod:`torchestra.collectives.functions`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchestra.device_mesh import DeviceMesh
from torchestra.errors import InvalidArgumentError, InvalidShapeError, shown
from torchestra.functional.asynchronous import AsyncCollectiveTensor, awaited_later
from torchestra.functional.groups import (
    Group,
    checked_unless_traced,
    constant_while_traced,
    group_name,
    group_size,
)
from torchestra.functional.operators import check_differentiable, ops, reduction
from torchestra.process_group import ProcessGroup
from torchestra.types import ReduceOp
from torchestra.world.registry import current_world

__all__ = [
    "all_gather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_single_coalesced",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_reduce",
    "all_reduce_autograd",
    "all_reduce_coalesced",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "permute_tensor",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
    "wait_tensor",
]


_MAX_ROWS = (1 << 63) - 1  # the largest int of an operator


@checked_unless_traced
def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Wait until a collective's result is there, and return it. Any other tensor is returned as it is."""
    if type(tensor) is AsyncCollectiveTensor and not tensor.requires_grad:
        return tensor.trigger_wait()
    return ops.wait_tensor(tensor)  # type: ignore[no-any-return]


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


@checked_unless_traced
def broadcast(self: torch.Tensor, src: int, group: Group, tag: str = "") -> torch.Tensor:
    """Return the tensor of the group's rank ``src``; all ranks' tensors must have the same shape."""
    name = group_name(group, tag)
    size = group_size(group, name)
    if not 0 <= src < size:
        raise InvalidArgumentError(
            f"broadcast: `src` is {shown(src)}, but the group has ranks 0 to {size - 1}"
        )
    return awaited_later(ops.broadcast(_cut(self), src, name))


@checked_unless_traced
def all_reduce(self: torch.Tensor, reduceOp: str | ReduceOp, group: Group, tag: str = "") -> torch.Tensor:
    """Return the reduction of all ranks' tensors, bit for bit the same on every rank."""
    return all_reduce_autograd(_cut(self), reduceOp, group, tag)


@checked_unless_traced
def all_reduce_autograd(
    self: torch.Tensor, reduceOp: str | ReduceOp, group: Group, tag: str = ""
) -> torch.Tensor:
    """Run :func:`all_reduce`, with a derivative, for ``"sum"`` and ``"avg"``."""
    op = _reduction_name(reduceOp, self)
    return awaited_later(ops.all_reduce(self, op, group_name(group, tag)))


@checked_unless_traced
def all_reduce_coalesced(
    self: Sequence[torch.Tensor], reduceOp: str | ReduceOp, group: Group, tag: str = ""
) -> list[torch.Tensor]:
    """Run :func:`all_reduce` of several tensors."""
    op = _reduction_name(reduceOp)
    results = ops.all_reduce_coalesced([_cut(each) for each in self], op, group_name(group, tag))
    return [awaited_later(result) for result in results]


@checked_unless_traced
def all_gather_tensor(self: torch.Tensor, gather_dim: int, group: Group, tag: str = "") -> torch.Tensor:
    """Return all ranks' tensors, joined in dimension ``gather_dim``. They must be of the same shape."""
    return all_gather_tensor_autograd(_cut(self), gather_dim, group, tag)


@checked_unless_traced
def all_gather_tensor_autograd(
    self: torch.Tensor, gather_dim: int, group: Group, tag: str = ""
) -> torch.Tensor:
    """Run :func:`all_gather_tensor`, with a derivative: each rank gets the sum of all ranks' gradients."""
    name = group_name(group, tag)
    size = group_size(group, name)
    dim = _dimension(self, gather_dim, "gather_dim")
    result = awaited_later(ops.all_gather_into_tensor(self, size, name))
    if dim == 0:
        return result
    pieces: torch.Tensor = result.unflatten(0, (size, self.shape[0]))
    return pieces.movedim(0, dim).flatten(dim, dim + 1)


@checked_unless_traced
def all_gather_into_tensor_coalesced(
    self: Sequence[torch.Tensor], group: Group, tag: str = ""
) -> list[torch.Tensor]:
    """Run :func:`all_gather_tensor` of several tensors, in dimension 0."""
    name = group_name(group, tag)
    results = ops.all_gather_into_tensor_coalesced(
        [_cut(each) for each in self], group_size(group, name), name
    )
    return [awaited_later(result) for result in results]


@checked_unless_traced
def reduce_scatter_tensor(
    self: torch.Tensor, reduceOp: str | ReduceOp, scatter_dim: int, group: Group, tag: str = ""
) -> torch.Tensor:
    """Return this rank's piece of the reduction of all ranks' tensors, which is cut in dimension
    ``scatter_dim``.

    Raises:
        InvalidShapeError: the dimension's length is not a multiple of the group's size.
    """
    return reduce_scatter_tensor_autograd(_cut(self), reduceOp, scatter_dim, group, tag)


@checked_unless_traced
def reduce_scatter_tensor_autograd(
    self: torch.Tensor, reduceOp: str | ReduceOp, scatter_dim: int, group: Group, tag: str = ""
) -> torch.Tensor:
    """Run :func:`reduce_scatter_tensor`, with a derivative, for ``"sum"`` and ``"avg"``."""
    op = _reduction_name(reduceOp, self)
    name = group_name(group, tag)
    size = group_size(group, name)
    pieces = _pieces_first(self, scatter_dim, size, "")
    return awaited_later(ops.reduce_scatter_tensor(pieces, op, size, name))


@checked_unless_traced
def reduce_scatter_tensor_coalesced(
    inputs: Sequence[torch.Tensor],
    reduceOp: str | ReduceOp,
    scatter_dim: Sequence[int],
    group: Group,
    tag: str = "",
) -> list[torch.Tensor]:
    """Run :func:`reduce_scatter_tensor` of several tensors, each with a dimension of its own."""
    if len(scatter_dim) != len(inputs):
        raise InvalidShapeError(
            f"Length of scatter_dim ({len(scatter_dim)}) must equal length of inputs ({len(inputs)})"
        )
    op = _reduction_name(reduceOp)
    name = group_name(group, tag)
    size = group_size(group, name)
    pieces = [
        _pieces_first(_cut(each), dim, size, f" for tensor at index {index}")
        for index, (each, dim) in enumerate(zip(inputs, scatter_dim, strict=True))
    ]
    results = ops.reduce_scatter_tensor_coalesced(pieces, op, size, name)
    return [awaited_later(result) for result in results]


@checked_unless_traced
def all_to_all_single(
    self: torch.Tensor,
    output_split_sizes: Sequence[int | torch.SymInt] | None,
    input_split_sizes: Sequence[int | torch.SymInt] | None,
    group: Group,
    tag: str = "",
) -> torch.Tensor:
    """Send consecutive ranges of rows to the ranks, and return the rows that they send here.

    Split sizes count rows (dimension 0) per rank; None, for both, stands for equal ranges.
    """
    return all_to_all_single_autograd(_cut(self), output_split_sizes, input_split_sizes, group, tag)


@checked_unless_traced
def all_to_all_single_autograd(
    self: torch.Tensor,
    output_split_sizes: Sequence[int | torch.SymInt] | None,
    input_split_sizes: Sequence[int | torch.SymInt] | None,
    group: Group,
    tag: str = "",
) -> torch.Tensor:
    """Run :func:`all_to_all_single` with a derivative: a row's gradient goes back where the row came from."""
    if (output_split_sizes is None) != (input_split_sizes is None):
        raise InvalidShapeError(
            "output_split_sizes and input_split_sizes must either be specified together or both set to None"
        )
    for parameter, splits in (
        ("output_split_sizes", output_split_sizes),
        ("input_split_sizes", input_split_sizes),
    ):
        if splits is not None and not (isinstance(splits, (list, tuple)) and all(map(_is_length, splits))):
            raise InvalidShapeError(
                f"all_to_all_single: All {parameter} must be int or SymInt, and none negative, got"
                f" {shown(splits)}"
            )
    result = ops.all_to_all_single(self, output_split_sizes, input_split_sizes, group_name(group, tag))
    return awaited_later(result)


@checked_unless_traced
def permute_tensor(self: torch.Tensor, src_dst: Sequence[int], group: Group, tag: str = "") -> torch.Tensor:
    """Return the tensor that another rank sends to this one: rank r sends its own to rank ``src_dst[r]``.

    Shapes must be the same on all ranks. A rank to which no rank sends gets a tensor without rows.

    Raises:
        InvalidShapeError: ``src_dst`` does not name a different rank of the group for each rank.
    """
    name = group_name(group, tag)
    size = group_size(group, name)
    if (
        len(src_dst) != size
        or sorted(set(src_dst)) != sorted(src_dst)
        or not all(0 <= target < size for target in src_dst)
    ):
        raise InvalidShapeError(
            f"src_dst must name a rank from 0 to {size - 1} for each of the group's {size}, all different;"
            f" got {list(src_dst)}"
        )
    rank = _rank_in(group, name)
    rows = self.shape[0] if self.dim() else 1
    sent = [rows if target == src_dst[rank] else 0 for target in range(size)]
    received = [rows if src_dst[source] == rank else 0 for source in range(size)]
    return all_to_all_single(self, received, sent, name)


@constant_while_traced
def _rank_by_name(name: str) -> int:
    return current_world().group(name).rank()


def _rank_in(group: Group, name: str) -> int:
    if isinstance(group, ProcessGroup):
        return group.rank()
    if isinstance(group, DeviceMesh):
        return group.get_local_rank()
    if isinstance(group, tuple):
        return group[0].get_local_rank(group[1])
    return _rank_by_name(name)  # type: ignore[no-any-return]


def _reduction_name(op: str | ReduceOp, differentiated: torch.Tensor | None = None) -> str:
    lower = (op.name if isinstance(op, ReduceOp) else op).lower()
    reduction(lower)
    if differentiated is not None and differentiated.requires_grad:
        check_differentiable(lower)
    return lower


def _is_length(length: object) -> bool:
    return isinstance(length, torch.SymInt) or (type(length) is int and 0 <= length <= _MAX_ROWS)


def _dimension(tensor: torch.Tensor, dim: int, parameter: str) -> int:
    """Return the dimension's number, counted from the front."""
    dimensions = max(1, tensor.dim())
    if not -dimensions <= dim < dimensions:
        raise InvalidArgumentError(f"{parameter} is {dim}, but the tensor has {tensor.dim()} dimensions")
    return dim % dimensions


def _pieces_first(tensor: torch.Tensor, dim: int, size: int, which: str) -> torch.Tensor:
    """Move the pieces of the ranks, which dimension ``dim`` is cut into, to dimension 0."""
    dim = _dimension(tensor, dim, "scatter_dim")
    length = tensor.shape[dim] if tensor.dim() else 1
    if length % size:
        raise InvalidShapeError(
            f"input dimension {dim} ({length}) must be a multiple of group_size {size}{which}"
        )
    if dim == 0:
        return tensor
    pieces: torch.Tensor = tensor.unflatten(dim, (size, length // size))
    return pieces.movedim(dim, 0).flatten(0, 1)


# The names in newer versions of torch.
all_gather_single = all_gather_tensor
all_gather_single_autograd = all_gather_tensor_autograd
all_gather_single_coalesced = all_gather_into_tensor_coalesced
reduce_scatter_single = reduce_scatter_tensor
reduce_scatter_single_autograd = reduce_scatter_tensor_autograd
reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
