"""Making groups: of some ranks, by their members only, several at once, parts of a group; and ending them."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.errors import (
    CollectiveTimeoutError,
    GroupAbortedError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    NotInitializedError,
)
from worlds import KINDS, outcomes, run

SOON = 50.0


def members(group: Any) -> list[int]:
    """The global ranks of a group, as an operation finds them; an empty list outside."""
    if not isinstance(group, dist.ProcessGroup):
        assert isinstance(group, dist.NonMember)
        return []
    found = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(found, torch.tensor([dist.get_rank()]), group=group)
    return [tensor.item() for tensor in found]


# -- new_group


def sorted_or_not() -> None:
    ordered, given = dist.new_group([3, 0, 2]), dist.new_group([3, 0, 2], sort_ranks=False)
    assert dist.get_process_group_ranks(ordered) == [0, 2, 3]
    assert dist.get_process_group_ranks(given) == [3, 0, 2]
    if dist.get_rank() != 1:
        assert members(ordered) == [0, 2, 3]
        assert members(given) == [3, 0, 2]
        assert dist.get_group_rank(given, 0) == 1
        assert dist.get_global_rank(given, 0) == 3
        assert dist.get_group_rank(ordered, 3) == 2
        for number in (1, 9):
            with pytest.raises(ValueError, match="not part of group"):
                dist.get_group_rank(given, number)
            with pytest.raises(ValueError, match="not part of group"):
                dist.get_global_rank(given, number + 3)
    world = dist.group.WORLD
    assert [dist.get_group_rank(world, rank) for rank in range(4)] == list(range(4))
    assert [dist.get_global_rank(world, rank) for rank in range(4)] == list(range(4))


def test_members_are_numbered_in_the_order_of_their_global_ranks_unless_told_otherwise() -> None:
    run("threads", 4, sorted_or_not)


def strangers() -> None:
    outside = dist.new_group([0])
    if dist.get_rank() == 1:
        for call in (
            lambda: dist.get_group_rank(outside, 0),
            lambda: dist.get_global_rank(outside, 0),
            lambda: dist.get_group_rank(outside, 1),
        ):
            with pytest.raises(ValueError, match="is not registered on this rank, please create group"):
                call()
        with pytest.raises(ValueError, match="Invalid process group specified"):
            dist.get_backend(outside)
        with pytest.raises(ValueError, match="Invalid process group specified"):
            dist.get_backend_config(outside)
        assert dist.get_process_group_ranks(outside) == [0]
        assert (dist.get_rank(outside), dist.get_world_size(outside)) == (-1, -1)
        dist.destroy_process_group(outside)


def test_asking_about_a_group_from_outside() -> None:
    run("threads", 2, strangers)


def wrong_ranks() -> None:
    size = dist.get_world_size()
    for ranks, error, phrase in (
        ([1, 1], InvalidArgumentError, r"ranks list must not contain duplicate entries, got \[1, 1\]"),
        ([0, size], InvalidArgumentError, rf"Rank {size} is out of range. Valid ranks are 0 to {size - 1}"),
        ([-1], InvalidArgumentError, rf"Rank -1 is out of range.*\(world_size={size}\)"),
        (
            range(size + 1),
            InvalidArgumentError,
            "world size should be less or equal to the world size",
        ),
        ([], InvalidArgumentError, "must not be empty"),
        ([0.5], InvalidArgumentTypeError, r"`ranks` must be a list of ints or None, got \[0\.5\]"),
        (["a", 1], TypeError, r"`ranks` must be a list of ints or None, got \['a', 1\]"),
    ):
        for local in (False, True):
            with pytest.raises(error, match=phrase):
                dist.new_group(ranks, use_local_synchronization=local)
    assert members(dist.new_group()) == list(range(size))


def test_wrong_ranks_are_refused_on_every_rank() -> None:
    run("threads", 2, wrong_ranks)


# -- made by their members only


def by_members_only() -> None:
    """Overlapping in rings, disjoint, nested and twice the same, without the others' help."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ours = [rank, (rank + 2) % size]
    others = [peer for peer in range(size) if peer not in ours]
    outside = dist.new_group(others, use_local_synchronization=True)
    assert isinstance(outside, dist.NonMember)
    group = dist.new_group(ours, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    assert members(group) == sorted(ours)
    assert dist.get_group_rank(group, rank) == sorted(ours).index(rank)
    again = dist.new_group(ours, use_local_synchronization=True)
    assert again.group_name != group.group_name
    dist.destroy_process_group(group)
    assert members(again) == sorted(ours)
    third = dist.new_group(ours, use_local_synchronization=True, timeout=7, group_desc="pairs")
    assert third.timeout == timedelta(seconds=7)
    assert third.group_desc == "pairs"
    assert members(third) == members(again)
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert members(alone) == [rank]
    if rank < 3:
        assert members(dist.new_group([2, 1, 0], use_local_synchronization=True)) == [0, 1, 2]
    assert members(dist.new_group(use_local_synchronization=True)) == list(range(size))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_only_their_members_make(kind: str) -> None:
    run(kind, 4, by_members_only)


def one_member_missing(local: bool) -> str:
    """Rank 1 gives up after rank 0 has arrived, and tells it so."""
    rank = dist.get_rank()
    if rank == 2:
        return ""
    if rank == 1:
        dist.group.WORLD.store.wait([f"group/{'of-0-1-2-1' if local else '1'}/arena"])
    with pytest.raises((CollectiveTimeoutError, GroupAbortedError)) as caught:
        dist.new_group([0, 1, 2], timeout=SOON if rank == 0 else 0.3, use_local_synchronization=local)
    group = dist.new_group([0, 1], use_local_synchronization=True)
    assert members(group) == [0, 1]
    return str(caught.value)


@pytest.mark.parametrize("local", [False, True])
def test_a_member_that_does_not_come_is_named(local: bool) -> None:
    first, second, _ = run("threads", 3, one_member_missing, local)
    for told in (first, second):
        assert re.search(r"ranks? (\d, )?2 (of .* did not come|had not arrived)", told)


# -- parts of the world


def parts_of_equal_size() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    own, everybodys = dist.new_subgroups(2, timeout=9, group_desc="a pair")
    assert len(everybodys) == size // 2
    assert own is everybodys[rank // 2]
    assert (own.size(), own.rank()) == (2, rank % 2)
    assert own.timeout == timedelta(seconds=9)
    assert own.group_desc == "a pair"
    for number, group in enumerate(everybodys):
        assert dist.get_process_group_ranks(group) == [2 * number, 2 * number + 1]
        assert isinstance(group, dist.ProcessGroup) == (number == rank // 2)
    assert members(own) == dist.get_process_group_ranks(own)
    for group in everybodys:
        dist.destroy_process_group(group)
    whole, (same,) = dist.new_subgroups(size)
    assert whole is same
    assert members(whole) == list(range(size))


def parts_of_parts() -> None:
    """Halves of groups that exist side by side, cut at the same time."""
    rank = dist.get_rank()
    own, groups = dist.new_subgroups_by_enumeration([[4, 0, 2, 6], [1, 3, 5, 7]])
    assert own is groups[rank % 2]
    assert members(own) == list(range(rank % 2, 8, 2))
    for _ in range(2):
        half, halves = dist.new_subgroups(group_size=2, group=own)
        assert [dist.get_process_group_ranks(each) for each in halves] == [
            [rank % 2, rank % 2 + 2],
            [rank % 2 + 4, rank % 2 + 6],
        ]
        assert members(half) == dist.get_process_group_ranks(half)
    single, singles = dist.new_subgroups(group_size=1, group=half)
    assert len(singles) == 2
    assert members(single) == [rank]


def enumerated() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    own, groups = dist.new_subgroups_by_enumeration([[2, 0], [3]])
    assert len(groups) == 2
    if rank == 1:
        assert own is None
    else:
        assert own is groups[rank == 3]
        assert members(own) == ([3] if rank == 3 else [0, 2])
    for lists, phrase in (
        ([], "The arg 'ranks_per_subgroup_list' cannot be empty"),
        (None, "cannot be empty"),
        ([[0, 1], [size, 2]], f"Rank {size} is out of range"),
        ([[-1, -2], [-3, -4]], r"Rank -\d is out of range"),
        ([[0], [1, 2], [1, 3]], r"Rank 1 has appeared in both subgroup \[1, 2\] and \[1, 3\]"),
    ):
        with pytest.raises(InvalidArgumentError, match=phrase):
            dist.new_subgroups_by_enumeration(lists)
    for group_size, phrase in (
        (100, r"'group_size' \(100\) must not exceed the world size \(4\)"),
        (3, r"The world size \(4\) must be divisible by 'group_size=3'"),
        (0, r"The arg 'group_size' \(0\) must be positive"),
        (-2, "must be positive"),
        (None, "Default group size only takes effect when CUDA is available"),
    ):
        if group_size is not None or not torch.cuda.is_available():
            with pytest.raises(InvalidArgumentError, match=phrase):
                dist.new_subgroups(group_size)
    outside = dist.new_group([0])
    if rank == 1:
        with pytest.raises(InvalidArgumentError, match=r"no member of group .* only members can cut a group"):
            dist.new_subgroups(1, outside)
        with pytest.raises(InvalidArgumentError, match=r"no member of group .* only members can cut a group"):
            dist.split_group(outside, [[0]])
    dist.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_subgroups_of_equal_size(kind: str) -> None:
    run(kind, 4, parts_of_equal_size)


def test_subgroups_of_subgroups() -> None:
    run("threads", 8, parts_of_parts)


def test_enumerated_subgroups_and_what_is_refused() -> None:
    run("threads", 4, enumerated)


def split() -> None:
    rank = dist.get_rank()
    part = dist.split_group(split_ranks=[[3, 0], [1]])
    if rank == 2:
        assert isinstance(part, dist.NonMember)
        assert dist.get_process_group_ranks(part) == [0, 1, 3]
    else:
        assert members(part) == ([1] if rank == 1 else [0, 3])
        assert part.group_desc == "default_pg:split:0"
    again = dist.split_group(None, [[0, 1], [2, 3]], timeout=11, group_desc="half")
    assert members(again) == ([0, 1] if rank < 2 else [2, 3])
    assert again.timeout == timedelta(seconds=11)
    assert again.group_desc == "half"
    upper = dist.new_group([1, 2, 3])
    if rank > 0:
        inner = dist.split_group(upper, [[1, 2], [0]])  # the group's own numbers
        assert members(inner) == ([1] if rank == 1 else [2, 3])
        dist.destroy_process_group(inner)
        assert len(members(dist.split_group(upper, [[0, 1, 2]]))) == 3
    for lists, phrase in (
        ([], "split_ranks cannot be None or empty"),
        (None, "split_ranks cannot be None or empty"),
        ([[0], []], "the split group cannot be empty"),
        ([[0, 1, 2, 3, 0]], "size should be less or equal to the world_size"),
        ([[0, 0]], "the split group cannot have duplicate ranks"),
        ([[0, 1], [1, 2]], r"ranks \[1\] of \[1, 2\] are in another split as well"),
        ([[0, 4]], "group rank 4 is not part of group"),
    ):
        with pytest.raises(InvalidArgumentError, match=phrase):
            dist.split_group(split_ranks=lists)
    with pytest.raises(InvalidArgumentError, match="`parent_pg` must be a ProcessGroup"):
        dist.split_group("group", [[0]])
    dist.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_splitting_a_group(kind: str) -> None:
    run(kind, 4, split)


# -- what there is


def ask_around(backend: str) -> None:
    assert dist.get_pg_count() == 1
    group = dist.new_group([0])
    assert dist.get_pg_count() == 2
    dist.destroy_process_group(group)
    dist.new_group(use_local_synchronization=True)
    assert dist.get_pg_count() == 2
    assert dist.get_backend_config() == f"cpu:{backend}"
    for device in ("cpu", torch.device("cpu")):
        assert dist.get_default_backend_for_device(device) == backend
    with pytest.raises(ValueError, match="Default backend not registered for device : cuda"):
        dist.get_default_backend_for_device("cuda:1")
    dist.destroy_process_group()
    assert dist.get_pg_count() == 0


def test_what_a_rank_can_ask_about_its_groups() -> None:
    run("threads", 2, ask_around, "threads")
    run("processes", 2, ask_around, "native")


def test_backends() -> None:
    for name in ("native", "threads", "fake", "cpu:native", "NATIVE", "gloo", "cpu:gloo"):
        assert dist.is_backend_available(name)
    for name in ("mpi", "cuda:native", "", "cpu:"):
        assert not dist.is_backend_available(name)
    with pytest.raises(TypeError, match="`backend` must be a str"):
        dist.is_backend_available(None)
    for available in (
        dist.is_mpi_available,
        dist.is_ucc_available,
        dist.is_xccl_available,
    ):
        assert available() is False
    assert dist.is_gloo_available() is True  # its name; torchestra's engine serves it
    for name in ("nccl", "cuda:nccl"):  # as this torch was built
        assert (
            dist.is_backend_available(name) == dist.is_nccl_available() == hasattr(torch._C, "_nccl_version")
        )


def test_which_reductions_take_complex_numbers() -> None:
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    supported = {name for name in names if dist.supports_complex(getattr(dist.ReduceOp, name))}
    assert {"SUM", "AVG"} <= supported <= {"SUM", "AVG", "PRODUCT"}


def test_whether_torchrun_started_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not dist.is_torchelastic_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert dist.is_torchelastic_launched()


def test_other_names_of_torch() -> None:
    assert dist.all_gather_single is dist.all_gather_into_tensor
    assert dist.reduce_scatter_single is dist.reduce_scatter_tensor
    assert dist.default_pg_timeout == timedelta(minutes=30)


def test_without_a_world_there_are_no_groups() -> None:
    assert dist.get_pg_count() == 0
    for call in (
        dist.monitored_barrier,
        lambda: dist.new_subgroups(1),
        lambda: dist.new_subgroups_by_enumeration([[0]]),
        lambda: dist.split_group(split_ranks=[[0]]),
        lambda: dist.all_gather_object([None], 1),
        lambda: dist.set_pg_timeout(1),
        dist.abort_process_group,
        dist.get_backend_config,
    ):
        with pytest.raises(NotInitializedError, match="Default process group has not been initialized"):
            call()


# -- ending by force


def abort_one_group(gate: threading.Event) -> None:
    rank = dist.get_rank()
    group, other = dist.new_group(), dist.new_group()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)  # nobody joins in
        assert gate.wait(SOON)
        dist.abort_process_group(group)
        with pytest.raises(GroupAbortedError, match=r"rank 0 has called abort_process_group\(\)"):
            work.wait()
        with pytest.raises(NotInitializedError, match="destroyed already"):
            dist.destroy_process_group(group)
    else:
        received = dist.irecv(torch.zeros(1), 0, group=group)
        gate.set()
        with pytest.raises(GroupAbortedError, match=r"rank 0 has called abort_process_group\(\)"):
            received.wait()
        with pytest.raises(GroupAbortedError, match=r"rank 0 has called abort_process_group\(\)"):
            dist.barrier(group)
        dist.destroy_process_group(group)
    assert members(other) == [0, 1]
    dist.barrier()


def abort_all_groups() -> None:
    rank = dist.get_rank()
    group = dist.new_group()
    if rank == 0:
        dist.recv(torch.zeros(1), 1)  # so that the other is not still making the group
        dist.abort_process_group()
        assert not dist.is_initialized()
        return
    dist.send(torch.zeros(1), 0)
    for each in (group, dist.group.WORLD):
        with pytest.raises(GroupAbortedError, match="abort_process_group"):
            dist.all_reduce(torch.ones(1), group=each)
    dist.abort_process_group(dist.group.WORLD)
    assert not dist.is_initialized()


def test_aborting_a_group_ends_what_hangs_in_it_on_every_rank() -> None:
    run("threads", 2, abort_one_group, threading.Event())


@pytest.mark.parametrize("kind", KINDS)
def test_aborting_everything(kind: str) -> None:
    for outcome in outcomes(kind, 2, abort_all_groups):
        assert outcome.error is None
