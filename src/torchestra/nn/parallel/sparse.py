"""Sparse gradients: the one place that knows how they are averaged over the ranks."""

from __future__ import annotations

import torch

from torchestra.communicator import Communicator
from torchestra.types import ReduceOp


def empty_like_sparse(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient that an embedding's weight has when none of its rows was looked up."""
    indices = torch.empty(1, 0, dtype=torch.int64)
    values = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype)
    return torch.sparse_coo_tensor(
        indices, values, parameter.shape, is_coalesced=True, check_invariants=False
    )


def reduce_sparse(communicator: Communicator, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """The sum (or, for AVG, the mean) of the ranks' sparse tensors, which may have any number of rows.

    Must be called by all ranks. The rows of all ranks are gathered and added up by the ranks in the same
    order, so the result is bit for bit the same on all of them.
    """
    own = tensor.coalesce()
    counts = torch.empty(communicator.size, dtype=torch.int64)
    communicator.all_gather_into_tensor(counts, torch.tensor([own._nnz()]))
    indices = [torch.empty(own.indices().size(0), int(count), dtype=torch.int64) for count in counts]
    values = [torch.empty(int(count), *own.values().shape[1:], dtype=own.dtype) for count in counts]
    communicator.all_gather(indices, own.indices())
    communicator.all_gather(values, own.values())
    total = torch.sparse_coo_tensor(
        torch.cat(indices, 1), torch.cat(values), own.shape, check_invariants=False
    ).coalesce()
    if op.name == "AVG":
        total.values().div_(communicator.size)
    return total
