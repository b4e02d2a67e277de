"""Groups made of groups by their methods: of some ranks of one, and of the ranks of several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from direct import run_direct

import torchestra as dist
from torchestra.errors import CollectiveTimeoutError, InvalidArgumentError, StoreTimeoutError
from torchestra.process_group import ProcessGroup
from torchestra.process_group.splitting import member_of_merged
from torchestra.store import HashStore, PrefixStore
from worlds import run

KINDS = ["threads", "processes"]


def total(group: ProcessGroup, value: float) -> float:
    tensor = torch.tensor([value])
    group.allreduce([tensor]).wait()
    return tensor.item()


def split_directly(group: ProcessGroup) -> None:
    """Without a default group, twice into the same parts, and one part again."""
    rank, size = group.rank(), group.size()
    group.set_timeout(20)
    evens = [0, 2]
    for ranks in (evens, [3, 1], evens):
        part = group.split_group(ranks, group_desc="half" if ranks == evens else None)
        assert (part is not None) == (rank in ranks)
        if part is not None:
            assert (part.rank(), part.size()) == (sorted(ranks).index(rank), 2)
            assert (part.ranks, part.timeout) == (tuple(sorted(ranks)), timedelta(seconds=20))
            assert part.group_desc == ("half" if ranks == evens else "undefined:split")
            assert total(part, rank) == sum(ranks)
            alone = part.split_group([part.rank()], timeout=7, group_name=f"only {rank} {part.group_name}")
            assert alone is not None
            assert alone.ranks == (rank,)
            assert (alone.timeout, alone.group_name) == (
                timedelta(seconds=7),
                f"only {rank} {part.group_name}",
            )
            alone.destroy()
            part.destroy()
    for wrong in ([], [0, 0], [size], [-1]):
        with pytest.raises(InvalidArgumentError, match="different ranks of the group"):
            group.split_group(wrong)
    assert total(group, 1) == size


@pytest.mark.parametrize("kind", KINDS)
def test_some_ranks_of_a_group(kind: str) -> None:
    run_direct(kind, 4, split_directly)


def a_member_that_does_not_come() -> None:
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeoutError):
            group.split_group([0, 1], timeout=0.2)
    dist.barrier()


def test_a_member_that_does_not_come_is_told() -> None:
    run("threads", 2, a_member_that_does_not_come)


def merge(whole: ProcessGroup, parts: Sequence[Sequence[int]], strangers: bool) -> None:
    """Merge groups that were made by themselves; ``strangers`` have global ranks of worlds of their own."""
    store, rank, size = whole.store, whole.rank(), whole.size()
    mine = next(index for index, part in enumerate(parts) if rank in part)
    here = parts[mine].index(rank)
    own = PrefixStore(f"part {mine}", store)
    ranks = None if strangers else parts[mine]
    group = ProcessGroup(own, here, len(parts[mine]), timeout=20, ranks=ranks)
    for name in (None, "again"):
        merged = group.merge_remote_group(store, size, 20, name, "of all")
        assert (merged.size(), merged.group_name) == (size, name or "merged")
        assert merged.group_desc == "of all"
        places = [torch.zeros(2) for _ in range(size)]
        merged.allgather([places], [torch.tensor([float(mine), float(here)])]).wait()
        found = [tuple(map(int, each.tolist())) for each in places]
        if strangers:
            assert list(merged.ranks) == list(range(size))
        else:
            assert list(merged.ranks) == [parts[part][number] for part, number in found]
        # Each group's ranks are together, in their order.
        assert sorted(found, key=lambda each: (found.index((each[0], 0)), each[1])) == found
        merged.destroy()
    assert total(group, 1) == len(parts[mine])
    group.destroy()


@pytest.mark.parametrize("strangers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_several_groups_become_one(kind: str, strangers: bool) -> None:
    run_direct(kind, 4, merge, [[3], [2, 0, 1]], strangers)


def test_groups_are_ordered_by_their_ranks() -> None:
    """Whichever arrived first."""
    store = HashStore()
    before: dict[str, Any] = {"group/0": [2, 3], "group/1": [0, 1]}
    for key, ranks in before.items():
        store.set(f"merge/m/{key}", json.dumps(ranks))
    store.add("merge/m/numbers", 2)
    told = HashStore()
    told.set("key", "0")
    limit = timedelta(seconds=5)
    membership = member_of_merged(store, 4, limit, "m", 1, [2, 3], told, "key")
    assert (membership.rank, list(membership.ranks)) == (3, [0, 1, 2, 3])
    with pytest.raises(InvalidArgumentError, match=r"groups of \[2, 2\] ranks came, but `size` is 3"):
        member_of_merged(store, 3, limit, "m", 1, [2, 3], told, "key")
    with pytest.raises(StoreTimeoutError):
        member_of_merged(store, 5, timedelta(milliseconds=50), "m", 1, [2, 3], told, "key")


def test_a_group_is_bound_to_no_device_unless_told() -> None:
    store = HashStore()
    group = ProcessGroup(store, 0, 1)
    assert group.bound_device_id is None
    group.destroy()
