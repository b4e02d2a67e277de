"""The values of the soak: formulas in rank and salt for what ranks send, and for the reductions of it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from torchestra import ReduceOp

PERIOD = 10_007  # of the values: no size that an algorithm cuts by is a multiple of it
LARGEST = 40 << 20
COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_VALUES = torch.randint(0, 12, (PERIOD,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
_BASE = _VALUES.repeat(LARGEST // PERIOD + 2)  # made once, before the ranks are forked


def values(rank: int, salt: int, length: int, dtype: torch.dtype, small: bool = False) -> torch.Tensor:
    """Return what a rank sends: small integers (0 to 2 for products): no dtype rounds or overflows."""
    start = (rank * 1009 + salt * 97) % PERIOD
    whole = _BASE[start : start + length]
    if dtype.is_complex:
        real = whole.to(torch.float64)
        return torch.complex(real, 11 - real).to(dtype)
    return (whole % 3 if small else whole).to(dtype)


def reduced(size: int, salt: int, length: int, dtype: torch.dtype, op: ReduceOp) -> torch.Tensor:
    """The reduction of what all ranks send, computed for one period and repeated."""
    part = min(length, PERIOD)
    parts = [values(rank, salt, part, dtype, small=op.name == "PRODUCT") for rank in range(size)]
    if op.name in COMBINE:
        result = functools.reduce(COMBINE[op.name], parts)
    elif dtype.is_complex or dtype.is_floating_point:
        plain = [torch.view_as_real(each) if dtype.is_complex else each for each in parts]
        whole = torch.stack(plain).double().sum(0) * (op.factor or 1.0) / (size if op.name == "AVG" else 1)
        result = (torch.view_as_complex(whole) if dtype.is_complex else whole).to(dtype)
    else:
        whole = torch.stack(parts).to(torch.int64).sum(0)
        result = (whole // size if op.name == "AVG" else whole).to(dtype)
    return result.repeat(-(-length // PERIOD))[:length] if length > PERIOD else result
