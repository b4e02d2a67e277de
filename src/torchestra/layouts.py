"""Tensors whose memory is not laid out plainly: copied before an operation, and back after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def made_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor if its memory holds its elements one after the other, else such a copy of it."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def write_back(tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy what an operation has left in buffers into the tensors that they were made of; the tensors."""
    for tensor, buffer in zip(tensors, buffers, strict=True):
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(buffer)
    return list(tensors)
