"""Averages sparse gradients over the ranks."""

from __future__ import annotations

import torch

from torchestra.communicator.communicator import Communicator
from torchestra.engine.kernels.reductions import default_float_mode
from torchestra.types import ReduceOp


def empty_like_sparse(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient that an embedding's weight has when none of its rows was looked up."""
    device = parameter.device
    indices = torch.empty(1, 0, dtype=torch.int64, device=device)
    values = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=device)
    return torch.sparse_coo_tensor(
        indices, values, parameter.shape, is_coalesced=True, check_invariants=False
    )


def reduce_sparse(communicator: Communicator, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return the sum (or, for AVG, the mean) of the ranks' sparse tensors, of any number of rows.

    Must be called by all ranks. The tensor itself is not changed.
    """
    total = tensor.clone()
    communicator.all_reduce_sparse([total], ReduceOp.SUM)
    if op == ReduceOp.AVG:
        with default_float_mode():
            total._values().div_(communicator.size)
    return total
