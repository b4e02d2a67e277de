"""Compute reductions plainly, in the order of ranks, with torch and NumPy alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from torchestra.types import ReduceOp

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
ARITHMETIC = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)

# Every pair of dtype and operation that there is.
DEFINED = (
    [(dtype, op) for dtype in FLOATS for op in ARITHMETIC]
    + [(dtype, op) for dtype in COMPLEX for op in (ReduceOp.SUM, ReduceOp.AVG)]
    + [(dtype, op) for dtype in INTEGERS for op in ARITHMETIC + BITWISE]
    + [(torch.bool, op) for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, *BITWISE)]
)


def sample(dtype: torch.dtype, length: int, seed: int) -> torch.Tensor:
    """Random values of a dtype: all the bits of integers, and the odd ones among the floats."""
    dice = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (length,), generator=dice).bool()
    if dtype in INTEGERS:
        raw = torch.randint(0, 256, ((length + 1) * dtype.itemsize,), generator=dice, dtype=torch.uint8)
        return raw.view(dtype)[:length]
    if dtype in COMPLEX:
        part = torch.float32 if dtype == torch.complex64 else torch.float64
        return torch.complex(sample(part, length, seed), sample(part, length, seed + 1))
    values = torch.randn(length, generator=dice, dtype=torch.float64) * 3
    limits = torch.finfo(dtype)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, limits.tiny / 4, limits.max])
    odd = torch.rand(length, generator=dice) < 0.1
    which = torch.randint(0, len(special), (length,), generator=dice)
    return torch.where(odd, special[which].double(), values).to(dtype)


def reduced(tensors: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """The reduction of the tensors of all ranks."""
    dtype, number = tensors[0].dtype, len(tensors)
    if op.name == "PREMUL_SUM":
        return reduced([tensor * op.factor for tensor in tensors], ReduceOp.SUM)
    if dtype in COMPLEX:
        real, imaginary = (reduced([part(t) for t in tensors], op) for part in (torch.real, torch.imag))
        return torch.complex(real, imaginary)
    if dtype in (torch.bfloat16, torch.float16):
        return reduced([tensor.float() for tensor in tensors], op).to(dtype)
    arrays = [tensor.numpy() for tensor in tensors]
    with np.errstate(all="ignore"):
        total = np.asarray(functools.reduce(_operator(dtype, op.name), arrays))
        if op.name == "AVG":
            total = total / total.dtype.type(number) if dtype in FLOATS else _truncated(total, number)
    return torch.from_numpy(np.array(total))


def _operator(dtype: torch.dtype, name: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    if dtype == torch.bool:
        return {
            "SUM": np.logical_or,
            "MAX": np.logical_or,
            "BOR": np.logical_or,
            "BXOR": np.logical_xor,
        }.get(name, np.logical_and)
    return {
        "SUM": np.add,
        "AVG": np.add,
        "PRODUCT": np.multiply,
        "MIN": np.minimum,
        "MAX": np.maximum,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }[name]


def _truncated(total: np.ndarray, number: int) -> np.ndarray:
    """Integer division that rounds towards zero."""
    quotient = [abs(int(value)) // number * (-1 if value < 0 else 1) for value in total.flat]
    return np.array(quotient, dtype=total.dtype).reshape(total.shape)


def same_bits(found: torch.Tensor, expected: torch.Tensor, *, signed_zeros: bool = True) -> bool:
    """Return whether two tensors hold the same bits; but any NaN is as good as any other."""
    if found.dtype in COMPLEX:
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not found.numel():
        return True
    if found.dtype not in FLOATS:
        return torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.dtype.itemsize]
    equal = found.contiguous().view(integers) == expected.contiguous().view(integers)
    if not signed_zeros:
        equal |= found == expected
    return bool((equal | (found.isnan() & expected.isnan())).all())
