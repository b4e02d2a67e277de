"""The arithmetic by itself: every dtype and operation against a plain computation, bit for bit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from llvmlite import ir

from references import BITWISE, COMPLEX, DEFINED, FLOATS, INTEGERS, reduced, same_bits, sample
from torchestra.engine.kernels import reduction_code, reductions
from torchestra.engine.kernels.reduction_table import SWAP_MODE, functions
from torchestra.engine.native.kernel import address_in_object
from torchestra.engine.native.machine_code import MachineCode
from torchestra.engine.native.target import Target
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


@pytest.mark.parametrize("dtype", [dtype for dtype in INTEGERS if dtype.itemsize < 4], ids=str)
@pytest.mark.parametrize("number", [3, 100, 127, 128, 200, 255, 256, 300, 65535, 65536])
def test_the_average_over_more_ranks_than_the_type_can_count(dtype: torch.dtype, number: int) -> None:
    """Over 200 ranks a divisor of 8 bits was -56, and over 256 it was 0, which ends the process."""
    source = torch.arange(1 << 8 * dtype.itemsize).to(dtype)  # every value there is
    expected = [int(value / number) for value in source.tolist()]
    some = sample(dtype, 150, seed=1)
    target = torch.empty_like(some)
    reduce_into(target, [some] + [torch.zeros_like(some)] * (number - 1), ReduceOp.AVG)
    assert target.tolist() == [int(value / number) for value in some.tolist()]
    reductions.divide(dtype, source.data_ptr(), number, len(source))  # what is left to do over several hosts
    assert source.tolist() == expected


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_averages_are_divided_to_the_last_bit(dtype: torch.dtype) -> None:
    """By a power of two by multiplication, which the bits must not tell, denormal numbers included."""
    info = torch.finfo(dtype)
    values = torch.cat([sample(dtype, 200, seed=3), sample(dtype, 200, seed=4) * 4 * info.tiny])
    values = torch.cat([values, torch.tensor([info.max, info.smallest_normal, torch.inf, -0.0], dtype=dtype)])
    for number in (1, 2, 3, 4, 6, 64, 100, 4096):
        source, target = values.clone(), torch.empty_like(values)
        reductions.divide(dtype, source.data_ptr(), number, len(source))
        assert same_bits(source, values / number)
        if number <= 6:
            reduce_into(target, [values] + [torch.full_like(values, -0.0)] * (number - 1), ReduceOp.AVG)
            assert same_bits(target, values / number)


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
@pytest.mark.parametrize("factor", [0.1, -3.0, 1e-40])
def test_scaling(dtype: torch.dtype, factor: float) -> None:
    tensor = sample(dtype, 300, seed=2)
    parts = torch.view_as_real(tensor) if dtype.is_complex else tensor
    expected = parts * factor
    reductions.scale(dtype, tensor.data_ptr(), factor, 300)
    assert same_bits(parts, expected)


@pytest.mark.parametrize("op", [op for dtype, op in DEFINED if dtype is torch.bool], ids=lambda op: op.name)
def test_every_byte_but_0_is_true(op: ReduceOp) -> None:
    """Views of other tensors may hold them: True as 1 and True as 2 have no bit in common."""
    bits = torch.randint(0, 256, (2, 600), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    bits[torch.rand(2, 600, generator=torch.Generator().manual_seed(4)) < 0.4] = 0
    target = torch.empty(600, dtype=torch.bool)
    reduce_into(target, list(bits.view(torch.bool)), op)
    expected = reduced(list(bits != 0), op)
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("rounding", [0, 0x2000, 0x4000, 0x6000])
@pytest.mark.skipif(reductions._MACHINE not in ("x86_64", "AMD64"), reason="sets the bits of MXCSR")
def test_the_mode_of_the_thread_does_not_matter_and_stays(flush: bool, rounding: int) -> None:
    """Flushing of denormal numbers and rounding are set per thread, and which one reduces is chance."""
    mode = 0x1F80 | (0x8040 if flush else 0) | rounding
    with reductions.default_float_mode():  # and so at the end
        for dtype, op in DEFINED:
            if dtype not in (*FLOATS, *COMPLEX):
                continue
            sources = [sample(dtype, 130, seed) for seed in range(3)]
            if dtype in FLOATS:
                tiny = torch.finfo(dtype).smallest_normal
                for source in sources:
                    source[:70] *= tiny
            expected, target = torch.empty_like(sources[0]), torch.empty_like(sources[0])
            reduce_into(expected, sources, op)
            _swap_mode(mode)
            reduce_into(target, sources, op)
            left = _swap_mode(0x1F80)
            assert left & 0xFFC0 == mode, (dtype, op)
            assert same_bits(target, expected), (dtype, op)


def _swap_mode(mode: int) -> int:
    swap: int = reductions._SWAP(address_in_object(SWAP_MODE))(mode)
    return swap


def test_halves_on_a_processor_that_cannot_convert_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """There LLVM would call functions that do not exist: the process died by SIGSEGV."""
    plain = Target.host()._replace(cpu="generic", features="")
    halves = [(dtype, operation) for dtype, operation in functions() if dtype == "float16"]
    monkeypatch.setattr(reduction_code, "functions", lambda: halves)
    module = ir.Module()
    reduction_code.write_reductions(module, plain)
    code = MachineCode(plain.compile(str(module)))
    monkeypatch.setattr(reductions, "address_in_object", code.address)
    every = torch.arange(-1 << 15, 1 << 15).to(torch.int16).view(torch.float16)
    target = torch.empty_like(every)
    for first in (every, every.flip(0)):
        _add_halves(target, first, every)
        _check_halves(target, (first.float() + every.float()).half())
    for factor in (2.0**-25, 1 / 3, 1.0009765, 2.0**-10, 1.5, -7.0):
        scaled = every.clone()
        reductions.scale(torch.float16, scaled.data_ptr(), factor, len(scaled) - 1)
        scaled[-1] *= factor
        _check_halves(scaled, (every.float() * factor).half())
    dice = torch.Generator().manual_seed(0)
    for length in (1, 127, 129):
        shuffled = every[torch.randperm(len(every), generator=dice)]
        for start in range(0, len(every) - length, 9973):
            left, right = every[start : start + length], shuffled[start : start + length]
            part = torch.empty_like(left)
            _add_halves(part, left, right)
            _check_halves(part, (left.float() + right.float()).half())


def _add_halves(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    addresses = [left.data_ptr(), right.data_ptr()]
    reductions.combine(torch.float16, ReduceOp.SUM, target.data_ptr(), addresses, len(target))


def _check_halves(found: torch.Tensor, expected: torch.Tensor) -> None:
    same_bits = found.view(torch.int16) == expected.view(torch.int16)
    assert (same_bits | (found.isnan() & expected.isnan())).all()
