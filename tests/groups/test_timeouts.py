"""Test how long operations wait: by default, as told, and not counting the time in which nothing ran."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchestra as dist
from ports import free_port
from torchestra.errors import CollectiveTimeoutError, GroupAbortedError, StoreTimeoutError
from torchestra.system import deadline
from worlds import OP_SECONDS, await_note, leave_note, processes, results, run

SOON = 50.0


def timed_out(call: Callable[[], Any]) -> None:
    with pytest.raises(CollectiveTimeoutError, match=r"timed out after \d\.\d* s on rank 0") as caught:
        call()
    assert isinstance(caught.value, TimeoutError)


def in_every_way(done: threading.Event) -> None:
    """One rank waits in vain: in a group's own time, in a call's, in one changed later, blocking or not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD.timeout == timedelta(seconds=OP_SECONDS)
    slow = dist.new_group(timeout=timedelta(seconds=50))
    assert slow.timeout == slow.options.timeout == timedelta(seconds=50)
    groups = [dist.new_group() for _ in range(8)]
    assert groups[0].timeout == timedelta(seconds=OP_SECONDS)  # the default group's
    dist.barrier()
    if rank == 1:
        assert done.wait(SOON)
        for group in groups:
            with pytest.raises(GroupAbortedError):
                dist.barrier(group)
        return
    tensor = torch.ones(3)
    try:
        timed_out(lambda: dist.barrier(groups[0], timeout=timedelta(seconds=0.1)))
        timed_out(lambda: dist.barrier(groups[1], async_op=True, timeout=0.1).wait())
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=0.1)
        timed_out(lambda: groups[2].allreduce([tensor], options).wait())
        groups[3].set_timeout(0.1)
        timed_out(lambda: dist.all_gather([tensor.clone() for _ in range(size)], tensor, group=groups[3]))
        dist.set_pg_timeout(timedelta(seconds=0.1), groups[4])
        assert groups[4].options.timeout == timedelta(seconds=0.1)
        timed_out(lambda: dist.broadcast(tensor, 1, group=groups[4], async_op=True).wait())
        groups[5]._set_default_timeout(timedelta(seconds=0.1))
        future = dist.all_reduce(tensor, group=groups[5], async_op=True).get_future()
        timed_out(future.wait)
        groups[6].set_timeout(0.1)
        found = [None] * size
        timed_out(lambda: dist.all_gather_object(found, "mine", group=groups[6]))
        groups[7].set_timeout(0.1)
        sparse = torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=False)
        timed_out(lambda: dist.all_reduce(sparse, group=groups[7]))
    finally:
        done.set()


def test_a_time_out_can_be_given_in_every_way() -> None:
    run("threads", 2, in_every_way, threading.Event())


def changed_while_under_way(gate: threading.Event) -> None:
    """A new time-out is for later operations, also for those that wait their turn."""
    group = dist.new_group()
    if dist.get_rank() == 1:
        assert gate.wait(SOON)
        dist.all_reduce(torch.ones(1), group=group)
        return
    before = dist.flight_record(group).ranks[0].operations_begun
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    with pytest.raises(CollectiveTimeoutError, match=r"is not done after waiting 0\.1 s"):
        work.wait(0.1)
    # An operation reads its time-out when it begins.
    while dist.flight_record(group).ranks[0].operations_begun == before:
        time.sleep(0.002)
    dist.set_pg_timeout(0.05, group)
    gate.set()
    assert work.wait(SOON)
    assert group.timeout == timedelta(seconds=0.05)


def test_a_time_out_that_is_changed_is_for_later_operations() -> None:
    run("threads", 2, changed_while_under_way, threading.Event())


def time_of_the_world() -> None:
    assert dist.group.WORLD.timeout == timedelta(seconds=SOON)
    assert dist.new_group().timeout == timedelta(seconds=SOON)
    assert dist.new_group(timeout=40).timeout == timedelta(seconds=40)


def test_the_time_out_of_init_process_group() -> None:
    run("threads", 2, time_of_the_world, timeout=SOON)


def wrong_time_outs() -> None:
    for wrong in ("soon", [1], True):
        for call in (
            lambda wrong=wrong: dist.set_pg_timeout(wrong),
            lambda wrong=wrong: dist.group.WORLD.set_timeout(wrong),
            lambda wrong=wrong: dist.barrier(timeout=wrong),
            lambda wrong=wrong: dist.monitored_barrier(timeout=wrong),
            lambda wrong=wrong: dist.new_group(timeout=wrong),
            lambda wrong=wrong: dist.new_subgroups(1, timeout=wrong),
            lambda wrong=wrong: dist.split_group(split_ranks=[[0, 1]], timeout=wrong),
        ):
            with pytest.raises(TypeError, match="Expected timeout argument to be of type"):
                call()
    for wrong in (-1, timedelta(seconds=-1), float("nan")):
        with pytest.raises(ValueError, match="timeout must not be negative"):
            dist.set_pg_timeout(wrong)
    assert dist.group.WORLD.timeout == timedelta(seconds=OP_SECONDS)


def test_wrong_time_outs_are_refused() -> None:
    run("threads", 2, wrong_time_outs)


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_the_default_store_waits_as_long_as_the_group(scheme: str, tmp_path: Path) -> None:
    if scheme == "file":
        method = f"file://{tmp_path}/store"
    else:
        method = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group(init_method=method, rank=0, world_size=1, timeout=timedelta(seconds=1))
    try:
        with pytest.raises(StoreTimeoutError, match="nonexistent key"):
            dist.group.WORLD.store.get("nonexistent key")
    finally:
        dist.destroy_process_group()


# -- time in which nothing runs


def test_a_deadline_does_not_count_interruptions(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now))
    wait = deadline.Deadline(10)
    for _ in range(20):  # 1 s in looks of 50 ms
        now += 0.05
        assert wait.elapsed() == pytest.approx(now - 100.0)
    now += 3600  # stopped
    assert wait.elapsed() == pytest.approx(1.5)
    assert wait.elapsed() == pytest.approx(1.5)
    for _ in range(100):
        now += 0.1  # a busy machine
        wait.elapsed()
    assert wait.elapsed() == pytest.approx(11.5)
    assert wait.expired()
    assert wait.remaining() == 0


def test_no_interruption_uses_up_more_than_a_quarter_of_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now))
    for seconds in (0.4, 1.0):
        wait = deadline.Deadline(seconds)
        now += 50
        assert wait.elapsed() == pytest.approx(seconds / 4)
        assert wait.remaining() == pytest.approx(seconds * 3 / 4)


def be_stopped_while_waiting(message: bool) -> bool:
    """All are stopped for longer than the time-out; right afterwards rank 1 calls its part."""
    tensor = torch.ones(1)
    if dist.get_rank() == 0:
        work = dist.irecv(tensor, 1) if message else dist.all_reduce(tensor, async_op=True)
        leave_note("waiting")
        return work.wait()
    await_note("go")
    if message:
        dist.send(tensor, 0)
    else:
        dist.all_reduce(tensor)
    return True


@pytest.mark.parametrize("message", [False, True])
def test_a_time_out_does_not_run_while_the_process_is_stopped(message: bool) -> None:
    with processes(2, be_stopped_while_waiting, message, timeout=2.0) as world:
        world.await_file("waiting")
        for rank in range(2):
            world.signal(rank, signal.SIGSTOP)
        time.sleep(2.5)
        Path(world.path("go")).touch()
        for rank in range(2):
            world.signal(rank, signal.SIGCONT)
        assert results(world.finish()) == [True, True]
