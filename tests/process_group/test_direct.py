"""Groups that are made directly, from a store, rank, size and options."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta

import pytest
import torch
from direct import SECONDS, run_direct

import torchestra as dist
from torchestra.arguments.options import GroupOptions
from torchestra.collectives.group_arguments import root_of
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.errors import CollectiveTimeoutError, InvalidArgumentError, InvalidArgumentTypeError
from torchestra.store import HashStore, PrefixStore
from worlds import KINDS, mapped_files, run

LIMIT_S = 30.0


def total(group: dist.ProcessGroup) -> float:
    tensor = torch.tensor([group.rank() + 1.0])
    group.allreduce(tensor).wait()
    return float(tensor.item())


def use(group: dist.ProcessGroup) -> None:
    size = group.size()
    assert group.timeout == timedelta(seconds=SECONDS)
    assert total(group) == size * (size + 1) / 2
    tensor = torch.tensor([float(group.rank())])
    dist.broadcast(tensor, 1, group=group)  # the functions take such a group too
    assert tensor.item() == 1.0
    assert dist.get_process_group_ranks(group) == list(range(size))


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_needs_no_default_group(kind: str) -> None:
    run_direct(kind, 3, use)


def several_over_one_store(group: dist.ProcessGroup) -> list[str]:
    groups = [dist.ProcessGroup(group.store, group.rank(), group.size(), SECONDS) for _ in range(3)]
    for each in groups:
        assert total(each) == 3
    names = [each.group_name for each in (group, *groups)]
    for each in groups:
        each.destroy()
    return names


@pytest.mark.parametrize("kind", KINDS)
def test_several_groups_over_one_store_do_not_meet_each_other(kind: str) -> None:
    first, second = run_direct(kind, 2, several_over_one_store)
    assert first == second
    assert len(set(first)) == 4


def beside_the_default_group() -> None:
    store = PrefixStore("mine", dist.group.WORLD.store)
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.ProcessGroup(store, size - 1 - rank, size, GroupOptions(timeout=SECONDS))  # backwards
    tensor = torch.tensor([float(rank)])
    group.broadcast(tensor, root=0).wait()
    assert tensor.item() == size - 1
    assert total(group) == size * (size + 1) / 2
    dist.all_reduce(tensor)
    assert tensor.item() == size * (size - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_direct_group_beside_the_default_group(kind: str) -> None:
    run(kind, 3, beside_the_default_group)


def drop(group: dist.ProcessGroup) -> None:
    before = len(mapped_files())
    other = dist.ProcessGroup(group.store, group.rank(), group.size(), SECONDS)
    work = other.allreduce(torch.ones(3))
    assert len(mapped_files()) == before + 1
    del other
    work.wait()  # what was called is run all the same
    del work
    # The thread that ran it may still be about to let go of it.
    deadline = time.monotonic() + LIMIT_S
    while len(mapped_files()) > before and time.monotonic() < deadline:
        gc.collect()
    assert len(mapped_files()) == before
    assert total(group) == 3


def test_a_group_that_nothing_refers_to_is_left_and_its_memory_is_freed() -> None:
    run_direct("processes", 2, drop)


def test_options_have_two_spellings_and_times_of_two_kinds() -> None:
    options = dist.ProcessGroup.Options()
    assert (options.timeout, options.threads, options.devices) == (timedelta(minutes=30), 2, [])
    options._timeout = 50.0
    options._threads = 8
    options._devices = ["lo"]
    assert (options.timeout, options.threads, options.devices) == (timedelta(seconds=50), 8, ["lo"])
    options.timeout = timedelta(seconds=3)
    assert options._timeout == timedelta(seconds=3)
    with pytest.raises(InvalidArgumentError, match="`threads` must be a positive int"):
        options.threads = 0
    with pytest.raises(InvalidArgumentError, match="timeout must not be negative"):
        options.timeout = -1


def test_the_time_out_can_be_changed_and_the_options_show_it() -> None:
    options = GroupOptions(timeout=50.0, threads=8, devices=["lo", "lo"], backend="threads")
    group = dist.ProcessGroup(HashStore(), 0, 1, options)
    group.allreduce(torch.rand(10)).wait()
    assert group.options._timeout == timedelta(seconds=50)
    assert (group.options.threads, group.options.devices) == (8, ["lo", "lo"])
    group._set_default_timeout(timedelta(seconds=23))
    assert group.options._timeout == group.timeout == timedelta(seconds=23)
    group.set_timeout(5)
    assert group.options.timeout == timedelta(seconds=5)
    group.destroy()


@pytest.mark.parametrize(
    ("rank", "size", "options", "error", "match"),
    [
        (2, 2, None, InvalidArgumentError, "rank 2 is not one of 0 to 1"),
        (-1, 2, None, InvalidArgumentError, "rank -1 is not one of"),
        (0.0, 2, None, InvalidArgumentTypeError, "`rank` must be an int, got 0.0"),
        (0, "2", None, InvalidArgumentTypeError, "`size` must be an int, got '2'"),
        (0, 1, GroupOptions(backend="gloo-ish"), InvalidArgumentError, "unknown backend 'gloo-ish'"),
        (0, 1, "soon", InvalidArgumentError, "Expected options argument to be of type"),
    ],
)
def test_bad_arguments_are_refused(rank, size, options, error, match) -> None:
    with pytest.raises(error, match=match):
        dist.ProcessGroup(HashStore(), rank, size, options)


def test_threads_that_are_no_ranks_can_be_a_group() -> None:
    store, totals = HashStore(), [0.0, 0.0]

    def take_part(rank: int) -> None:
        group = dist.ProcessGroup(store, rank, 2, GroupOptions(timeout=SECONDS, backend="threads"))
        totals[rank] = total(group)
        group.destroy()

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert totals == [3.0, 3.0]


def come_alone() -> None:
    here = current_thread_rank()
    if here.rank == 0:
        with pytest.raises(CollectiveTimeoutError, match="rank 1 of group 'direct-1' did not come"):
            dist.ProcessGroup(here.store, 0, here.size, timeout=0.05, options=GroupOptions(backend="native"))


def test_a_rank_that_does_not_come_is_named() -> None:
    run("threads", 2, come_alone, init=False)


def test_roots_follow_the_numbers_of_a_group() -> None:
    group = dist.ProcessGroup(HashStore(), 0, 1, timeout=20, ranks=range(1, 2))
    try:
        assert (group.same_numbers, root_of(group, 1, None, "src", "broadcast")) == (0, 0)
        with pytest.raises(InvalidArgumentError, match="global rank 0 is not part of group"):
            root_of(group, 0, None, "src", "broadcast")
        group.renumber({1: 0})
        assert (group.same_numbers, root_of(group, 0, None, "src", "broadcast")) == (1, 0)
        with pytest.raises(InvalidArgumentError, match="global rank 1 is not part of group"):
            root_of(group, 1, None, "src", "broadcast")
        group.renumber({0: 3})
        assert (group.same_numbers, root_of(group, 3, None, "src", "broadcast")) == (0, 0)
    finally:
        group.destroy()
