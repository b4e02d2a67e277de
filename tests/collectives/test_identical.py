"""Results are the same, bit for bit, on every rank, from run to run, and however tensors are cut and kept."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch

import torchestra as dist
from references import reduced, same_bits
from torchestra.types import ReduceOp
from worlds import KINDS, outcomes, run


def values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all magnitudes, so that every other order of summation gives other bits."""
    dice = torch.Generator().manual_seed(rank)
    return (torch.randn(length, generator=dice) * 10 ** (torch.rand(length, generator=dice) * 6 - 3)).to(
        dtype
    )


def digests(dtype: torch.dtype, length: int) -> list[str]:
    """Of the sum by every way that there is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    engine = dist.group.WORLD.communicator.engine
    usual = engine.choices
    expected = reduced([values(peer, length, dtype) for peer in range(size)], ReduceOp.SUM)
    found = []
    for choices in (
        usual,
        dataclasses.replace(usual, direct=0),
        dataclasses.replace(usual, direct=0, chunk=4096),
        dataclasses.replace(usual, direct=usual.chunk),
    ):
        engine.choices = choices
        for in_arena in (False, True):
            tensor = dist.empty(length, dtype=dtype) if in_arena else torch.empty(length, dtype=dtype)
            tensor.copy_(values(rank, length, dtype))
            dist.all_reduce(tensor)
            assert same_bits(tensor, expected)
            found.append(hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest())
        part, pieces = (torch.empty(length // size * count, dtype=dtype) for count in (1, size))
        dist.reduce_scatter_tensor(part, values(rank, length, dtype)[: pieces.numel()])
        dist.all_gather_into_tensor(pieces, part)
        assert same_bits(pieces, expected[: pieces.numel()])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_bit_identical(kind: str, size: int, dtype: torch.dtype) -> None:
    first, second = (run(kind, size, digests, dtype, 30_001) for _ in range(2))
    assert len({digest for by_rank in first + second for digest in by_rank}) == 1


def test_the_order_of_summation_shows_in_the_values_used_here() -> None:
    """Otherwise the test above would say nothing."""
    inputs = [values(rank, 1000, torch.float32) for rank in range(3)]
    assert not torch.equal((inputs[0] + inputs[1]) + inputs[2], inputs[0] + (inputs[1] + inputs[2]))


def tiny(rank: int) -> torch.Tensor:
    """Some denormal, some nearly so."""
    return values(rank, 300, torch.float32) * 2.0**-128


def sums_of_tiny_numbers(flush: bool) -> list[list[int]]:
    """The bits of their reductions, at once and queued; every second rank may ``flush`` them to zero."""
    rank = dist.get_rank()
    mine, row = tiny(rank), torch.arange(300) % 7
    entries = torch.arange(1.0, 301.0) * 2.0**-149
    torch.set_flush_denormal(flush and rank % 2 == 1)
    found = []
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.premul_sum(1 / 3)):
        for async_op in (False, True):
            tensor = mine.clone()
            work = dist.all_reduce(tensor, op, async_op=async_op)
            if work is not None:
                work.wait()
            found.append(tensor)
    sparse = torch.sparse_coo_tensor(row.unsqueeze(0), entries, (7,), check_invariants=False)
    dist.all_reduce(sparse)
    return [tensor.view(torch.int32).tolist() for tensor in (*found, sparse.coalesce().values())]


@pytest.mark.parametrize("hosts", [("", ""), ("h0", "h0", "h1")])
def test_the_floating_point_mode_of_a_rank_does_not_show(hosts: tuple[str, ...]) -> None:
    """It is per thread, and an operation may run on a thread of the group or on one that waits for it."""
    expected, *same = [
        outcome.result()
        for flush in (False, True)
        for outcome in outcomes("threads", len(hosts), sums_of_tiny_numbers, flush, hosts=hosts)
    ]
    assert same == [expected] * (2 * len(hosts) - 1)
