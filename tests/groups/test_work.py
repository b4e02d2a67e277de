"""The handle of an asynchronous operation: futures, failures, order, and what it keeps alive."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

import torchestra as dist
from torchestra.communicator.work import Work
from torchestra.engine.progress import ProgressThread, await_running_tasks
from torchestra.errors import CollectiveMismatchError, CollectiveTimeoutError
from worlds import KINDS, run

SOON = 20.0


# -- futures


def futures_of_everything() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((3,), float(rank + number)) for number in range(4)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    doubled = futures[0].then(lambda done: done.value()[0] * 2)
    chained = doubled.then(lambda done: done.value().sum().item())
    everything = torch.futures.collect_all(futures)
    assert torch.futures.wait_all(futures)[3][0] is tensors[3]
    for number, done in enumerate(everything.wait()):
        expected = sum(range(size)) + size * number
        assert done.value()[0].tolist() == [expected] * 3
    assert doubled.wait().tolist() == [2.0 * sum(range(size))] * 3
    assert chained.wait() == 6.0 * sum(range(size))
    assert dist.barrier(async_op=True).get_future().wait() == []


@pytest.mark.parametrize("kind", KINDS)
def test_futures_hold_results_chain_and_can_be_collected(kind: str) -> None:
    run(kind, 2, futures_of_everything)


def exceptions_in_futures() -> None:
    wrong = dist.all_reduce(torch.ones(1 + dist.get_rank()), async_op=True)
    right = dist.all_reduce(torch.ones(2), async_op=True)
    failed, fine = wrong.get_future(), right.get_future()
    after = failed.then(lambda done: done.value())
    both = torch.futures.collect_all([fine, failed])
    for call in (failed.wait, failed.value, wrong.wait):
        with pytest.raises(CollectiveMismatchError, match="called different operations"):
            call()
    for future in (after, both):
        with pytest.raises(RuntimeError, match="called different operations"):
            future.wait()
    assert fine.wait()[0].tolist() == [dist.get_world_size()] * 2
    assert isinstance(wrong.exception(), CollectiveMismatchError)


@pytest.mark.parametrize("kind", KINDS)
def test_exceptions_arrive_in_the_future(kind: str) -> None:
    run(kind, 2, exceptions_in_futures)


# -- what a barrier implies


def drop_works_then(synchronous: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    tensors = [torch.full((100, 100), float(number)) for number in range(16)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group, async_op=True)  # nobody keeps the Work
    if synchronous:
        dist.barrier(group)
    else:
        dist.barrier(group, async_op=True).get_future().wait()
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((100, 100), float(number * size))), (rank, number)


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_barrier_implies_that_earlier_operations_are_done(kind: str, synchronous: bool) -> None:
    run(kind, 4, drop_works_then, synchronous)


def barrier_beside_a_message() -> None:
    """A barrier waits for collectives; a message is done when its own Work is."""
    tensor = torch.zeros(3)
    if dist.get_rank() == 0:
        received = dist.irecv(tensor, 1)
        dist.barrier()
        assert not received.is_completed()
        dist.barrier()
        assert received.wait()
        assert tensor.tolist() == [7.0] * 3
    else:
        dist.barrier()
        dist.barrier()
        dist.send(torch.full((3,), 7.0), 0)


def test_a_barrier_does_not_wait_for_messages() -> None:
    run("threads", 2, barrier_beside_a_message)


# -- how long


def one_operation_late(gate: threading.Event) -> None:
    tensor = torch.ones(1)
    if dist.get_rank() == 1:
        assert gate.wait(SOON)
        dist.all_reduce(tensor)
        return
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(CollectiveTimeoutError, match=r"is not done after waiting 0.02 s"):
        work.wait(timedelta(seconds=0.02))
    gate.set()
    assert work.wait(timedelta(seconds=SOON))
    assert tensor.item() == 2


def test_waiting_too_short_a_time_changes_nothing() -> None:
    run("threads", 2, one_operation_late, threading.Event())


# -- order on the progress thread


class Doing:
    """A task that calls a function, and may be run by a thread that waits for it."""

    interrupt = None

    def __init__(self, do: Callable[[Callable[[], None]], object]) -> None:
        self.ran = False
        self._do = do

    def __call__(self, dequeue: Callable[[], None]) -> None:
        self.ran = True
        self._do(dequeue)

    def is_bound(self) -> bool:
        return False


def test_a_task_is_no_longer_pending_when_its_work_is_seen_to_be_done() -> None:
    """Else a synchronous operation right after ``work.wait()`` would take the slow way through the queue."""
    thread = ProgressThread("test", grace=0)
    for _ in range(300):
        work = Work("test")
        thread.submit(Doing(lambda dequeue, work=work: work.finish([], dequeue=dequeue)))
        work.wait()
        assert thread.pending == 0
    thread.close(SOON)


def test_a_task_is_pending_while_callbacks_of_its_work_run() -> None:
    """So that an operation which a callback calls runs before those that are called after waiting."""
    thread, seen = ProgressThread("test"), []
    for fail in (False, True):
        work = Work("test")
        work.get_future().add_done_callback(lambda _: seen.append(thread.pending))

        def end(dequeue, work=work, fail=fail):
            if fail:
                work.fail(ValueError("on purpose"), dequeue)
            else:
                work.finish([], dequeue=dequeue)

        thread.submit(Doing(end))
    thread.close(SOON)
    assert seen[0] >= 1
    assert seen[1] == 1
    assert thread.pending == 0


def test_at_exit_tasks_may_end_but_not_hang() -> None:
    hanging, quick = ProgressThread("hanging"), ProgressThread("quick")
    gate, ended = threading.Event(), []

    def hang(dequeue: Callable[[], None]) -> None:
        gate.wait(SOON)
        dequeue()

    def end(dequeue: Callable[[], None]) -> None:
        ended.append(True)
        dequeue()

    hanging.submit(Doing(hang))
    for _ in range(100):
        quick.submit(Doing(end))
    await_running_tasks(0.05)
    assert hanging.pending
    gate.set()
    await_running_tasks(SOON)
    assert (hanging.pending, quick.pending, len(ended)) == (0, 0, 100)
    hanging.close(SOON)
    quick.close(SOON)
    hanging.drain(SOON)  # nobody is there to wait for


# -- what a failed operation keeps alive


def fail_and_forget() -> None:
    """Raise mismatches in every way, then destroy the group: nothing waits for the garbage collector."""
    group = dist.new_group()
    arena = weakref.ref(group.communicator.engine.context.arena)
    tensor = torch.ones(1 + dist.get_rank())
    seen = weakref.ref(tensor)
    quiet, waited, future_waited = (dist.all_reduce(tensor, group=group, async_op=True) for _ in range(3))
    future = future_waited.get_future()
    for call in (waited.wait, waited.wait, future.wait, future.value):
        with contextlib.suppress(CollectiveMismatchError):
            call()
            raise AssertionError("no mismatch")
    dist.barrier(group)
    assert not quiet.is_success()
    dist.destroy_process_group(group)
    del group, tensor, quiet, waited, future_waited, future, call
    assert seen() is None
    # The group's threads are ending, and the other rank's thread may still hold its end.
    deadline = time.monotonic() + SOON
    while arena() is not None:
        assert time.monotonic() < deadline, gc.get_referrers(arena())
        time.sleep(0.001)


@pytest.mark.parametrize("kind", KINDS)
def test_failed_operations_leave_nothing_to_the_garbage_collector(kind: str) -> None:
    gc.disable()
    try:
        run(kind, 2, fail_and_forget)
    finally:
        gc.enable()


def test_the_traceback_of_an_unexpected_exception_is_kept_as_text() -> None:
    def a_bug_of_ours() -> None:
        raise ZeroDivisionError("on purpose")

    work = Work("test")
    try:
        a_bug_of_ours()
    except ZeroDivisionError as error:
        work.fail(error)
    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        work.wait()
    assert "in a_bug_of_ours" in str(caught.value.__cause__)
    assert work.exception().__traceback__ is None


def test_an_exception_that_cannot_be_copied_is_raised_itself() -> None:
    class Awkward(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("awkward")

    for error in (Awkward(1, 2), ValueError("plain")):
        work = Work("test")
        work.fail(error)
        with pytest.raises(type(error), match=str(error)):
            work.wait()
        with pytest.raises(type(error), match=str(error)):
            work.get_future().wait()
