"""Survivors of a group agree who is left and go on: members, numbers, other groups, and who is told what."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.world.new_groups import make_group
from worlds import (
    KINDS,
    WORLD_SECONDS,
    Outcome,
    await_note,
    leave_note,
    outcomes,
    processes,
    run,
    store_barrier,
)

SOON = 20.0


class Gone(Exception):
    """End a rank that leaves."""


def leave() -> None:
    raise Gone


def results(ended: list[Outcome]) -> list[Any]:
    """Return what the ranks returned that did not leave."""
    return [outcome.result() for outcome in ended if not isinstance(outcome.error, Gone)]


def until_it_fails(group: dist.ProcessGroup | None = None) -> dist.GroupAbortedError:
    """Use the group until a rank is missing."""
    try:
        while True:
            dist.all_reduce(torch.ones(100), group=group)
    except dist.GroupAbortedError as error:
        return error.with_traceback(None)


def check_group(group: dist.ProcessGroup) -> None:
    """Every rank of it is there, under its number, and all operations find each other."""
    rank, size = group.rank(), group.size()
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == size * (size - 1) / 2
    gathered = torch.empty(size)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=group)
    assert gathered.tolist() == list(range(size))
    work = dist.barrier(group=group, async_op=True)
    assert work is not None
    work.wait()
    if size > 1:
        message = torch.empty(1)
        after, before = group.to_global_rank((rank + 1) % size), group.to_global_rank((rank - 1) % size)
        sent = dist.isend(torch.tensor([float(rank)]), after, group=group)
        dist.recv(message, before, group=group)
        sent.wait()
        assert message.item() == (rank - 1) % size


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def meet() -> None:
    """A barrier that no rank is still in when another has gone on: shrink() calls ranks out of operations."""
    store, size = world().store, dist.get_world_size()
    number, last = divmod(store.add("met", 1) - 1, size)
    if last == size - 1:
        store.set(f"meeting {number}", b"")
    store.wait([f"meeting {number}"])


# -- the default group


def lose_one(victim: int) -> tuple[int, tuple[int, ...]]:
    meet()
    if dist.get_rank() == victim:
        leave()
    old, before = world(), dist.get_rank()
    until_it_fails()
    new = old.shrink()
    assert new is world() is not old
    assert dist.get_rank() == new.rank() == new.previous_ranks.index(before)
    assert dist.get_world_size() == new.size() == 3
    assert new.lost_ranks == (victim,)
    assert dist.get_process_group_ranks() == [0, 1, 2]
    assert new.timeout == old.timeout
    assert new.backend == old.backend
    assert new.group_name == "default~1"
    check_group(new)
    with pytest.raises(dist.GroupDestroyedError):
        dist.all_reduce(torch.ones(1), group=old)
    with pytest.raises(dist.GroupDestroyedError, match="or shrunk it already"):
        old.shrink()
    return new.rank(), new.previous_ranks


@pytest.mark.parametrize("victim", [0, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_that_are_left_go_on_with_new_numbers(kind: str, victim: int) -> None:
    previous = tuple(rank for rank in range(4) if rank != victim)
    assert results(outcomes(kind, 4, lose_one, victim)) == [(rank, previous) for rank in range(3)]


def lose_all_but_one() -> list[tuple[int, ...]]:
    """One after the other: the rank with the middle number leaves."""
    seen = []
    while dist.get_world_size() > 1:
        meet()
        if dist.get_rank() == dist.get_world_size() // 2:
            leave()
        until_it_fails()
        seen.append(world().shrink().previous_ranks)
        check_group(world())
    assert world().group_name == "default~4"
    assert world().shrink().previous_ranks == (0,), "alone one may shrink as well"
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_shrinks_again_and_again_down_to_one_rank(kind: str) -> None:
    (seen,) = results(outcomes(kind, 5, lose_all_but_one))
    assert seen == [(0, 1, 3, 4), (0, 1, 3), (0, 2), (0,)]


def lose_nobody() -> None:
    before = dist.get_rank()
    receive = dist.irecv(torch.empty(1))
    meet()
    new = world().shrink()
    assert new.previous_ranks == (0, 1, 2)
    assert new.lost_ranks == ()
    assert new.rank() == before
    with pytest.raises(dist.GroupAbortedError, match=r"rank \d has called shrink\(\)"):
        receive.wait(SOON)
    check_group(new)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_loss_it_is_the_same_group_anew(kind: str) -> None:
    run(kind, 3, lose_nobody)


def new_groups_in_a_shrunken_world() -> list[str]:
    first = dist.new_group([0, 1])
    meet()
    if dist.get_rank() == 2:
        leave()
    until_it_fails()
    world().shrink()
    groups = [first, dist.new_group([0, 1]), dist.new_group([1, 0], sort_ranks=False), dist.new_group([0, 1])]
    if dist.get_rank() == 1:
        groups.append(dist.new_group([1], use_local_synchronization=True))
    for group in groups:
        assert isinstance(group, dist.ProcessGroup)
        check_group(group)
    names = [group.group_name for group in groups if isinstance(group, dist.ProcessGroup)]
    assert len(set(names)) == len(groups)
    dist.destroy_process_group(groups[1])
    assert not world().communicator.closed
    return names[:4]


@pytest.mark.parametrize("kind", KINDS)
def test_groups_can_be_made_in_the_world_that_is_left(kind: str) -> None:
    """Its store is the new rank 0's; names are unlike those of groups from before."""
    names = results(outcomes(kind, 3, new_groups_in_a_shrunken_world))
    assert names[0] == names[1]


def use_the_store() -> bytes:
    meet()
    if dist.get_rank() == 0:
        leave()
    until_it_fails()
    store = world().shrink().store
    assert not store.check(["key"])
    meet()
    if dist.get_rank() == 1:
        store.set("key", b"value")
    value = store.get("key")
    meet()
    dist.barrier()
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_the_new_group_has_a_store_of_its_own(kind: str) -> None:
    assert results(outcomes(kind, 3, use_the_store)) == [b"value"] * 2


# -- what was under way


def leave_works_behind() -> list[str]:
    meet()
    if dist.get_rank() == 1:
        leave_note("ready")
        signal.pause()
    other = 2 - dist.get_rank()
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(5)]
    works += [dist.irecv(torch.empty(1), 1), dist.irecv(torch.empty(1), other, tag=7)]
    works.append(dist.irecv(torch.empty(1)))
    await_note("killed")
    new = world().shrink()
    for work in works:
        assert work is not None
        assert work.is_completed(), "nothing of the old group is under way any more"
    check_group(new)
    return [type(work.exception()).__name__ for work in works if work is not None]


def test_what_was_under_way_fails_naming_who_died() -> None:
    with processes(3, leave_works_behind) as ranks:
        ranks.await_file("ready")
        ranks.signal(1, signal.SIGKILL)
        ranks.wait(1)
        open(ranks.path("killed"), "w").close()
        ended = ranks.finish()
    assert [ended[rank].result() for rank in (0, 2)] == [["RankFailedError"] * 8] * 2


def shrink_while_another_rank_waits() -> str:
    """Rank 1 does not know yet: it waits for rank 0, which has heard of the death otherwise."""
    meet()
    rank = dist.get_rank()
    if rank == 2:
        leave()
    if rank == 1:
        error = str(until_it_fails())
        world().shrink()
        return error
    context = world().communicator.engine.context
    while context.arena.progress(1) >> at.STEP_BITS <= context.load_word(at.SEQUENCE):
        time.sleep(0.001)  # until rank 1 has begun what this rank has not
    world().shrink()
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_are_still_in_an_operation_are_called_out_of_it(kind: str) -> None:
    _, heard = results(outcomes(kind, 3, shrink_while_another_rank_waits))
    assert "can no longer be used" in heard


# -- other groups


def world_of_pairs(victim: int) -> tuple[list[int], ...]:
    rank = dist.get_rank()
    low, high = dist.new_group([1, 0], sort_ranks=False), dist.new_group([2, 3])
    pair = low if rank < 2 else high
    assert isinstance(pair, dist.ProcessGroup)
    check_group(pair)
    meet()
    if rank == victim:
        leave()
    until_it_fails()
    world().shrink()
    was_mine = victim in ((0, 1) if rank < 2 else (2, 3))
    if not was_mine:
        check_group(pair)
        return (dist.get_process_group_ranks(pair),)
    before = dist.get_process_group_ranks(pair)
    with pytest.raises(dist.RankFailedError, match=r"the world has been shrunk and has no rank \d of this"):
        dist.all_reduce(torch.ones(1), group=pair)
    left = pair.shrink()
    check_group(left)
    assert left.size() == 1
    return before, dist.get_process_group_ranks(left)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_without_a_lost_rank_go_on_and_the_others_say_what_is_wrong(kind: str, victim: int) -> None:
    found = results(outcomes(kind, 4, world_of_pairs, victim))
    if victim == 0:  # ranks 1, 2, 3 are 0, 1, 2 now
        assert found == [([0, -1], [0]), ([1, 2],), ([1, 2],)]
    else:
        assert found == [([1, 0],), ([1, 0],), ([2, -1], [2])]


def lose_a_rank_of_a_subgroup() -> tuple[list[int], int]:
    rank = dist.get_rank()
    group = dist.new_group([3, 1, 2], sort_ranks=False)
    store_barrier()
    if rank == 2:
        leave()
    if rank == 0:
        return [], 4
    assert isinstance(group, dist.ProcessGroup)
    until_it_fails(group)
    new = group.shrink()
    check_group(new)
    assert new.previous_ranks == (0, 1)
    assert dist.get_group_rank(new, 3) == 0
    assert world().size() == 4, "the world is another group"
    return dist.get_process_group_ranks(new), dist.get_world_size()


@pytest.mark.parametrize("kind", KINDS)
def test_a_subgroup_shrinks_by_itself_and_keeps_the_global_numbers(kind: str) -> None:
    found = results(outcomes(kind, 4, lose_a_rank_of_a_subgroup))
    assert found == [([], 4), ([3, 1], 4), ([3, 1], 4)]


def forget_groups_that_have_not_met() -> None:
    before = make_group([0, 1], tag="pair", deferred=True)
    meet()
    if dist.get_rank() == 2:
        leave()
    until_it_fails()
    world().shrink()
    with pytest.raises(dist.GroupDestroyedError):
        dist.all_reduce(torch.ones(1), group=before)
    after = make_group([0, 1], tag="pair", deferred=True)
    assert isinstance(after, dist.ProcessGroup)
    check_group(after)


def test_groups_whose_members_had_not_met_are_made_anew() -> None:
    results(outcomes("processes", 3, forget_groups_that_have_not_met))


def shrink_without_a_world(store: dist.Store, rank: int, size: int) -> tuple[int, ...]:
    group = dist.ProcessGroup(store, rank, size, timeout=SOON)
    store.barrier("made", size)  # a death would abort it for who is still on the way out of making it
    if rank == 1:
        group.destroy()
        return ()
    with pytest.raises(dist.GroupAbortedError):
        group.allreduce(torch.ones(1)).wait()
    new = group.shrink()
    assert not dist.is_initialized()
    tensor = torch.ones(1)
    new.allreduce(tensor).wait()
    assert tensor.item() == 2
    members = tuple(new.previous_ranks)
    new.destroy()
    return members


def test_a_group_made_directly_shrinks_without_a_world() -> None:
    ended = outcomes("processes", 3, shrink_without_a_world, init=False)
    assert [outcome.result() for outcome in ended] == [(0, 2), (), (0, 2)]


# -- ranks that live and do not come


def come_late() -> str:
    meet()
    rank = dist.get_rank()
    if rank == 2:
        leave()
    if rank == 1:
        await_note("rank 0 has given up")
        world().shrink()
        check_group(world())
        return ""
    await_note("rank 2 has ended")
    with pytest.raises(dist.CollectiveTimeoutError) as caught:
        world().shrink(timeout=0.3)
    assert caught.value.missing == (1,)
    leave_note("rank 0 has given up")
    assert world().shrink().previous_ranks == (0, 1)
    check_group(world())
    return str(caught.value)


def test_a_rank_that_lives_and_does_not_come_is_named_and_may_come_later() -> None:
    with processes(3, come_late) as ranks:
        ranks.wait(2)
        open(ranks.path("rank 2 has ended"), "w").close()
        told, _ = results(ranks.finish())
    assert "rank 1 lives, but has not called shrink(). Call shrink() again to go on waiting, or" in told
    assert "shrink(exclude=[1])" in told
    assert "\n  rank 1 " in told
    assert "is at " in told, "where its program is"


def sleep_through_it() -> str:
    """Rank 1 is stopped in its sleep while the others go on without it."""
    meet()
    rank = dist.get_rank()
    leave_note(f"ready {rank}")
    if rank == 1:
        with pytest.raises(dist.RankExcludedError) as caught:
            until_it_is_over()
        with pytest.raises(dist.RankExcludedError, match="was shrunk to ranks 0, 2 without rank 1"):
            world().shrink()
        assert caught.value.survivors == (0, 2)
        return str(caught.value)
    await_note("stopped")
    with pytest.raises(dist.CollectiveTimeoutError):
        world().shrink(timeout=0.2)
    leave_note(f"rank {rank} has given up")
    await_note(f"rank {2 - rank} has given up")  # or this rank's exclusion would be the other's as well
    new = world().shrink(exclude=[1])
    assert new.lost_ranks == (1,)
    check_group(new)
    leave_note(f"gone on {rank}")
    return ""


def until_it_is_over() -> None:
    while True:
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_wakes_up_after_the_others_went_on_is_told() -> None:
    with processes(3, sleep_through_it) as ranks:
        for rank in range(3):
            ranks.await_file(f"ready {rank}")
        ranks.signal(1, signal.SIGSTOP)
        open(ranks.path("stopped"), "w").close()
        for rank in (0, 2):
            ranks.await_file(f"gone on {rank}")
        ranks.signal(1, signal.SIGCONT)
        told = ranks.finish()[1].result()
    assert "group 'default' was shrunk to ranks 0, 2 without rank 1, because rank" in told
    assert "has excluded it; this rank has no part in what the others do" in told


def exclude_each_other() -> tuple[int, ...]:
    meet()
    rank = dist.get_rank()
    if rank < 2:
        with pytest.raises(dist.RankExcludedError, match=f"rank {1 - rank} has excluded (rank {rank}|it)"):
            world().shrink(exclude=[1 - rank])
        return ()
    while len(world().communicator.engine.context.registers.excluded()) < 2:
        time.sleep(0.001)
    return world().shrink().previous_ranks


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_exclude_each_other_are_both_out(kind: str) -> None:
    assert run(kind, 4, exclude_each_other) == [(), (), (2, 3), (2, 3)]


def be_interrupted() -> tuple[int, ...]:
    """Rank 0 gets Ctrl-C while it waits for rank 1; both shrink the group afterwards."""
    meet()
    if dist.get_rank() == 2:
        leave()
    if dist.get_rank() == 0:
        with pytest.raises(KeyboardInterrupt):
            world().shrink()
        leave_note("interrupted")
    else:
        await_candidate(0)
        leave_note("waiting")
    await_note("interrupted")
    return world().shrink().previous_ranks


def await_candidate(rank: int) -> None:
    """Wait until a rank has called shrink() or grow(); it waits there for this rank."""
    registers, deadline = world().communicator.engine.context.registers, time.monotonic() + WORLD_SECONDS
    while rank not in registers.candidates():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_ctrl_c_gets_through_and_the_rank_may_come_again() -> None:
    with processes(3, be_interrupted) as ranks:
        ranks.await_file("waiting")
        ranks.wait(2)
        ranks.signal(0, signal.SIGINT)
        assert results(ranks.finish()) == [(0, 1)] * 2


# -- arguments, and torch's form


def refuse_arguments() -> None:
    group = world()
    for exclude in ([3], [-1], [group.rank()]):
        with pytest.raises(dist.InvalidArgumentError, match="must be other ranks of group 'default'"):
            group.shrink(exclude=exclude)
    with pytest.raises(dist.InvalidArgumentTypeError, match="`exclude` must be a list of ints"):
        group.shrink(exclude=["1"])  # type: ignore[list-item]
    refusals: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "`ranks_to_exclude` must be a list", lambda: dist.shrink_group((1,))),  # type: ignore[arg-type]
        (ValueError, "ranks_to_exclude cannot be empty", lambda: dist.shrink_group([])),
        (ValueError, "Invalid shrink_flags value: 7", lambda: dist.shrink_group([1], shrink_flags=7)),
        (TypeError, "must be a list of ints, got ", lambda: dist.shrink_group([0, "1"])),  # type: ignore[list-item]
        (
            ValueError,
            "Rank 3 at index 0 .* is out of bounds for group size 3",
            lambda: dist.shrink_group([3]),
        ),
        (ValueError, "Duplicate rank 1 found", lambda: dist.shrink_group([1, 1])),
        (ValueError, "Cannot exclude all 3 ranks", lambda: dist.shrink_group([0, 1, 2])),
        (RuntimeError, "is in the exclusion list", lambda: dist.shrink_group([group.rank()])),
        (ValueError, "pg_options", lambda: dist.shrink_group([1], pg_options=object())),
    ]
    for error, phrase, call in refusals:
        with pytest.raises(error, match=phrase):
            call()
    other = dist.new_group([0])
    if group.rank() > 0:
        with pytest.raises(ValueError, match="no member of group"):
            dist.shrink_group([1], group=other)
    else:
        with pytest.raises(ValueError, match="Cannot shrink a process group with size 1"):
            dist.shrink_group([0], group=other)
    check_group(group)


def test_wrong_arguments_are_refused_and_the_group_stays_usable() -> None:
    run("threads", 3, refuse_arguments)


def test_a_fake_world_has_nobody_to_lose() -> None:
    def alone() -> None:
        dist.init_process_group("fake", rank=0, world_size=4)
        with pytest.raises(TypeError, match="does not support shrinking operations"):
            world().shrink()

    run("threads", 1, alone, init=False)


def shrink_as_torch_does(flags: int) -> Any:
    meet()
    rank = dist.get_rank()
    tensor = torch.ones(1)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    if rank == 1:
        with pytest.raises(dist.RankExcludedError):
            until_it_is_over()
        return None
    new = dist.shrink_group([1], shrink_flags=flags)
    if flags == dist.SHRINK_DEFAULT:
        work.wait()
        assert tensor.item() == 3
    assert new is world()
    check_group(new)
    return new.previous_ranks


@pytest.mark.parametrize("kind", KINDS)
def test_shrink_group_excludes_a_living_rank_after_what_is_under_way(kind: str) -> None:
    assert run(kind, 3, shrink_as_torch_does, dist.SHRINK_DEFAULT) == [(0, 2), None, (0, 2)]


def shrink_at_once() -> Any:
    """Rank 1, which is to be left out, has not called what the others wait for."""
    meet()
    if dist.get_rank() == 1:
        assert isinstance(until_it_fails(), dist.GroupAbortedError)
        return None
    receive = dist.irecv(torch.empty(1), 1)
    new = dist.shrink_group([1], shrink_flags=dist.SHRINK_ABORT)
    assert isinstance(receive.exception(), dist.GroupAbortedError)
    check_group(new)
    return new.previous_ranks


def test_shrink_group_can_abort_what_is_under_way() -> None:
    assert run("threads", 3, shrink_at_once) == [(0, 2), None, (0, 2)]
