"""Groups by name and by tag, which rank a thread belongs to, and groups that meet when they are used."""

from __future__ import annotations

import concurrent.futures
import threading
import time

import pytest
import torch

import torchestra as dist
from torchestra.store import HashStore
from torchestra.world.init import GroupTerms
from torchestra.world.new_groups import make_group
from torchestra.world.registry import World, current_world, label, thread_rank
from worlds import KINDS, WORLD_SECONDS, outcomes, run

# -- tags


def halves(tag: str) -> dist.ProcessGroup:
    """This rank's one of two groups of two."""
    made = [make_group([0, 1], tag=tag), make_group([2, 3], tag=tag)]
    mine = made[dist.get_rank() // 2]
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def tags_tell_groups_apart() -> None:
    assert halves("blu") is halves("blu")
    assert halves("blu") is not halves("bla")
    assert halves("blu") is not halves("")
    assert halves("") is not halves("")


def tags_find_groups() -> None:
    world = current_world()
    tagged, other, plain, plain_too = halves("blu"), halves("bla"), halves(""), halves("")
    for group in (tagged, other, plain, plain_too):
        assert world.find(list(reversed(group.ranks)), world.tag_of(group)) is group
    assert world.tag_of(tagged) == "blu"
    assert world.find(tagged.ranks, "blu") is tagged
    assert world.find(tagged.ranks) is plain, "without a tag: the first that has none"
    assert world.find([0, 1, 2, 3]) is dist.group.WORLD
    assert world.find([0, 3], "blu") is None
    assert world.find(tagged.ranks, "never") is None


def destroyed_groups_are_not_found() -> None:
    world = current_world()
    first, second = halves("blu"), halves("")
    names = first.group_name, second.group_name
    dist.destroy_process_group(first)
    dist.destroy_process_group(second)
    assert world.find(first.ranks, "blu") is None
    assert world.find(first.ranks) is None
    for name in names:
        with pytest.raises(dist.NotInitializedError, match="Could not resolve the process group"):
            world.group(name)
    assert halves("blu") is not first


@pytest.mark.parametrize("body", [tags_tell_groups_apart, tags_find_groups, destroyed_groups_are_not_found])
def test_tags(body) -> None:  # type: ignore[no-untyped-def]
    run("threads", 4, body)


def test_a_label_belongs_to_one_sequence_of_ranks() -> None:
    many = list(range(0, 2000, 2))
    assert label(range(0, 2000, 2)) == label(many) == label(tuple(many))
    uneven = [*many, 3001]
    labels = [label(ranks) for ranks in ([0, 1], [1, 0], [0, 1, 2], many, many[:-1], many[::-1], uneven)]
    assert len(set(labels)) == len(labels)
    assert all(len(text) < 64 for text in labels)


# -- which rank a thread belongs to


def ranks_of_threads() -> list[int]:
    found = [dist.get_rank()]

    class Own(threading.Thread):
        def run(self) -> None:
            found.append(dist.get_rank())

    def started() -> None:
        found.append(dist.get_rank())
        nested = threading.Thread(target=lambda: found.append(dist.get_rank()))
        nested.start()
        nested.join()

    for thread in (threading.Thread(target=started), Own()):
        thread.start()
        thread.join()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found.extend(pool.map(lambda _: dist.get_rank(), range(2)))
    return found


def test_threads_that_a_rank_starts_belong_to_it() -> None:
    assert run("threads", 3, ranks_of_threads) == [[rank] * 6 for rank in range(3)]


def await_no_thread_ranks() -> None:
    """Those of another test may still be about to end."""
    deadline = time.monotonic() + WORLD_SECONDS
    while hasattr(threading.Thread.start, "__wrapped__"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_starting_threads_is_as_before_when_there_are_no_thread_ranks() -> None:
    await_no_thread_ranks()
    before = threading.Thread.start
    with thread_rank(0, 1, HashStore()):
        assert threading.Thread.start is not before
        thread = threading.Thread(target=int)
        thread.start()
        with pytest.raises(RuntimeError, match="threads can only be started once"):
            thread.start()
    assert threading.Thread.start is before
    assert not dist.is_initialized()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):  # type: ignore[no-untyped-def]
        ctx.thread = threading.get_ident()
        return tensor * 2

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        assert ctx.thread == threading.get_ident()
        summed = gradient * dist.get_rank()
        dist.all_reduce(summed)
        return summed


def gradient_through_a_backward_that_communicates() -> float:
    x = torch.ones(1, requires_grad=True)
    Doubled.apply(x).sum().backward()
    assert x.grad is not None
    return x.grad.item()


def test_backward_sees_the_world_of_forward() -> None:
    assert run("threads", 4, gradient_through_a_backward_that_communicates) == [6.0] * 4


def all_reduce_in_another_thread() -> float:
    tensor, group = torch.ones(1), dist.group.WORLD
    thread = threading.Thread(target=lambda: dist.all_reduce(tensor, group=group))
    thread.start()
    thread.join()
    return tensor.item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_may_be_used_from_another_thread(kind: str) -> None:
    assert run(kind, 2, all_reduce_in_another_thread) == [2.0] * 2


# -- deferred groups


def asked_for_by_one() -> tuple[int, int, float]:
    """Only one rank asks the group anything; then all use it."""
    group = make_group(range(dist.get_world_size()), deferred=True)
    assert isinstance(group, dist.ProcessGroup)
    assert current_world().group(group.group_name) is group
    place = (group.rank(), group.size()) if dist.get_rank() == 0 else (0, 0)
    dist.barrier()
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=group)
    return *place, tensor.item()


@pytest.mark.parametrize("kind", KINDS)
def test_members_of_a_deferred_group_meet_at_the_first_operation(kind: str) -> None:
    assert run(kind, 2, asked_for_by_one) == [(0, 2, 4.0), (0, 0, 4.0)]


def first_used_by_a_thread_that_ends() -> float:
    """The rank lives on although the thread in which its group met has ended."""
    group = make_group([0, 1], deferred=True)
    tensor = torch.ones(1)
    thread = threading.Thread(target=lambda: dist.all_reduce(tensor, group=group))
    thread.start()
    thread.join()
    dist.barrier()
    if dist.get_rank() == 0:
        threading.Event().wait(0.2)  # longer than a wait that looks whether its peers live
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_a_deferred_group_outlives_the_thread_that_first_used_it() -> None:
    assert run("threads", 2, first_used_by_a_thread_that_ends) == [4.0, 4.0]


def used_by_one_only() -> None:
    group = make_group([0, 1], GroupTerms(timeout=0.3), deferred=True)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=group)
    else:
        dist.barrier()


def test_who_does_not_come_to_a_deferred_group_is_named() -> None:
    first = outcomes("threads", 2, used_by_one_only)[0]
    assert isinstance(first.error, dist.CollectiveTimeoutError)
    assert "group 'of-0-1-1'" in first.message
    assert "rank 1 had not arrived" in first.message


def unused() -> None:
    group = make_group([0, 1], deferred=True)
    assert isinstance(group, dist.ProcessGroup)
    dist.destroy_process_group(group)
    with pytest.raises(dist.GroupDestroyedError, match="has destroyed group"):
        dist.all_reduce(torch.ones(1), group=group)


def test_a_deferred_group_that_nobody_used_is_destroyed_alone() -> None:
    run("threads", 2, unused)


def test_a_world_without_groups_says_so() -> None:
    with pytest.raises(dist.NotInitializedError, match="this rank has no groups"):
        World().group("default")
