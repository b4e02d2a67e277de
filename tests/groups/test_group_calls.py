"""Ranks that do not make the same groups: each raises at once, and names the lists that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.errors import CollectiveMismatchError, CollectiveTimeoutError
from torchestra.world.group_agreement import GroupCall
from torchestra.world.init import default_group
from worlds import KINDS, run

LONG = 600.0  # far more than the worlds of these tests may take: no error comes from a time-out


def usable(group: dist.ProcessGroup | None = None) -> None:
    """The group's ranks can still call operations in it."""
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [float(dist.get_world_size(group))] * 3


def refused(make: Callable[[], Any], first: int, key: str = "new_group/2") -> str:
    """Return the text of this rank's error, where rank ``first`` is to be the first that calls."""
    if dist.get_rank() != first:
        default_group().store.wait([key])
    with pytest.raises(CollectiveMismatchError) as caught:
        make()
    assert not isinstance(caught.value.__cause__, CollectiveTimeoutError)
    return str(caught.value)


def different_ranks(first: int, lists: list[list[int]]) -> str:
    before = dist.new_group(timeout=LONG)
    told = refused(lambda: dist.new_group(lists[dist.get_rank()], timeout=LONG), first)
    usable()
    usable(before)
    usable(dist.new_group())
    return told


# Who is first: the list's rank 0, which waits for others; or one that waits for rank 0. The rank that differs
# would be alone, or is no member of its own list.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("first", "lists"),
    [(0, [[0, 1], [1]]), (1, [[0], [0, 1]]), (0, [[0, 1], [0]]), (0, [[0, 1, 2], [0, 1, 2], [1, 2]])],
)
def test_all_ranks_that_wait_are_told_which_lists_differ(kind: str, first: int, lists: list[Any]) -> None:
    told = run(kind, len(lists), different_ranks, first, lists)
    assert len(set(told)) == 1
    other = next(rank for rank in range(len(lists)) if lists[rank] != lists[first])
    assert told[0].startswith(
        f"rank {other} called new_group with the ranks {lists[other]}, but rank {first} called it with the"
        f" ranks {lists[first]}; all ranks must make the same groups"
    )
    assert "\n" not in told[0]


def test_threads_on_several_hosts_hear_of_it_on_their_own_host() -> None:
    lists = [[0, 1], [0], [0, 1]]  # rank 2 is on the other host, and in neither list
    hosts = ["here", "here", "there"]
    told = run("threads", 3, different_ranks_and_one_more, 0, lists, hosts=hosts)
    assert told[0] == told[1]
    assert "rank 1 called new_group with the ranks [0], but rank 0" in told[0]


def different_ranks_and_one_more(first: int, lists: list[list[int]]) -> str:
    dist.new_group(timeout=LONG)
    if dist.get_rank() == 2:
        default_group().store.wait(["told"])
        with pytest.raises(CollectiveMismatchError) as caught:
            dist.new_group(lists[2])  # the last to call: it finds the difference in the store
        usable()
        return str(caught.value)
    told = refused(lambda: dist.new_group(lists[dist.get_rank()], timeout=LONG), first)
    default_group().store.set("told", b"")
    usable()
    return told


def orders() -> str:
    dist.new_group(timeout=LONG)
    ranks = [2, 0, 1]
    return refused(lambda: dist.new_group(ranks, timeout=LONG, sort_ranks=dist.get_rank() != 0), 1)


def test_another_order_is_a_difference() -> None:
    (told, *_) = run("threads", 3, orders)
    assert "rank 0 called new_group with the ranks [2, 0, 1], but rank 1 called it with" in told
    assert "the ranks [0, 1, 2] (the same ranks in another order: is sort_ranks the same?)" in told


def make_several(function: str) -> str:
    dist.new_group(timeout=LONG)
    rank = dist.get_rank()
    if function == "new_subgroups_by_enumeration":
        lists = [[0, 1], [2, 3]] if rank != 3 else [[0, 1], [3]]
        told = refused(lambda: dist.new_subgroups_by_enumeration(lists, timeout=LONG), 2)
    elif function == "new_subgroups":
        told = refused(lambda: dist.new_subgroups(2 if rank != 3 else 4, timeout=LONG), 2)
    else:
        parts = [[0, 1], [2, 3]] if rank != 3 else [[0, 3], [1, 2]]
        told = refused(lambda: dist.split_group(split_ranks=parts, timeout=LONG), 2, "new_group/default.1")
    usable()
    usable(dist.new_group())
    return told


def meet_first(function: str) -> str:
    """As :func:`make_several`, where ranks 0 and 1 may have made their own group before rank 3 calls."""
    try:
        return make_several(function)
    except pytest.fail.Exception:
        assert dist.get_rank() in (0, 1)
        usable()
        usable(dist.new_group())
        return ""


@pytest.mark.parametrize("function", ["new_subgroups", "new_subgroups_by_enumeration", "split_group"])
def test_lists_of_lists(function: str) -> None:
    told = run("threads", 4, meet_first, function)
    assert told[2] == told[3]
    assert told[2].startswith(f"rank 3 called {function} with the")
    assert "but rank 2 called it with the lists [[0, 1], [2, 3]]" in told[2]


def parts_of_a_group() -> str:
    group = dist.new_group([2, 1], timeout=LONG)
    if dist.get_rank() == 0:
        return ""
    return refused(lambda: dist.new_subgroups(dist.get_rank(), group=group, timeout=LONG), 2, "new_group/1.1")


def test_the_ranks_of_a_group_cut_it_into_the_same_parts() -> None:
    _, first, second = run("threads", 3, parts_of_a_group)
    assert first == second
    assert "rank 1 called new_subgroups with the lists [[1], [2]], but rank 2 called it with the" in first


def two_functions() -> str:
    dist.new_group(timeout=LONG)
    if dist.get_rank() == 0:
        return refused(lambda: dist.new_group([0, 1], timeout=LONG), 0)
    return refused(lambda: dist.new_subgroups(2, timeout=LONG), 0)


def test_another_function_is_a_difference() -> None:
    first, second = run("threads", 2, two_functions)
    assert first == second
    assert "rank 1 called new_subgroups with the ranks [0, 1], but rank 0 called new_group with the" in first


def test_of_long_lists_it_says_what_they_do_not_have_in_common() -> None:
    mine = GroupCall("new_group", 3, {"1": [*range(100), 200]})
    first = GroupCall.decode(GroupCall("new_group", 0, {"1": range(101)}).encode())
    assert "(only the one has [200], and only the other [100])" in mine.difference(first)
    assert mine.difference(GroupCall.decode(mine.encode())) == ""
    assert (
        GroupCall("new_group", 1, {"1": tuple(range(20))}).difference(
            GroupCall("new_group", 0, {"1": range(20)})
        )
        == ""
    )
