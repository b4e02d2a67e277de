"""Operations on several tensors of each rank, which run as one in the group's order.

They consist of the communicator's operations, which it checks, collects and runs together. They are to be
called by all ranks, with lists of the same length, dtypes and shapes. Callers have checked that the lists are
not empty, and that the tensors of each list go together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from torchestra.communicator.comm_debug import as_one, counted_as, modes_on
from torchestra.communicator.communicator import Communicator
from torchestra.communicator.device_routing import any_device, delegated
from torchestra.communicator.work import Work
from torchestra.engine.operations import (
    ALL_GATHER,
    ALL_GATHER_INTO_TENSOR,
    REDUCE_SCATTER_TENSOR,
    Collective,
)
from torchestra.tensors.checks import check_apart, check_tensor
from torchestra.tensors.contiguity import make_contiguous
from torchestra.types import ReduceOp

Tensors = Sequence[torch.Tensor]

_COALESCED = {
    ALL_GATHER: "allgather",
    ALL_GATHER_INTO_TENSOR: "allgather_into_tensor",
    REDUCE_SCATTER_TENSOR: "reduce_scatter_tensor",
}
"""What torch calls the collectives that it has in this form."""


def _check(
    communicator: Communicator, tensor: torch.Tensor, parameter: str, name: str, *, written: bool = False
) -> None:
    check_tensor(tensor, parameter, name, written=written, real=not communicator.engine.is_fake)


@as_one("allreduce_")
@any_device
def all_reduce_together(
    communicator: Communicator,
    tensors: Tensors,
    op: ReduceOp,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Work | None:
    """Replace all tensors of all ranks by the reduction of all of them.

    The tensors have one shape. This rank's are reduced first; AVG divides by the number of ranks. Sparse
    tensors are summed.
    """
    if tensors[0].layout is torch.sparse_coo:
        return communicator.all_reduce_sparse(tensors, op, async_op, timeout_s)
    for index, tensor in enumerate(tensors):
        _check(communicator, tensor, f"tensors[{index}]", "all_reduce", written=True)
    with communicator.queue.abort_on_error("all_reduce"):
        total = torch.empty_like(tensors[0], memory_format=torch.contiguous_format, requires_grad=False)
    with communicator.queue.coalescing() as steps:
        communicator.all_reduce(total, op, timeout_s=timeout_s)
    within = ReduceOp.SUM if op.name in ("AVG", "PREMUL_SUM") else op

    def operation(site: str | None) -> list[torch.Tensor]:
        communicator.engine.combine(total, [make_contiguous(tensor) for tensor in tensors], within)
        steps[0].operation(site)
        for tensor in tensors:
            tensor.detach().copy_(total)
        return list(tensors)

    return communicator.queue.run(operation, steps[0].description, async_op, reads=tensors)


@as_one("broadcast_")
@any_device
def broadcast_together(
    communicator: Communicator,
    tensors: Tensors,
    root: int,
    root_tensor: int,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Work | None:
    """Replace all tensors of all ranks by tensor number ``root_tensor`` of the root; they have one shape."""
    chosen = tensors[root_tensor]
    for index, tensor in enumerate(tensors):
        _check(communicator, tensor, f"tensors[{index}]", "broadcast", written=True)
    with communicator.queue.coalescing() as steps:
        communicator.broadcast(chosen, root, timeout_s=timeout_s)

    def operation(site: str | None) -> list[torch.Tensor]:
        steps[0].operation(site)
        for tensor in tensors:
            if tensor is not chosen:
                tensor.detach().copy_(chosen.detach())
        return list(tensors)

    return communicator.queue.run(operation, steps[0].description, async_op, reads=[chosen])


@as_one("allgather_")
@any_device
def all_gather_together(
    communicator: Communicator,
    outputs: Sequence[Tensors],
    tensors: Tensors,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Work | None:
    """Put all tensors of all ranks into each list of outputs: rank 0's first, in the order of its list.

    With n tensors on each rank there are n lists, of n tensors for each rank. All have one shape.
    """
    name = "all_gather"
    for number, row in enumerate(outputs):
        for index, output in enumerate(row):
            _check(communicator, output, f"outputs[{number}][{index}]", name, written=True)
        check_apart(row, f"outputs[{number}]", name)
    for index, tensor in enumerate(tensors):
        _check(communicator, tensor, f"tensors[{index}]", name)
    first, shape = tensors[0].detach(), tensors[0].shape
    with communicator.queue.abort_on_error(name):
        mine = first.new_empty((len(tensors), *shape))
        gathered = first.new_empty((communicator.size * len(tensors), *shape))
    with communicator.queue.coalescing() as steps:
        communicator.all_gather_into_tensor(gathered, mine, timeout_s=timeout_s)

    def operation(site: str | None) -> list[list[torch.Tensor]]:
        torch.stack([make_contiguous(tensor) for tensor in tensors], out=mine)
        steps[0].operation(site)
        for row in outputs:
            for output, piece in zip(row, gathered.unbind(), strict=True):
                output.detach().copy_(piece)
        return [list(row) for row in outputs]

    return communicator.queue.run(operation, name, async_op, reads=tensors)


@as_one("allreduce_coalesced_")
@delegated
def all_reduce_coalesced(
    communicator: Communicator,
    tensors: Tensors,
    op: ReduceOp,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Work | None:
    """Replace each tensor by the reduction of all ranks' tensors with its place in the list.

    A tensor that is in the list twice is reduced once. The shapes of dense tensors of one dtype are not
    compared between ranks, only their total number of elements.
    """
    batches = _batches(tensors)
    if len(batches[0]) == len(tensors) > 1:
        return communicator.all_reduce_list(tensors, op, async_op, timeout_s)
    with communicator.queue.coalescing() as steps:
        for batch in batches:
            if len(batch) == 1:
                communicator.all_reduce(batch[0], op, timeout_s=timeout_s)
            else:
                communicator.all_reduce_list(batch, op, timeout_s=timeout_s)
    return communicator.queue.run_coalesced(
        steps, f"all_reduce_coalesced({op.name})", async_op, list(tensors)
    )


def _batches(tensors: Tensors) -> list[list[torch.Tensor]]:
    """Batch the tensors, each once: dense ones by dtype and device, sparse ones by themselves."""
    batches: list[list[torch.Tensor]] = []
    dense: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if tensor.layout is not torch.strided:
            batches.append([tensor])
        elif (kind := (tensor.dtype, tensor.device)) in dense:
            dense[kind].append(tensor)
        else:
            batches.append(dense.setdefault(kind, [tensor]))
    return batches


@delegated
def coalesced(
    communicator: Communicator,
    row: Collective,
    outputs: Sequence[Any],
    inputs: Tensors,
    op: ReduceOp | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
    result: list[Any] | None = None,
) -> Work | None:
    """Run a collective on each pair of an output and an input, as one operation.

    Args:
        outputs: the outputs, each as the collective takes it: a tensor or a list of tensors.
        result: the result of the Work; default: the outputs.
    """
    as_coalesced = counted_as(f"{_COALESCED[row]}_coalesced_") if modes_on() else contextlib.nullcontext()
    with communicator.queue.coalescing() as steps, as_coalesced:
        for output, tensor in zip(outputs, inputs, strict=True):
            communicator.collective(row, output, tensor, op, timeout_s=timeout_s)
    description = f"{row.name}_coalesced" if op is None else f"{row.name}_coalesced({op.name})"
    return communicator.queue.run_coalesced(steps, description, async_op, result)


def all_gather_coalesced(
    communicator: Communicator,
    outputs: Sequence[Tensors],
    tensors: Tensors,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Work | None:
    """Put tensor i of rank p into ``outputs[p][i]`` on every rank."""
    result = [list(row) for row in outputs]
    by_tensor = list(zip(*outputs, strict=True))
    return coalesced(communicator, ALL_GATHER, by_tensor, tensors, None, async_op, timeout_s, result)
