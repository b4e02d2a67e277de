"""The arithmetic by itself: every dtype and operation against a plain computation, bit for bit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from references import BITWISE, DEFINED, reduced, same_bits, sample
from torchestra.engine import reductions
from torchestra.types import ReduceOp

_PROTOTYPE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
_IDS = [f"{str(dtype)[6:]}-{op.name}" for dtype, op in DEFINED]


def reduce_into(target: torch.Tensor, sources: list[torch.Tensor], op: ReduceOp) -> None:
    table = np.array([source.data_ptr() for source in sources], dtype=np.int64)
    function = _PROTOTYPE(reductions.reduction(target.dtype, op))
    function(target.data_ptr(), table.ctypes.data, len(sources), target.numel())


@pytest.mark.parametrize(("dtype", "op"), DEFINED, ids=_IDS)
def test_every_dtype_and_operation(dtype: torch.dtype, op: ReduceOp) -> None:
    """Any number of sources, lengths with and without a rest, targets at any address of an element."""
    for number in (1, 2, 3, 5):
        for length in (0, 1, 31, 300):
            sources = [sample(dtype, length, seed=100 * number + index) for index in range(number)]
            target = torch.zeros(length + 3, dtype=dtype)[3:]
            reduce_into(target, sources, op)
            signed_zeros = op not in (ReduceOp.MIN, ReduceOp.MAX)
            assert same_bits(target, reduced(sources, op), signed_zeros=signed_zeros), (number, length)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex128])
def test_the_target_may_be_any_of_the_sources(dtype: torch.dtype, index: int) -> None:
    sources = [sample(dtype, 777, seed) for seed in range(3)]
    expected = reduced(sources, ReduceOp.SUM)
    reduce_into(sources[index], sources, ReduceOp.SUM)
    assert same_bits(sources[index], expected)


def test_a_range_gives_the_same_however_it_is_cut() -> None:
    sources = [sample(torch.float32, 1000, seed) for seed in range(4)]
    whole, parts = torch.empty(1000), torch.empty(1000)
    reduce_into(whole, sources, ReduceOp.SUM)
    for first, last in ((0, 1), (1, 64), (64, 65), (65, 777), (777, 1000)):
        reduce_into(parts[first:last], [source[first:last] for source in sources], ReduceOp.SUM)
    assert torch.equal(whole.view(torch.int32), parts.view(torch.int32))


def test_halves_are_added_in_single_precision_and_rounded_once() -> None:
    """In bfloat16 itself, 256 + 1 + 1 would stay 256."""
    sources = [
        torch.tensor([256.0, 1.0], dtype=torch.bfloat16),
        *[torch.tensor([1.0, 2**-9], dtype=torch.bfloat16)] * 2,
    ]
    target = torch.empty(2, dtype=torch.bfloat16)
    reduce_into(target, sources, ReduceOp.SUM)
    assert target.tolist() == [258.0, 1.0]
    reduce_into(target, [*sources, sources[1]], ReduceOp.SUM)
    assert target.tolist() == [260.0, 1.0 + 2**-7]  # both half-way, rounded to even and up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_nan_of_any_rank_is_handed_on(dtype: torch.dtype, op: ReduceOp, where: int) -> None:
    sources = [torch.ones(70, dtype=dtype) for _ in range(3)]
    sources[where][5] = sources[where][69] = torch.nan
    target = torch.empty(70, dtype=dtype)
    reduce_into(target, sources, op)
    assert target.isnan().nonzero().flatten().tolist() == [5, 69]


def test_what_is_defined_is_what_is_said_to_be_defined() -> None:
    every = [ReduceOp(name) for name in ReduceOp._NAMES if name != "PREMUL_SUM"]
    dtypes = {dtype for dtype, _ in DEFINED} | {torch.complex32, torch.float8_e4m3fn}
    found = {(dtype, op) for dtype in dtypes for op in every if reductions.supports(dtype, op)}
    assert found == set(DEFINED)
    premultiplied = {dtype for dtype in dtypes if reductions.supports(dtype, ReduceOp.premul_sum(0.5))}
    assert premultiplied == {
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.complex64,
        torch.complex128,
    }
    assert not any(reductions.supports(torch.float32, op) for op in BITWISE)
