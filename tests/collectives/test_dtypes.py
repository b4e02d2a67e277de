"""Every dtype that can be sent, and every operation that a dtype can be reduced by."""

from __future__ import annotations

import pytest
import torch
from cases import MOVES, Case, check_case

import torchestra as dist
from references import DEFINED, INTEGERS, reduced, same_bits, sample
from thresholds import use_thresholds
from torchestra.engine.dtypes import DTYPES
from torchestra.types import ReduceOp
from worlds import KINDS, run


def move_all(case: Case) -> None:
    plain = [dtype for dtype in DTYPES if not str(dtype).startswith("torch.q")]
    assert len(plain) >= 15
    check_case(case, (1, 77), plain, ("ordinary",))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("case", MOVES)
def test_every_dtype_can_be_sent(case: Case) -> None:
    run("threads", 3, move_all, case)


def reduce_all(pairs: list[tuple[torch.dtype, ReduceOp]]) -> list[list[torch.Tensor]]:
    """Every way of reducing: few elements and many chunks, to all, to one and to each its part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    use_thresholds(direct=256, chunk=512)
    results = []
    for dtype, op in pairs:
        for length in (2, 200):
            inputs = [sample(dtype, size * length, seed=peer) for peer in range(size)]
            expected = reduced(inputs, op)
            everywhere = inputs[rank].clone()
            dist.all_reduce(everywhere, op)
            at_one = inputs[rank].clone()
            dist.reduce(at_one, 1, op)
            part = torch.empty(length, dtype=dtype)
            dist.reduce_scatter_tensor(part, inputs[rank], op)
            listed = torch.empty(length, dtype=dtype)
            dist.reduce_scatter(listed, list(inputs[rank].split(length)), op)
            mine = expected[rank * length : (rank + 1) * length]
            signed_zeros = op not in (ReduceOp.MIN, ReduceOp.MAX)
            for found, wanted in (
                (everywhere, expected),
                (at_one, expected if rank == 1 else inputs[rank]),
                (part, mine),
                (listed, mine),
            ):
                assert same_bits(found, wanted, signed_zeros=signed_zeros), (dtype, op, length, rank)
            results.append([everywhere])
    return results


@pytest.mark.parametrize("name", sorted({op.name for _, op in DEFINED}))
def test_every_reduction_gives_what_one_process_gives(name: str) -> None:
    pairs = [(dtype, op) for dtype, op in DEFINED if op.name == name]
    zero, one, two = run("threads", 3, reduce_all, pairs)
    for mine, *others in zip(zero, one, two, strict=True):
        for theirs in others:
            assert mine[0].view(torch.uint8).tolist() == theirs[0].view(torch.uint8).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_reductions_over_processes_and_threads(kind: str) -> None:
    run(kind, 2, reduce_all, [(torch.bfloat16, ReduceOp.AVG), (torch.int32, ReduceOp.BXOR)])


def multiply_first(dtype: torch.dtype) -> None:
    """Each rank has a factor of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    factors = [0.5, -2.0, 3.25]
    op = ReduceOp.premul_sum(factors[rank])
    inputs = [sample(dtype, size * 50, seed=peer) for peer in range(size)]
    expected = reduced(
        [tensor * factor for tensor, factor in zip(inputs, factors, strict=True)], ReduceOp.SUM
    )
    everywhere = inputs[rank].clone()
    dist.all_reduce(everywhere, op)
    assert same_bits(everywhere, expected)
    at_one = inputs[rank].clone()
    dist.reduce(at_one, 2, op)
    assert same_bits(at_one, expected if rank == 2 else inputs[rank])
    part = torch.empty(50, dtype=dtype)
    dist.reduce_scatter_tensor(part, inputs[rank], op)
    assert same_bits(part, expected[rank * 50 : (rank + 1) * 50])
    dist.reduce_scatter(part, list(inputs[rank].split(50)), op)
    assert same_bits(part, expected[rank * 50 : (rank + 1) * 50])
    transposed = inputs[rank][:12].view(3, 4).t().clone().t()  # not contiguous, on one rank only
    tensor = transposed if rank == 1 else transposed.contiguous()
    dist.all_reduce(tensor, op)
    assert same_bits(tensor.contiguous().view(-1), expected[:12])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_premul_sum_multiplies_by_the_factor_of_each_rank(dtype: torch.dtype) -> None:
    run("threads", 3, multiply_first, dtype)


def average_integers() -> None:
    for dtype in INTEGERS:
        if dtype.is_signed:
            tensor = torch.tensor([-7, 7, -1, 0], dtype=dtype) * (1 - dist.get_rank())
            dist.all_reduce(tensor, ReduceOp.AVG)
            assert tensor.tolist() == [-3, 3, 0, 0]


def test_averages_of_integers_are_rounded_towards_zero() -> None:
    run("threads", 2, average_integers)
