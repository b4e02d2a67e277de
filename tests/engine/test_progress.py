"""Who runs asynchronous operations, and in which order: the protocol of engine/progress.py."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import torchestra as dist
from interrupts import interrupted_at
from torchestra.communicator import queue as operation_queue
from torchestra.communicator import work as work_file
from torchestra.communicator.queue import OperationQueue, _Queued
from torchestra.communicator.work import Work
from torchestra.engine import progress as engine_progress
from torchestra.engine.progress import ProgressThread
from torchestra.errors import GroupAbortedError
from worlds import run

SOON = 60.0
NEVER = 3600.0  # a grace in which the thread takes nothing by itself


class Queue:
    """A queue of operations that are functions, without a group."""

    def __init__(self, grace: float) -> None:
        self.thread = ProgressThread("test", grace=grace)
        self.aborted: list[str] = []
        engine: Any = SimpleNamespace(
            rank=0,
            abort=self.aborted.append,
            is_aborted=False,
            sequence_number=lambda: 0,
            state=None,
            context=None,
        )
        self._queue = OperationQueue(engine, "test")

    def call(self, operation: Callable[[], Any] = lambda: None) -> Work:
        work = Work("an operation")
        queued = _Queued(self._queue, lambda _: [operation()], "an operation", 0, "here", work)
        work.progress = lambda: self.thread.progress(work.is_completed)
        work.start = self.thread.start_now
        self.thread.submit(queued)
        return work


@contextlib.contextmanager
def queue(grace: float) -> Iterator[Queue]:
    made = Queue(grace)
    try:
        yield made
    finally:
        made.thread.close(SOON)
    assert made.thread.pending == 0


def test_who_waits_runs_what_is_queued_up_to_its_own_operation() -> None:
    with queue(NEVER) as it:
        works = [it.call(threading.get_ident) for _ in range(5)]
        assert works[2].wait()
        assert [work.is_completed() for work in works] == [True, True, True, False, False]
        assert {work.result()[0] for work in works[:3]} == {threading.get_ident()}
        assert it.thread.pending == 2
        # Who waits for a limited time only does not take on what may take longer.
        assert works[4].wait(SOON)
        assert threading.get_ident() not in {work.result()[0] for work in works[3:]}


def test_the_thread_runs_what_nobody_waits_for() -> None:
    with queue(0.001) as it:
        ended = threading.Event()
        it.call(ended.set)
        assert ended.wait(SOON)


def test_callbacks_of_futures_stay_on_the_thread() -> None:
    """They may wait for something that the program does after waiting for the operation."""
    with queue(NEVER) as it:
        attached, gate, ran_on = threading.Event(), threading.Event(), []

        def hold(_: object) -> None:
            ran_on.append(threading.get_ident())
            assert gate.wait(SOON)

        first = it.call(lambda: attached.wait(SOON))
        first.get_future().then(hold)
        attached.set()
        assert first.wait()
        second = it.call()
        gate.set()
        assert second.wait()
        assert len(ran_on) == 1
        assert threading.get_ident() not in ran_on


def test_two_who_wait_and_the_thread_do_not_hold_each_other_up() -> None:
    with queue(NEVER) as it:
        begun, gate = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            assert gate.wait(SOON)

        first, second = it.call(hold), it.call()
        waiters = [threading.Thread(target=first.wait)]
        waiters[0].start()
        assert begun.wait(SOON)
        waiters.append(threading.Thread(target=second.wait))  # finds the turn taken
        waiters[1].start()
        third = it.call()
        gate.set()
        assert third.wait()
        for waiter in waiters:
            waiter.join(SOON)
            assert not waiter.is_alive()


@pytest.mark.parametrize("grace", [0.0, 1e-5, NEVER])
def test_operations_neither_overlap_nor_pass_each_other(grace: float) -> None:
    """Whoever runs them: several threads that call and wait, and the queue's own."""
    seen: list[tuple[str, int]] = []
    numbering = threading.Lock()
    interval = sys.getswitchinterval()

    def call_and_wait(it: Queue, salt: int) -> None:
        for step in range(60):
            works = []
            for _ in range(1 + (step + salt) % 3):
                with numbering:  # an operation's number is its place in the queue
                    number = numbers.pop()
                    works.append((number, it.call(lambda number=number: run(number))))
            for number, work in works[:: -1 if step % 5 == 0 else 1]:
                if step % 7 == 0:
                    work.get_future()
                if step % 4 and (not work.wait() or work.result() != [number]):
                    lost.append(number)
            if step % 6 == 0 and works[-1][1].get_future().wait() != [works[-1][0]]:
                lost.append(works[-1][0])

    def run(number: int) -> int:
        seen.append(("begin", number))
        time.sleep(0)  # somebody else may go on
        seen.append(("end", number))
        return number

    lost: list[int] = []
    numbers = list(range(100_000, 0, -1))
    try:
        sys.setswitchinterval(1e-6)
        with queue(grace) as it:
            callers = [threading.Thread(target=call_and_wait, args=(it, salt)) for salt in range(3)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join(SOON)
                assert not caller.is_alive()
    finally:
        sys.setswitchinterval(interval)
    assert lost == []
    count = 100_000 - len(numbers)
    assert count > 300
    assert seen == [(what, number) for number in range(1, count + 1) for what in ("begin", "end")]


def test_an_interrupt_reaches_who_waits_and_makes_the_group_unusable() -> None:
    """Its peers wait for the operation, and the next must not be taken for it."""
    with queue(NEVER) as it:

        def interrupted() -> None:
            raise KeyboardInterrupt

        first, second, third = it.call(interrupted), it.call(), it.call()
        with pytest.raises(KeyboardInterrupt):
            second.wait()
        assert it.aborted == ["rank 0 left an operation with KeyboardInterrupt"]
        with pytest.raises(GroupAbortedError, match="left an operation with KeyboardInterrupt"):
            first.wait()  # once is enough of an interrupt
        assert not second.is_completed()
        assert second.wait()
        assert third.wait()


INTERRUPTED_FILES = (engine_progress.__file__, operation_queue.__file__, work_file.__file__)


def test_no_interrupt_loses_an_operation() -> None:
    """It comes at every single point at which one can, while the main thread runs an operation and waits."""
    with queue(NEVER) as it:
        for place in itertools.count():
            work = it.call()
            with contextlib.suppress(KeyboardInterrupt), interrupted_at(place, INTERRUPTED_FILES) as where:
                work.wait()
            with contextlib.suppress(GroupAbortedError):
                assert work.wait(SOON), where
            assert it.thread.pending == 0, where
            after = it.call(threading.get_ident)
            assert after.wait()
            assert after.result() == [threading.get_ident()], where  # the turn can be had
            if not where:
                break
    assert place > 20


def hold(lock: threading.Lock, taken: threading.Event, errors: list[RuntimeError]) -> None:
    try:
        with lock:
            taken.set()
            threading.Event().wait(0.01)
    except RuntimeError as error:  # somebody else has released it
        errors.append(error)


def be_interrupted_in_the_general_way() -> None:
    communicator = dist.group.WORLD.communicator
    tensor, lock = torch.ones(1), communicator.lock
    communicator.entries.close()
    for place in itertools.count():
        taken = threading.Event()
        errors: list[RuntimeError] = []
        other = threading.Thread(target=hold, args=(lock, taken, errors))
        other.start()
        assert taken.wait(SOON)
        with (
            contextlib.suppress(KeyboardInterrupt),
            interrupted_at(place, [operation_queue.__file__]) as where,
        ):
            communicator.all_reduce(tensor, dist.ReduceOp.SUM)
        other.join(SOON)
        assert errors == [], where
        assert not lock.locked(), where
        if not where:
            break
    assert place > 3


def test_no_interrupt_of_an_operation_releases_a_lock_that_another_thread_has() -> None:
    """It comes at every point of it at which one can."""
    run("threads", 1, be_interrupted_in_the_general_way)


def test_how_many_operations_are_queued_and_not_begun_is_told() -> None:
    """For readers outside of the job: the one that runs is not among them."""
    depth, runs, go_on = np.zeros(1, dtype=np.int64), threading.Event(), threading.Event()
    with queue(0.0) as it:
        it.thread._depth = depth

        def block() -> None:
            runs.set()
            assert go_on.wait(SOON)

        works = [it.call(block)]
        assert runs.wait(SOON)
        works += [it.call() for _ in range(2)]
        assert depth[0] == 2
        go_on.set()
        assert all(work.wait(SOON) for work in works)
    assert depth[0] == 0
