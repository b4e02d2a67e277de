"""Tensors, and ranges of a device's memory, as tensors of other elements over the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a contiguous tensor, as real numbers."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)


def spanning(ranges: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor | None:
    """Return ranges of memory, (address, bytes), as one tensor of bytes; None unless they are adjacent."""
    filled = [each for each in ranges if each[1]]
    ends = accumulate((length for _, length in filled), initial=filled[0][0] if filled else 0)
    if any(address != end for (address, _), end in zip(filled, ends, strict=False)):
        return None
    return at(filled[0][0] if filled else 0, sum(length for _, length in filled), device)


def at(address: int, length: int, device: torch.device) -> torch.Tensor:
    """Return memory of the device as a tensor of bytes."""
    if not length:
        return torch.empty(0, dtype=torch.uint8, device=device)
    view = _Memory(address, length)
    if device.type == "cpu":
        return torch.from_numpy(np.asarray(view))
    return torch.as_tensor(view, device=device)


class _Memory:
    """Describe memory by the protocols that NumPy and torch read."""

    def __init__(self, address: int, length: int) -> None:
        self.__array_interface__ = self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
