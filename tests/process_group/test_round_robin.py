"""Several groups that take turns."""

from __future__ import annotations

import gc

import pytest
import torch

import torchestra as dist
from torchestra.arguments.options import GroupOptions
from torchestra.errors import InvalidArgumentError
from torchestra.store import PrefixStore
from worlds import KINDS, run

NUMBER = 2


def take_turns() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(pg_options=GroupOptions(timeout=20.0)) for _ in range(NUMBER)]
    assert [group.timeout.total_seconds() for group in groups] == [20.0] * NUMBER
    turns = dist.RoundRobinGroup(groups)
    assert (turns.rank(), turns.size()) == (rank, size)
    started = [group.get_sequence_number_for_group() for group in groups]
    for number in range(NUMBER + 1):
        assert turns.turn == number % NUMBER
        tensor = torch.full((100, 100), float(rank))
        turns.broadcast(tensor, root=0).wait()
        assert torch.equal(tensor, torch.zeros(100, 100))
    called = [group.get_sequence_number_for_group() for group in groups]
    assert [after - before for after, before in zip(called, started, strict=True)] == [2, 1]
    # What one rank's arguments forbid moves nothing on.
    if rank == 0:
        with pytest.raises(InvalidArgumentError, match="requires non-empty"):
            turns.allreduce([])
    tensors = [torch.ones(10) for _ in range(7)]
    for tensor in tensors:
        turns.allreduce(tensor)
    turns.barrier().wait()
    assert [tensor[0].item() for tensor in tensors] == [size] * 7
    outputs = torch.zeros(size)
    turns._allgather_base(outputs, torch.tensor([float(rank)])).wait()
    assert outputs.tolist() == list(range(size))
    assert not hasattr(turns, "send")


@pytest.mark.parametrize("kind", KINDS)
def test_operations_go_to_one_group_after_the_other(kind: str) -> None:
    run(kind, 3, take_turns)


def make_and_drop() -> None:
    size = dist.get_world_size()
    for _ in range(2):
        groups = [dist.new_group() for _ in range(NUMBER)]
        turns = dist.RoundRobinGroup(groups)
        for _ in range(3):
            tensor = torch.ones(10, 10)
            turns.allreduce(tensor).wait()
            assert torch.equal(tensor, torch.full((10, 10), float(size)))
        del turns
        gc.collect()
        for group in groups:
            dist.all_reduce(tensor, group=group)  # they live on
            dist.destroy_process_group(group)


@pytest.mark.parametrize("kind", KINDS)
def test_such_groups_can_be_made_and_dropped(kind: str) -> None:
    run(kind, 2, make_and_drop)


def fail() -> None:
    groups = [dist.new_group() for _ in range(NUMBER)]
    for group in groups:
        group.set_timeout(0.2)
    turns = dist.RoundRobinGroup(groups)
    if dist.get_rank() == 0:
        work = turns.barrier()
        with pytest.raises(dist.DistBackendError, match="timed out"):
            work.wait()
    dist.barrier()


def test_a_barrier_tells_which_of_the_groups_failed() -> None:
    run("threads", 2, fail)


def refuse() -> None:
    pair = dist.new_group()
    turned = dist.ProcessGroup(PrefixStore("turned", pair.store), 1 - pair.rank(), 2)
    with pytest.raises(InvalidArgumentError, match="at least one group"):
        dist.RoundRobinGroup([])
    with pytest.raises(InvalidArgumentError, match=r"same rank and size in all groups, got \(rank, size\)"):
        dist.RoundRobinGroup([pair, turned])


def test_groups_in_which_a_rank_has_different_numbers_are_refused() -> None:
    run("threads", 2, refuse)
