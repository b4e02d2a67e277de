"""The monitored barrier: which ranks it names when some do not arrive, and what the others raise."""

from __future__ import annotations

import contextlib
import signal
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.errors import CollectiveTimeoutError, GroupAbortedError, InvalidArgumentError, RankFailedError
from torchestra.process_group import monitored_barrier
from torchestra.system import deadline
from worlds import KINDS, await_note, leave_note, outcomes, processes, run, store_barrier

SOON = 50.0
REACHED = r"Rank {} successfully reached monitoredBarrier, but received errors while waiting for send/recv"


def everybody_comes() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(10) * rank
    for wait_all_ranks in (False, True):
        for _ in range(10):
            dist.all_reduce(tensor.clone())
            dist.all_reduce(tensor.clone(), async_op=True)
        dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=wait_all_ranks)
    assert dist.monitored_barrier() is None
    assert dist.group.WORLD.monitored_barrier() is None
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
    group = dist.new_group(range(0, size, 2))
    if rank % 2 == 0:
        dist.monitored_barrier(group, 20.0)
    dist.barrier()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_it_passes_when_everybody_comes(size: int) -> None:
    run("threads", size, everybody_comes)


def test_it_passes_among_processes() -> None:
    run("processes", 3, everybody_comes)


def nobody_leaves_early(arrived: list[int]) -> None:
    for turn in range(20):
        arrived.append(turn)
        dist.monitored_barrier()
        assert arrived.count(turn) == 3


def test_nobody_passes_before_everybody_has_come() -> None:
    run("threads", 3, nobody_leaves_early, [])


def some_do_not_come(
    late: tuple[int, ...], wait_all_ranks: bool, here: threading.Semaphore, done: threading.Event
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    communicator = dist.group.WORLD.communicator
    store_barrier()  # none is still making the group
    if rank in late:
        assert done.wait(SOON)
        # A rank that arrives afterwards raises at once.
        with pytest.raises(GroupAbortedError, match="failed to pass monitoredBarrier"):
            dist.monitored_barrier()
        with pytest.raises(GroupAbortedError, match="failed to pass monitoredBarrier"):
            dist.all_reduce(torch.ones(1))
        return
    if rank == 0:
        for _ in range(size - 1 - len(late)):
            assert here.acquire(timeout=SOON)
        try:
            named = ", ".join(map(str, late)) if wait_all_ranks else str(late[0])
            rank_or_ranks = "Ranks" if wait_all_ranks else "Rank"
            with pytest.raises(
                RuntimeError,
                match=rf"\[Rank 0\]: {rank_or_ranks} {named} failed to pass monitoredBarrier in 1000 ms",
            ) as caught:
                dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=wait_all_ranks)
            assert isinstance(caught.value, CollectiveTimeoutError)
            assert caught.value.missing == (late if wait_all_ranks else late[:1])
            assert "Original exception" in str(caught.value)
        finally:
            done.set()
        return
    receive = communicator.recv

    def receive_after_telling(*arguments: Any) -> int:
        here.release()  # its message to rank 0 is sent, however slow the machine is
        return receive(*arguments)

    communicator.recv = receive_after_telling
    with pytest.raises(GroupAbortedError, match=REACHED.format(rank)) as caught:
        dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=wait_all_ranks)
    assert "failed to pass monitoredBarrier in 1000 ms" in str(caught.value)
    with pytest.raises(GroupAbortedError, match="failed to pass monitoredBarrier"):
        dist.barrier()


@pytest.mark.parametrize("wait_all_ranks", [False, True])
@pytest.mark.parametrize("late", [(1,), (2, 3), (1, 2, 3, 4)])
def test_who_does_not_come_is_named(late: tuple[int, ...], wait_all_ranks: bool) -> None:
    run("threads", 5, some_do_not_come, late, wait_all_ranks, threading.Semaphore(0), threading.Event())


def stuck_elsewhere() -> str:
    """All but rank 0 are in another operation, which they leave when rank 0 gives up."""
    store_barrier()
    if dist.get_rank() == 0:
        with pytest.raises(
            CollectiveTimeoutError, match=r"Ranks 1, 2 failed to pass monitoredBarrier"
        ) as caught:
            dist.group.WORLD.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=True)
    else:
        with pytest.raises(GroupAbortedError, match=r"Ranks 1, 2 failed to pass monitoredBarrier") as caught:
            dist.all_reduce(torch.ones(10))
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_are_stuck_in_another_operation_are_named(kind: str) -> None:
    told = run(kind, 3, stuck_elsewhere)[0]
    assert "stuck_elsewhere" in told  # where they are


def rank_0_has_no_time(hear: threading.Event) -> None:
    group = dist.new_group()
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), 1)  # so that the other is not still making the group
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier after 0 ms") as caught:
            group.monitored_barrier(timedelta(seconds=0))
        assert "No ranks successfully processed in monitoredBarrier" in str(caught.value)
        hear.set()
    else:
        dist.send(torch.zeros(1), 0)
        assert hear.wait(SOON)


def test_without_any_time_rank_0_says_so() -> None:
    run("threads", 2, rank_0_has_no_time, threading.Event())


class Arrival:
    """A message that arrives after the last look at whether it has."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> bool:
        return True


def test_time_in_which_rank_0_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    for module in (deadline, monitored_barrier):
        clock = SimpleNamespace(monotonic=lambda: now[0])
        monkeypatch.setattr(module, "time", clock, raising=False)

    def irecv(*_: Any) -> Arrival:
        now[0] += 100.0
        return Arrival()

    communicator: Any = SimpleNamespace(
        rank=0,
        size=2,
        limit=lambda seconds: seconds,
        queue=SimpleNamespace(abort_on_error=contextlib.nullcontext),
        irecv=irecv,
        isend=lambda *_: Arrival(),
    )
    monitored_barrier.monitored_barrier(communicator, 10.0, False)


def rank_0_does_not_come() -> None:
    """The others' own time is the group's."""
    group = dist.new_group()
    group.set_timeout(0.3)
    store_barrier()  # none is still making the group
    if dist.get_rank() == 0:
        dist.barrier()
        return
    with pytest.raises(CollectiveTimeoutError, match=REACHED.format(1)) as caught:
        dist.monitored_barrier(group, 0.1)
    assert caught.value.missing == (0,)
    dist.barrier()


def test_when_rank_0_does_not_come_the_others_give_up_after_the_time_of_the_group() -> None:
    run("threads", 2, rank_0_does_not_come)


def other_groups_go_on() -> None:
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    store_barrier()  # none is still making the group
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
            dist.monitored_barrier(group, 0.1)
    dist.barrier()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 3


def test_other_groups_are_not_concerned() -> None:
    run("threads", 3, other_groups_go_on)


def behind_what_hangs() -> None:
    """It does not wait its turn behind an operation that hangs."""
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        dist.monitored_barrier(timeout=20)
        dist.barrier()
        assert work.is_success()
    else:
        dist.monitored_barrier(timeout=20)
        dist.all_reduce(torch.ones(1))
        dist.barrier()


def test_it_does_not_wait_for_other_operations() -> None:
    run("threads", 2, behind_what_hangs)


def be_killed_before_it() -> str:
    store_barrier()
    if dist.get_rank() == 2:
        leave_note("here")
        await_note("never")
    with pytest.raises(RankFailedError) as caught:
        dist.monitored_barrier(wait_all_ranks=True)
    assert caught.value.ranks == (2,)
    return str(caught.value)


def test_a_rank_that_has_died_is_named_before_the_time_is_over() -> None:
    with processes(3, be_killed_before_it) as world:
        world.await_file("here")
        world.signal(2, signal.SIGKILL)
        zero, one, _ = world.finish()
    assert "[Rank 0]: Ranks 2 failed to pass monitoredBarrier" in zero.result()
    assert "Rank 1 successfully reached monitoredBarrier" in one.result()


def outside() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.warns(UserWarning, match="Running monitored_barrier on global rank 1 which does"):
            assert dist.monitored_barrier(group, 0.1) is None
    else:
        dist.monitored_barrier(group)
    with pytest.raises(InvalidArgumentError, match="timeout"):
        dist.monitored_barrier(timeout="soon")
    dist.monitored_barrier()


def test_from_outside_and_with_a_wrong_time_out() -> None:
    for outcome in outcomes("processes", 2, outside):
        assert outcome.error is None
