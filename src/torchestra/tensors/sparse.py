"""The sum over all ranks of sparse tensors in COO form.

Ranks have different numbers of entries, some none. So: (1) all exchange shapes and counts; (2) all gather all
ranks' indices, (3) and values, straight into one long list of entries in the order of the ranks;
(4) each adds up the values of equal indices. All add the same list in the same order, so the results are
bit-identical. A rank sends its entries once to each other, after adding up its own. Half precision adds in
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.interface import Engine
from torchestra.engine.kernels.reductions import default_float_mode
from torchestra.engine.local import reduces
from torchestra.engine.operations import ALL_GATHER, ALL_GATHER_INTO_TENSOR, DTYPE_NAMES, Kind
from torchestra.engine.recorder.callsites import call_site
from torchestra.errors import CollectiveMismatchError, InvalidArgumentError, InvalidArgumentTypeError
from torchestra.tensors.contiguity import contiguity_problem
from torchestra.types import ReduceOp

OPERATIONS = 3
"""How many operations of the engine an all_reduce consists of; one if there are no entries."""

_HEADS = replace(ALL_GATHER_INTO_TENSOR, kind=Kind.sparse_all_reduce)
_ENTRIES = replace(ALL_GATHER, kind=Kind.sparse_all_reduce)
_MAX_DIMENSIONS = 16
# A rank's description of its tensor, as int64: dtype, sparse dimensions, all dimensions, lengths, entries.
_HEAD = 4 + _MAX_DIMENSIONS
# Types whose entries torch cannot add up, or not precisely enough, and those in which it can.
_ADDED_AS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


def check(tensors: object, op: ReduceOp, name: str) -> list[torch.Tensor]:
    """Refuse all but sparse COO tensors of the CPU, alike except for their entries, to be summed."""
    if not isinstance(tensors, (list, tuple)) or not all(isinstance(t, torch.Tensor) for t in tensors):
        raise InvalidArgumentTypeError(f"{name}: expected a list of tensors, got {tensors!r}")
    if not tensors:
        raise InvalidArgumentError(f"{name}: requires non-empty tensor list")
    first: torch.Tensor = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.layout is not torch.sparse_coo or tensor.sparse_dim() != first.sparse_dim():
            raise InvalidArgumentError(
                f"{name}: invalid tensor layout at index {index}: expected torch.sparse_coo with"
                f" {first.sparse_dim() if first.layout is torch.sparse_coo else 'some'} sparse dimensions,"
                f" got {tensor.layout}"
            )
        if tensor.dtype != first.dtype:
            raise InvalidArgumentError(
                f"{name}: invalid tensor type at index {index}: expected {first.dtype}, got {tensor.dtype}"
            )
        if tensor.shape != first.shape:
            raise InvalidArgumentError(
                f"{name}: invalid tensor size at index {index}: expected {tuple(first.shape)}, got"
                f" {tuple(tensor.shape)}"
            )
        if tensor.device.type != "cpu":
            raise InvalidArgumentError(
                f"{name}: unsupported device type {tensor.device.type} at index {index}; move it to the CPU"
            )
        if tensor.__class__.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise InvalidArgumentError(
                f"{name}: the sparse tensor at index {index} is a {type(tensor).__name__}, which may have no"
                " memory of its own; give a plain one"
            )
        for part in (tensor._indices(), tensor._values()):
            if missing := contiguity_problem(part):
                raise InvalidArgumentError(f"{name}: a part of the sparse tensor at index {index} {missing}")
    if op.name != "SUM":
        raise InvalidArgumentError(
            f"{name}: unsupported reduction operation (allreduce of sparse tensors only works with"
            f" ReduceOp.SUM), got {op}"
        )
    if not reduces(first.dtype, op):
        raise InvalidArgumentError(f"{name}: {op.name} is not defined for tensors of dtype {first.dtype}")
    if first.dim() > _MAX_DIMENSIONS:
        raise InvalidArgumentError(
            f"{name}: sparse tensors may have {_MAX_DIMENSIONS} dimensions, got {first.dim()}"
        )
    return list(tensors)


def all_reduce(engine: Engine, tensors: Sequence[torch.Tensor], timeout_s: float, site: str | None) -> None:
    """Replace every one of the tensors by the sum of all tensors of all ranks, coalesced.

    Raises:
        CollectiveMismatchError: the ranks' tensors differ in dtype, shape or number of sparse dimensions.
    """
    like = tensors[0]
    indices, values = _own_entries(tensors)
    plan = engine.plan(_HEADS, torch.int64)
    heads = torch.empty((engine.size, _HEAD), dtype=torch.int64)
    engine.collective(plan, [_head(like, len(values))], [heads], timeout_s, site)
    _compare(heads, engine.rank, site)
    counts = heads[:, -1].tolist()
    all_indices = indices.new_empty((sum(counts), like.sparse_dim()))
    all_values = values.new_empty((sum(counts), *values.shape[1:]))
    for everybodys, own in ((all_indices, indices), (all_values, values)):
        if everybodys.numel():
            plan = engine.plan(_ENTRIES, own.dtype)
            engine.collective(plan, [own], everybodys.split(counts), timeout_s, site)
    total = _sparse(*_added_up(all_indices, all_values, like), like, coalesced=True)
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(total)


def _own_entries(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of these tensors' entries, one row each, and their values; each index once."""
    plain = [tensor.detach() for tensor in tensors]
    indices = torch.cat([tensor._indices().t() for tensor in plain])
    values = torch.cat([tensor._values() for tensor in plain])
    if len(plain) == 1 and plain[0].is_coalesced():
        return indices.contiguous(), values.contiguous()
    return _added_up(indices, values, plain[0])


def _added_up(
    indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries with those of equal index added up, in the order of the list."""
    if like.dtype is torch.uint64:
        wide = values.view(torch.int64)  # which adds to the same bits
    else:
        wide = values.to(_ADDED_AS.get(like.dtype, like.dtype))
    with default_float_mode():
        total = _sparse(indices, wide, like, coalesced=False).coalesce()
    summed = total._values()
    summed = summed.view(torch.uint64) if like.dtype is torch.uint64 else summed.to(like.dtype)
    return total._indices().t().contiguous(), summed.contiguous()


def _sparse(
    indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor, *, coalesced: bool
) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices.t(), values, like.shape, is_coalesced=coalesced, check_invariants=False
    )


def _head(tensor: torch.Tensor, entries: int) -> torch.Tensor:
    lengths = [*tensor.shape, *[0] * (_MAX_DIMENSIONS - tensor.dim())]
    numbers = [DTYPE_CODE[tensor.dtype], tensor.sparse_dim(), tensor.dim(), *lengths, entries]
    return torch.tensor(numbers, dtype=torch.int64)


def _compare(heads: torch.Tensor, rank: int, site: str | None) -> None:
    """Raise on every rank if they differ in more than the number of entries."""
    if bool((heads[:, :-1] == heads[0, :-1]).all()):
        return
    lines = "".join(f"\n  rank {peer} has {_described(head)}" for peer, head in enumerate(heads.tolist()))
    raise CollectiveMismatchError(
        f"all_reduce of sparse tensors, on rank {rank}, at {site or call_site()}: the ranks'"
        f" tensors do not fit together:{lines}\nNo entries were sent; the group stays usable."
    )


def _described(head: list[int]) -> str:
    dtype, sparse, dimensions, *lengths, entries = head
    shape = tuple(lengths[:dimensions])
    return f"{DTYPE_NAMES[dtype]}, shape {shape}, {sparse} sparse dimensions, {entries} entries"
