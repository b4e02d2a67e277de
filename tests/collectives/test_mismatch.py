"""Ranks that call different things at the same place: an error on each, with what all called and where."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.errors import CollectiveMismatchError, LateMismatchError
from torchestra.types import ReduceOp
from worlds import KINDS, run

Call = Callable[[bool], Any]


def ones(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def three() -> list[torch.Tensor]:
    return [ones(2), ones(2), ones(2)]


# What rank 0 calls, what the others call, and how each is told. The argument is async_op.
MISMATCHES: dict[str, tuple[Call, Call, str, str]] = {
    "operation": (
        lambda a: dist.all_reduce(ones(3), async_op=a),
        lambda a: dist.barrier(async_op=a),
        "all_reduce(SUM, float32, 3 elements)",
        "barrier()",
    ),
    "operation on the same tensor": (
        lambda a: dist.all_reduce(ones(300_000), async_op=a),
        lambda a: dist.broadcast(ones(300_000), 0, async_op=a),
        "all_reduce(SUM, float32, 300000 elements)",
        "broadcast(float32, 300000 elements, root 0)",
    ),
    "dtype": (
        lambda a: dist.all_reduce(ones(3), async_op=a),
        lambda a: dist.all_reduce(ones(3, torch.float64), async_op=a),
        "all_reduce(SUM, float32, 3 elements)",
        "all_reduce(SUM, float64, 3 elements)",
    ),
    "dtype of the same length": (
        lambda a: dist.broadcast(ones(4000, torch.int32), 1, async_op=a),
        lambda a: dist.broadcast(ones(4000), 1, async_op=a),
        "broadcast(int32, 4000 elements, root 1)",
        "broadcast(float32, 4000 elements, root 1)",
    ),
    "size": (
        lambda a: dist.all_reduce(ones(1), async_op=a),
        lambda a: dist.all_reduce(ones(500_000), async_op=a),
        "all_reduce(SUM, float32, 1 element)",
        "all_reduce(SUM, float32, 500000 elements)",
    ),
    "size zero": (
        lambda a: dist.all_gather_into_tensor(ones(0), ones(0), async_op=a),
        lambda a: dist.all_gather_into_tensor(ones(2 * dist.get_world_size()), ones(2), async_op=a),
        "all_gather(float32, 0 elements)",
        "all_gather(float32, 2 elements)",
    ),
    "root": (
        lambda a: dist.broadcast(ones(3000), 0, async_op=a),
        lambda a: dist.broadcast(ones(3000), 1, async_op=a),
        "broadcast(float32, 3000 elements, root 0)",
        "broadcast(float32, 3000 elements, root 1)",
    ),
    "root of a reduction": (
        lambda a: dist.reduce(ones(40_000), 1, async_op=a),
        lambda a: dist.reduce(ones(40_000), 0, async_op=a),
        "reduce(SUM, float32, 40000 elements, root 1)",
        "reduce(SUM, float32, 40000 elements, root 0)",
    ),
    "reduce operation": (
        lambda a: dist.all_reduce(ones(3), ReduceOp.MAX, async_op=a),
        lambda a: dist.all_reduce(ones(3), ReduceOp.MIN, async_op=a),
        "all_reduce(MAX, float32, 3 elements)",
        "all_reduce(MIN, float32, 3 elements)",
    ),
    "a factor on one side": (
        lambda a: dist.all_reduce(ones(3), ReduceOp.premul_sum(2), async_op=a),
        lambda a: dist.all_reduce(ones(3), async_op=a),
        "all_reduce(PREMUL_SUM, float32, 3 elements)",
        "all_reduce(SUM, float32, 3 elements)",
    ),
    "reduce_scatter": (
        lambda a: dist.reduce_scatter_tensor(ones(2), ones(2 * dist.get_world_size()), async_op=a),
        lambda a: dist.reduce_scatter_tensor(ones(9), ones(9 * dist.get_world_size()), async_op=a),
        "reduce_scatter(SUM, float32, 2 elements)",
        "reduce_scatter(SUM, float32, 9 elements)",
    ),
    "gather": (
        lambda a: dist.gather(ones(3000), [ones(3000) for _ in range(dist.get_world_size())], 0, async_op=a),
        lambda a: dist.gather(ones(4000), None, 0, async_op=a),
        "gather(float32, 3000 elements, root 0)",
        "gather(float32, 4000 elements, root 0)",
    ),
    "mixed up kinds of lists": (
        lambda a: dist.all_to_all(three(), three(), async_op=a),
        lambda a: dist.all_gather(three(), ones(2), async_op=a),
        "all_to_all(float32)",
        "all_gather(float32, 2 elements)",
    ),
}  # fmt: skip


def differ(name: str, odd_rank: int, asynchronous: bool) -> str:
    odd, even, _, _ = MISMATCHES[name]
    call = odd if dist.get_rank() == odd_rank else even
    with pytest.raises(CollectiveMismatchError) as caught:
        call(asynchronous).wait()
    tensor = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(sum(range(dist.get_world_size())))] * 3
    return str(caught.value)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", MISMATCHES)
def test_every_rank_is_told_what_all_called_and_where(name: str, asynchronous: bool) -> None:
    """And the group works afterwards."""
    # The rooted operations above are written for an odd rank 0.
    odd_rank = 0 if "gather" in name else 1
    _, _, odd, even = MISMATCHES[name]
    for message in run("threads", 3, differ, name, odd_rank, asynchronous):
        assert message.startswith(
            "the ranks of group 'default' called different operations (number 2 of the group):"
        )
        assert message.endswith("Nothing was sent; the group stays usable.")
        first, *lines = message.splitlines()[1:-1]
        assert first.startswith(f"diagnosis: mismatch: rank {odd_rank} called {odd}")
        for rank, line in enumerate(lines):
            told = odd if rank == odd_rank else even
            assert line.startswith(f"  rank {rank} called {told}")
            assert f" at {__file__}:" in line
        assert len(lines) == 3
        assert lines[odd_rank].split(" at ")[-1] != lines[2].split(" at ")[-1]


# Small rooted operations that do not fit, and some other. Rank 0 is the odd one.
LATE: dict[str, tuple[Call, Call, str, str]] = {
    "roots that do not wait": (
        lambda a: dist.broadcast(ones(3), 0, async_op=a),
        lambda a: dist.broadcast(ones(3), 1, async_op=a),
        "broadcast(float32, 3 elements, root 0)",
        "broadcast(float32, 3 elements, root 1)",
    ),
    "nobody waits": (
        lambda a: dist.broadcast(ones(2), 0, async_op=a),
        lambda a: dist.reduce(ones(2), 0, async_op=a),
        "broadcast(float32, 2 elements, root 0)",
        "reduce(SUM, float32, 2 elements, root 0)",
    ),
    "one waits": (
        lambda a: dist.gather(ones(2), [ones(2) for _ in range(dist.get_world_size())], 0, async_op=a),
        lambda a: dist.gather(ones(3), None, 0, async_op=a),
        "gather(float32, 2 elements, root 0)",
        "gather(float32, 3 elements, root 0)",
    ),
    "the others wait for all": (
        lambda a: dist.broadcast(ones(2), 0, async_op=a),
        lambda a: dist.all_reduce(ones(2), async_op=a),
        "broadcast(float32, 2 elements, root 0)",
        "all_reduce(SUM, float32, 2 elements)",
    ),
    "scatter": (
        lambda a: dist.scatter(ones(2), [ones(2)] * dist.get_world_size(), 0, async_op=a),
        lambda a: dist.scatter(ones(3), None, 0, async_op=a),
        "scatter(float32, 2 elements, root 0)",
        "scatter(float32, 3 elements, root 0)",
    ),
}  # fmt: skip


def go_on(call: Call, asynchronous: bool, behind: bool) -> None:
    work = call(asynchronous)
    if work is not None:
        work.wait()
    for _ in range(at.FLAGS):
        dist.broadcast(ones(1), 2) if behind else dist.barrier()


def differ_late(gate: threading.Barrier, name: str, asynchronous: bool, behind: bool) -> str:
    """Operations that do not fit, then others that do: small ones of which one rank does not wait, or any."""
    odd, even, _, _ = LATE[name]
    gate.wait(60)  # else a rank may hear of the end in the last operation that fitted
    with pytest.raises(LateMismatchError) as caught:
        go_on(even if dist.get_rank() else odd, asynchronous, behind)
    with pytest.raises(LateMismatchError):
        dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", LATE)
def test_every_rank_is_told_though_some_had_gone_on(name: str, asynchronous: bool, behind: bool) -> None:
    _, _, odd, even = LATE[name]
    for message in run("threads", 3, differ_late, threading.Barrier(3), name, asynchronous, behind):
        assert "the ranks called different operations (number 2 of the group):" in message
        told = [line.strip() for line in message.splitlines() if line.startswith("  rank ")]
        assert told[0] == f"rank 0 called {odd}"
        for rank in (1, 2):
            assert told[rank] in (f"rank {rank} called {even}", f"rank {rank} called nothing yet")


@pytest.mark.parametrize("kind", KINDS)
def test_mismatches_one_after_the_other(kind: str) -> None:
    run(kind, 2, many_mismatches)


def many_mismatches() -> None:
    for turn in range(5):
        for name in ("size", "root", "operation", "dtype"):
            message = differ(name, turn % 2, asynchronous=False)
            assert MISMATCHES[name][2] in message


def splits_of(rank: int, case: str) -> tuple[list[int], list[int]]:
    """Return what a rank expects, and what it sends, where two ranks do not agree."""
    return {
        "sent more": ([2, 2], [2, 3]) if rank == 0 else ([2, 2], [2, 2]),
        "sent nothing": ([2, 2], [2, 0]) if rank == 0 else ([2, 2], [2, 2]),
        "not what it sends itself": ([1, 2], [2, 2]) if rank == 0 else ([2, 2], [2, 2]),
    }[case]


def disagree_about_splits(case: str) -> str:
    expected, sent = splits_of(dist.get_rank(), case)
    with pytest.raises(CollectiveMismatchError) as single:
        dist.all_to_all_single(torch.zeros(sum(expected)), torch.zeros(sum(sent)), expected, sent)
    with pytest.raises(CollectiveMismatchError) as listed:
        dist.all_to_all([ones(count) for count in expected], [ones(count) for count in sent])
    dist.barrier()
    for caught in (single, listed):
        assert f"that sends {sent} and expects {expected} elements by rank" in str(caught.value)
    return str(single.value)


@pytest.mark.parametrize("case", ["sent more", "sent nothing", "not what it sends itself"])
def test_splits_that_do_not_fit_are_told(case: str) -> None:
    zero, one = run("threads", 2, disagree_about_splits, case)
    assert zero == one


def disagree_about_uneven_lists() -> None:
    rank = dist.get_rank()
    lengths = [2, 3] if rank == 0 else [2, 5]
    lengths[rank] = (2, 5)[rank]
    outputs = [torch.empty(length) for length in lengths]
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.all_gather(outputs, torch.ones(lengths[rank]))
    assert "rank 0 called all_gather(float32, uneven sizes) of [2, 3] elements by rank at" in str(
        caught.value
    )
    assert "rank 1 called all_gather(float32, uneven sizes) of [2, 5] elements by rank at" in str(
        caught.value
    )
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.reduce_scatter(torch.empty(lengths[rank]), [torch.ones(length) for length in lengths])
    assert "rank 0 called reduce_scatter(SUM, float32, uneven sizes) of [2, 3] elements by" in str(
        caught.value
    )
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.scatter(torch.empty(3000 + rank), [torch.ones(3000)] * 2 if rank == 0 else None, 0)
    assert "rank 0 called scatter(float32, 3000 elements, root 0) that sends [3000, 3000] and expects" in str(
        caught.value
    )
    assert "rank 1 called scatter(float32, 3001 elements, root 0) that sends [0, 0] and expects [3001" in str(
        caught.value
    )
    dist.barrier()


def test_lengths_that_do_not_fit_are_told() -> None:
    run("threads", 2, disagree_about_uneven_lists)


def mismatch_in_the_arena() -> None:
    """Nobody touches the tensors of a rank that called something else."""
    rank = dist.get_rank()
    tensor = dist.full((400_000,), rank + 1.0)
    with pytest.raises(CollectiveMismatchError):
        dist.all_reduce(tensor, ReduceOp.SUM if rank else ReduceOp.PRODUCT)
    dist.barrier()
    assert (tensor == rank + 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_as_they_were_after_a_mismatch(kind: str) -> None:
    run(kind, 2, mismatch_in_the_arena)


def mismatch_among_many() -> None:
    """The operations queued behind the one that fails are done as if it had not been called."""
    rank = dist.get_rank()
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(5)]
    works.append(dist.all_reduce(torch.ones(10 + rank), async_op=True))
    works += [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(5)]
    for number, work in enumerate(works):
        if number == 5:
            with pytest.raises(
                CollectiveMismatchError, match=f"all_reduce.SUM, float32, {10 + rank} elements"
            ):
                work.wait()
        else:
            work.wait()
            assert work.result()[0].sum() == 30


def test_operations_before_and_after_a_mismatch_in_the_queue() -> None:
    run("threads", 3, mismatch_among_many)
