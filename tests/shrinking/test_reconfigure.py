"""Groups that are made without peers, and reconfigured: members, numbers, deaths, refusals."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import Any

import pytest
import torch
from test_shrink import check_group, world

import torchestra as dist
from torchestra.communicator.communicator import Communicator
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.errors import GradientReductionError
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.process_group import reconfiguring
from torchestra.process_group.reconfigure_meeting import ReconfigureMeeting
from torchestra.process_group.starting import GroupSpec
from torchestra.store import Store
from worlds import KINDS, OP_SECONDS, WORLD_SECONDS, outcomes, processes, run

SOON = OP_SECONDS
SHORT = 1.5


def alone(store: Store | None = None, rank: int = -1, size: int = -1) -> tuple[dist.ProcessGroup, Store, int]:
    """Make a default group without peers; a thread has its number and a store from the test's world."""
    dist.init_process_group(enable_reconfigure=True, timeout=SOON, rank=rank, world_size=size)
    group = world()
    if store is None:
        here = current_thread_rank()
        assert here is not None
        store, rank = here.store, here.rank
    store.set(f"handle/{rank}", group.get_reconfigure_handle())
    return group, store, rank


def handles_of(store: Store, *ranks: int) -> list[str]:
    store.set_timeout(SOON)
    return [store.get(f"handle/{rank}").decode() for rank in ranks]


def step(store: Store, name: str, count: int) -> None:
    """Wait until so many ranks have come to a point of the test."""
    if store.add(f"step/{name}", 1) == count:
        store.set(f"done/{name}", b"1")
    store.wait([f"done/{name}"], WORLD_SECONDS)


def total(group: dist.ProcessGroup) -> float:
    tensor = torch.full((3,), 1.0 + group.rank())
    dist.all_reduce(tensor)
    return float(tensor[0])


def use_until_it_fails(group: dist.ProcessGroup) -> None:
    while True:
        total(group)


def late_join_and_leave(*place: Any) -> list[Any]:
    group, store, rank = alone(*place)
    seen: list[Any] = []
    if rank < 2:
        group.reconfigure(1, handles_of(store, 1, 0))
        check_group(group)
        seen.append((dist.get_rank(), dist.get_world_size(), total(group)))
    group.reconfigure(2, handles_of(store, 0, 1, 2), timeout=SOON)
    check_group(group)
    seen.append((dist.get_rank(), dist.get_world_size(), total(group), group.joined_ranks, group.lost_ranks))
    part = dist.new_group([0, 2])
    step(store, "all", 3)
    if rank != 1:
        group.reconfigure(3, set(handles_of(store, 0, 2)))
        seen.append((dist.get_world_size(), total(group), group.lost_ranks))
        assert dist.get_process_group_ranks(part) == [group.previous_ranks.index(old) for old in (0, 2)]
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=part)
        assert dist.new_group([0, 1]).group_name != part.group_name
        assert tensor.item() == 2
    else:
        with pytest.raises(dist.GroupAbortedError, match="has destroyed the group"):
            use_until_it_fails(group)
    step(store, "end", 3)
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_come_late_and_leave(kind: str) -> None:
    ended = run(kind, 3, late_join_and_leave, init=False)
    assert ended[0] == [(1, 2, 3.0), (0, 3, 6.0, (2,), ()), (2, 3.0, (1,))]
    assert ended[1] == [(0, 2, 3.0), (1, 3, 6.0, (2,), ())]
    assert ended[2] == [(2, 3, 6.0, (0, 1, 2), ()), (2, 3.0, (1,))]


def train_in_reconfigured_groups(*place: Any) -> list[float]:
    """Average over ranks 0 to 2, lose rank 1 within a step, and go on with the same wrapper and rank 3."""
    group, store, rank = alone(*place)
    module = torch.nn.Linear(2, 1, bias=False)
    seen: list[float] = []

    def backward(model: torch.nn.Module) -> None:
        module.weight.grad = None
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()

    if rank < 3:
        group.reconfigure(1, handles_of(store, 0, 1, 2))
        model = dist.nn.parallel.DistributedDataParallel(module)
        backward(model)
        seen.append(float(module.weight.grad[0, 0]))  # type: ignore[index]
        step(store, "first", 3)
        if rank != 1:
            with pytest.raises(dist.GroupAbortedError):
                backward(model)
    if rank != 1:
        group.reconfigure(2, handles_of(store, 3, 2, 0))
        if rank == 3:
            model = dist.nn.parallel.DistributedDataParallel(module, init_sync=False)
        else:
            model.rebuild()
        for _ in range(2):
            backward(model)
            seen.append(float(module.weight.grad[0, 0]))  # type: ignore[index]
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapper_goes_on_in_the_reconfigured_group(kind: str) -> None:
    later = [8 / 3, 8 / 3]
    expected = [[2.0, *later], [2.0], [2.0, *later], later]
    for seen, means in zip(run(kind, 4, train_in_reconfigured_groups, init=False), expected, strict=True):
        assert seen == pytest.approx(means)


def on_several_hosts(*place: Any) -> float:
    group, store, rank = alone(*place)
    group.reconfigure(1, handles_of(store, 0, 1, 2, 3))
    assert total(group) == 10
    if rank != 2:
        group.reconfigure(2, handles_of(store, 3, 1, 0))
        group = group.shrink(exclude=[1]) if rank != 1 else group
        seen = total(group) if rank != 1 else 0.0
        step(store, "shrunk", 3)
        group.reconfigure(3, handles_of(store, 0, 1, 3))
        assert total(group) == 6
        step(store, "end", 3)
        dist.destroy_process_group()
        return seen
    return 0.0


def test_ranks_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHESTRA_SECRET", "of this test")
    assert run("threads", 4, on_several_hosts, init=False, hosts=["a", "a", "b", "b"]) == [3.0, 0.0, 0.0, 3.0]


def test_no_rank_returns_before_all_have_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it might shrink the group, and so abort it for those that are still on their way in."""
    waiting, entered = threading.Semaphore(0), []
    start, await_inside = reconfiguring.start, ReconfigureMeeting.await_inside

    def start_late(spec: GroupSpec) -> Communicator:
        made = start(spec)
        if spec.rank == 1:
            assert all(waiting.acquire(timeout=SOON) for _ in range(2))
            entered.append(spec.rank)
        return made

    def tell_and_wait(meeting: ReconfigureMeeting) -> None:
        if meeting.rank != 1:
            waiting.release()
        await_inside(meeting)

    def body() -> list[int]:
        group, store, _ = alone()
        group.reconfigure(1, handles_of(store, 0, 1, 2))
        return list(entered)

    monkeypatch.setattr(reconfiguring, "start", start_late)
    monkeypatch.setattr(ReconfigureMeeting, "await_inside", tell_and_wait)
    assert run("threads", 3, body, init=False) == [[1]] * 3


def test_a_rank_that_cannot_enter_is_named_to_those_that_are_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    start = reconfiguring.start

    def fail_late(spec: GroupSpec) -> Communicator:
        made = start(spec)
        if spec.rank == 1 and spec.size == 3:
            made.close()
            raise MemoryError
        return made

    def body() -> float:
        group, store, rank = alone()
        with pytest.raises(MemoryError if rank == 1 else dist.DistBackendError) as failed:
            group.reconfigure(1, handles_of(store, 0, 1, 2))
        assert rank == 1 or "rank 1 could not enter it: MemoryError" in str(failed.value)
        if rank != 1:
            group.reconfigure(2, handles_of(store, 0, 2))
            return total(group)
        return 0.0

    monkeypatch.setattr(reconfiguring, "start", fail_late)
    assert run("threads", 3, body, init=False) == [3.0, 0.0, 3.0]


def goes_on_after_a_death(store: Store, rank: int, size: int) -> Any:
    group, store, rank = alone(store, rank, size)
    if rank < 3:
        group.reconfigure(1, handles_of(store, 0, 1, 2))
        step(store, "members", 3)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.RankFailedError):
            use_until_it_fails(group)
    with pytest.raises(dist.RankFailedError, match=r"rank 0 .* has ended") as failed:
        group.reconfigure(2, handles_of(store, 0, 1, 2, 3))
    with pytest.raises(dist.RankFailedError, match=r"rank 2 .* has ended") as third:
        group.reconfigure(3, handles_of(store, 2, 1, 0, 3))
    with pytest.raises(dist.DistBackendError, match="has no peers"):
        total(group)
    group.reconfigure(4, handles_of(store, 3, 1, 2))
    return (
        failed.value.ranks,
        third.value.ranks,
        dist.get_rank(),
        total(group),
        group.joined_ranks,
        group.lost_ranks,
    )


def test_survivors_and_a_newcomer_go_on_after_a_death() -> None:
    with processes(4, goes_on_after_a_death, init=False) as ranks:
        dead, *others = ranks.finish()
    assert dead.exit_code == -signal.SIGKILL
    assert [each.result() for each in others] == [
        ((0,), (2,), 1, 6.0, (0,), (0,)),
        ((0,), (2,), 2, 6.0, (0,), (0,)),
        ((0,), (2,), 0, 6.0, (0, 1, 2), ()),
    ]


def shrinks_and_is_reconfigured(*place: Any) -> list[Any]:
    """Ranks 0 to 2 have met; rank 0 leaves, the others shrink, rank 3 comes, and one more shrinking."""
    group, store, rank = alone(*place)
    handle = group.get_reconfigure_handle()
    seen: list[Any] = []
    if rank < 3:
        group.reconfigure(1, handles_of(store, 0, 1, 2))
        with pytest.raises(
            dist.InvalidArgumentError, match=r"grow: .* call reconfigure\(\) with the handles"
        ):
            group.grow()
        with pytest.raises(dist.InvalidArgumentError, match=r"pending_joiners: .* enable_reconfigure"):
            group.pending_joiners()
        step(store, "members", 3)
        if rank == 0:
            dist.destroy_process_group()
            return seen
        old, group = group, group.shrink()
        assert group is world()
        assert dist.get_world_size() == 2
        check_group(group)
        assert (group.group_name, group.get_reconfigure_handle()) == ("default~1", handle)
        with pytest.raises(
            dist.GroupDestroyedError, match=r"the group that shrink.. has returned, 'default~1'"
        ):
            old.reconfigure(2, [handle])
        seen.append((group.rank(), total(group), group.previous_ranks))
        part = dist.new_group([0, 1])
    group.reconfigure(2, handles_of(store, 3, 2, 1))
    assert world() is group
    assert group.group_name == "default"
    check_group(group)
    seen.append((group.rank(), total(group), tuple(group.previous_ranks), group.joined_ranks))
    if rank < 3:
        assert dist.get_process_group_ranks(part) == [2, 1]
        dist.barrier(group=part)
    step(store, "three", 3)
    if rank != 2:
        group = group.shrink(exclude=[1])
        assert group.group_name == "default~1"
        assert dist.new_group([0, 1]) is not None
        seen.append((group.rank(), total(group), group.lost_ranks))
    step(store, "end", 3)
    dist.destroy_process_group()
    return seen


SHRUNK_AND_RECONFIGURED = [
    [],
    [(0, 3.0, (1, 2)), (2, 6.0, (-1, 1, 0), (0,)), (1, 3.0, (1,))],
    [(1, 3.0, (1, 2)), (1, 6.0, (-1, 1, 0), (0,))],
    [(0, 6.0, (-1, -1, -1), (0, 1, 2)), (0, 3.0, (1,))],
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_shrinks_and_is_reconfigured_then(kind: str) -> None:
    assert run(kind, 4, shrinks_and_is_reconfigured, init=False) == SHRUNK_AND_RECONFIGURED


def bad_calls(*place: Any) -> None:
    group, store, rank = alone(*place)
    own, other = handles_of(store, rank, 1 - rank)
    both = handles_of(store, 0, 1)

    # Refused before anything is sent: the group is as before.
    group.reconfigure(1, both)
    wrong_handles: list[tuple[type[Exception], Any, str]] = [
        (ValueError, [other], "own handle is not one of the 1"),
        (ValueError, [own, own], "the same handle as rank 0 and as rank 1"),
        (ValueError, [own, "no handle"], "must be handles of get_reconfigure_handle"),
        (TypeError, [own, 5], "must be texts"),
        (TypeError, own, "must be a list or a set"),
        (TypeError, None, "must be a list or a set"),
    ]
    for kind, wrong, says in wrong_handles:
        with pytest.raises(kind, match=says):
            group.reconfigure(2, wrong)
    with pytest.raises(ValueError, match="`uuid` 1 was already used"):
        group.reconfigure(1, both)
    with pytest.raises(ValueError, match="64 bits"):
        group.reconfigure(1 << 70, both)
    assert total(group) == 3
    step(store, "refused", 2)

    # The ranks give different lists, or the same in another order: an error on both, soon.
    with pytest.raises(dist.DistBackendError, match=r"(other|different) handles"):
        group.reconfigure(10, both if rank == 0 else [*both, own.replace(";", ";f", 1)])
    step(store, "lists", 2)
    with pytest.raises(dist.DistBackendError, match=r"(other|different) handles|did not"):
        group.reconfigure(11, [own, other], timeout=SHORT * 4)
    step(store, "orders", 2)

    # Different uuids, and a rank that lives and does not come: within the time-out, with its name.
    with pytest.raises(dist.CollectiveTimeoutError, match=f"rank {1 - rank} did not call it within") as late:
        group.reconfigure(20 + rank, both, timeout=SHORT)
    assert late.value.missing == (1 - rank,)
    step(store, "uuids", 2)
    if rank == 1:
        with pytest.raises(dist.CollectiveTimeoutError, match="rank 0 did not call it within"):
            group.reconfigure(30, both, timeout=SHORT)
    step(store, "late", 2)
    if rank == 0:
        with pytest.raises(dist.CollectiveTimeoutError, match=r"rank 0: .* rank 0 did not call"):
            group.reconfigure(30, both, timeout=SHORT)  # the other has given up
    step(store, "given up", 2)
    group.reconfigure(40, both)
    assert total(group) == 3
    step(store, "end", 2)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_bad_calls_are_refused_on_all_ranks(kind: str) -> None:
    run(kind, 2, bad_calls, init=False)


def ends_before(store: Store, rank: int, size: int) -> Any:
    group, store, rank = alone(store, rank, size)
    everyone = handles_of(store, 0, 1, 2)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.RankFailedError, match=r"rank 2 \(process .*\) has ended") as failed:
        group.reconfigure(1, everyone)
    return failed.value.ranks


def test_a_listed_rank_that_is_dead_is_named_at_once() -> None:
    first, second, _ = outcomes("processes", 3, ends_before, init=False)
    assert (first.result(), second.result()) == ((2,), (2,))


def destroys(*place: Any) -> Any:
    group, store, rank = alone(*place)
    both = handles_of(store, 0, 1)
    step(store, "known", 2)
    if rank == 1:
        dist.destroy_process_group()
        step(store, "destroyed", 2)
        return None
    step(store, "destroyed", 2)
    with pytest.raises(dist.RankFailedError, match="has destroyed its group") as failed:
        group.reconfigure(1, both)
    return failed.value.ranks


def test_a_rank_that_has_destroyed_its_group_is_named_at_once() -> None:
    assert run("threads", 2, destroys, init=False) == [(1,), None]


def test_a_group_made_with_its_ranks_is_not_reconfigured() -> None:
    def body() -> None:
        group = world()
        assert not group.supports_reconfigure
        assert not group._supports_reconfigure()
        with pytest.raises(dist.DistBackendError, match="has been made with its ranks"):
            group.get_reconfigure_handle()
        with pytest.raises(dist.DistBackendError, match="has been made with its ranks"):
            group.reconfigure(1, ["x"])

    run("threads", 1, body)


def test_what_has_no_meaning_with_enable_reconfigure_is_refused() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="meet at no `init_method`"):
            dist.init_process_group(init_method="env://", enable_reconfigure=True)
        with pytest.raises(ValueError, match='backend "fake" has no other ranks'):
            dist.init_process_group("fake", rank=0, world_size=2, enable_reconfigure=True)
        with pytest.raises(ValueError, match="rank must be from 0"):
            dist.init_process_group(rank=5, world_size=2, enable_reconfigure=True)
        assert not dist.is_initialized()

    run("threads", 1, body, init=False)


def interrupted(*place: Any) -> None:
    group, store, rank = alone(*place)
    both = handles_of(store, 0, 1)
    if rank == 1:
        look = ReconfigureMeeting._look

        def interrupt_and_look(meeting: ReconfigureMeeting, here: Store) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            return look(meeting, here)

        setattr(ReconfigureMeeting, "_look", interrupt_and_look)  # noqa: B010
        with pytest.raises(KeyboardInterrupt):
            group.reconfigure(1, [*both])
        step(store, "interrupted", 2)
        return
    step(store, "interrupted", 2)
    with pytest.raises(dist.DistBackendError, match="rank 1 has given up: KeyboardInterrupt"):
        group.reconfigure(1, both)


def test_an_interrupted_rank_tells_the_others() -> None:
    run("processes", 2, interrupted, init=False)


def use_wrappers_as_they_were() -> list[str]:
    """Reconfigure the group before a forward, and between a forward and its backward."""
    group, store, rank = alone()
    said = []
    for number in (0, 2):
        group.reconfigure(number, handles_of(store, 0, 1))
        model = DistributedDataParallel(torch.nn.Linear(3, 1))
        loss = model(torch.ones(2, 3)).sum()
        group.reconfigure(number + 1, handles_of(store, 1, 0))
        step(store, f"reconfigured {number}", 2)  # who raises in backward aborts the group
        use = partial(model, torch.ones(2, 3)) if number == 0 else loss.backward
        with pytest.raises(GradientReductionError) as raised:
            use()
        said.append(str(raised.value))
        step(store, f"raised {number}", 2)
    group.reconfigure(4, handles_of(store, 0, 1))
    model.rebuild()
    model.zero_grad()
    model(torch.full((2, 3), float(rank))).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.0, 1.0, 1.0]]
    return said


def test_a_wrapper_whose_group_was_reconfigured_says_so_and_what_to_call() -> None:
    for said in run("threads", 2, use_wrappers_as_they_were, init=False):
        for number, message in zip((1, 3), said, strict=True):
            assert f"group 'default' was reconfigured (uuid {number}) after the module was wrapped" in message
            assert "call rebuild() of the wrapper on all ranks" in message
