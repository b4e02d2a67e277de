"""Reductions over the ranks as formulas: the inputs of a rank, and the result."""

from __future__ import annotations

import functools
import math
import operator
from typing import NamedTuple

import torch

from torchestra.types import ReduceOp


class Reduction(NamedTuple):
    """A reduce operation, what a rank puts in (one or several tensors), and what comes out."""

    op: ReduceOp
    inputs: list[torch.Tensor]
    output: torch.Tensor


def simple(rank: int, size: int) -> list[Reduction]:
    """One tensor per rank; for the bitwise operations with different bits."""
    mine = torch.tensor([rank + 1.0])
    cases = [
        Reduction(ReduceOp.SUM, [mine], torch.tensor([size * (size + 1) / 2])),
        Reduction(ReduceOp.PRODUCT, [mine], torch.tensor([float(math.factorial(size))])),
        Reduction(ReduceOp.MIN, [mine], torch.tensor([1.0])),
        Reduction(ReduceOp.MAX, [mine], torch.tensor([float(size)])),
        Reduction(ReduceOp.AVG, [mine], torch.tensor([(size + 1) / 2])),
    ]
    for bit in range(1, 5):
        kept = [peer | 1 << 5 + bit for peer in range(size)]
        spread = [[peer * bit + index for index in range(bit)] for peer in range(size)]
        for op, values in (
            (ReduceOp.BAND, kept),
            (ReduceOp.BOR, [functools.reduce(operator.or_, own) for own in spread]),
            (ReduceOp.BXOR, [functools.reduce(operator.xor, own) for own in spread]),
        ):
            combine = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}[op.name]
            output = functools.reduce(combine, values)
            cases.append(Reduction(op, [_int(values[rank])], _int(output)))
    return cases


def _int(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


def several(rank: int, size: int, number: int) -> list[Reduction]:
    """``number`` tensors per rank, which hold 1, 2, 3, … over all ranks."""
    total = number * size
    inputs = [torch.tensor([float(number * rank + index + 1)]) for index in range(number)]
    outputs = {
        "SUM": total * (total + 1) / 2,
        "AVG": total * (total + 1) / 2 / size,  # as torch: by ranks, however many tensors they have
        "PRODUCT": float(math.factorial(total)),
        "MIN": 1.0,
        "MAX": float(total),
    }
    return [
        Reduction(ReduceOp(name), [each.clone() for each in inputs], torch.tensor([output]))
        for name, output in outputs.items()
    ]
