"""The count of those that wait is the same on all ranks at the same poll, whatever happens between them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchestra.engine import layout as at
from torchestra.engine.kernels.selection import spin_policy
from torchestra.engine.membership.pending_joiners import MAX_COUNT, PendingJoiners
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.memory.arena import Arena

SOON = 100.0


def views(size: int) -> list[PendingJoiners]:
    arena, descriptor = Arena.create(at.Layout(size, 4096, 4096, 0, 4096), "g")
    os.close(descriptor)
    return [PendingJoiners(RankContext(arena, rank, "g", spin_policy(size))) for rank in range(size)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_in_any_order_of_polls_and_changes_all_ranks_get_one_answer_per_poll(data: st.DataObject) -> None:
    """Polls also fall between the steps of a change; a rank that would have to wait there polls later."""
    size = data.draw(st.integers(1, 4))
    ranks = views(size)
    answers: list[list[int]] = [[] for _ in ranks]
    written: list[int] = []

    def poll(rank: int) -> None:
        # Whoever is to answer by a change that is not settled waits for the publisher: this thread.
        if ranks[rank]._polled + 1 < in_doubt[0]:
            answers[rank].append(ranks[rank].count())

    in_doubt = [1 << 60]
    for _ in range(data.draw(st.integers(1, 40))):
        if data.draw(st.integers(0, 3)):
            poll(data.draw(st.integers(0, size - 1)))
        else:
            count = data.draw(st.integers(0, 3))

            def between() -> None:
                in_doubt[0] = max(each._polled for each in ranks) + ranks[0]._margin
                for rank in data.draw(st.lists(st.integers(0, size - 1), max_size=4)):
                    poll(rank)

            if ranks[0].publish(count, between):
                written.append(count)
            in_doubt[0] = 1 << 60
    longest = max(map(len, answers)) + 5
    for rank in range(size):
        while len(answers[rank]) < longest:
            poll(rank)
    assert all(each == answers[0] for each in answers)
    assert set(answers[0]) <= {0, *written}
    if written:
        assert ranks[0].count() == written[-1] or len(answers[0]) < 5


def test_ranks_that_run_apart_at_random_get_one_answer_per_poll() -> None:
    """Threads poll as fast as they can, with random pauses, while the count changes all the time."""
    size, polls = 4, 1500
    ranks = views(size)
    answers: list[list[int]] = [[] for _ in ranks]
    changed, done = threading.Event(), threading.Event()

    def program(rank: int) -> None:
        assert changed.wait(SOON)
        dice = random.Random(rank)
        while len(answers[rank]) < polls:
            answers[rank].append(ranks[rank].count())
            if dice.random() < 0.05:
                time.sleep(dice.random() * 0.002)

    def change() -> None:
        dice = random.Random(9)
        assert ranks[0].publish(1)  # takes effect at one of the first polls
        changed.set()
        while not done.is_set():
            ranks[0].publish(dice.randint(0, 5), lambda: time.sleep(dice.random() * 0.001))

    publisher = threading.Thread(target=change, daemon=True)
    programs = [threading.Thread(target=program, args=(rank,), daemon=True) for rank in range(size)]
    for thread in (publisher, *programs):
        thread.start()
    for thread in programs:
        thread.join(SOON)
    done.set()
    publisher.join(SOON)
    assert all(len(each) == polls for each in answers)
    assert all(each == answers[0] for each in answers)
    assert len(set(answers[0])) > 1, "no change took effect"


def test_a_publisher_that_dies_in_a_change_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Died(Exception):
        pass

    def die() -> None:
        raise Died

    ranks = views(2)
    for each in ranks:
        each.count()
    with pytest.raises(Died):
        ranks[0].publish(3, die)
    monkeypatch.setattr(RankContext, "gone", lambda _: frozenset({0}))
    assert [ranks[1].count() for _ in range(6)] == [0] * 6


def test_a_count_beyond_all_bounds_is_the_largest_there_is() -> None:
    (rank,) = views(1)
    assert rank.publish(MAX_COUNT + 7)
    assert [rank.count() for _ in range(3)] == [0, MAX_COUNT, MAX_COUNT]


def test_a_process_that_destroys_no_group_ends_without_a_word() -> None:
    """Rank 0 polls at the store until the very end, later than the store's connections are closed."""
    script = (  # What is registered first is called last.
        "import atexit, time; atexit.register(time.sleep, 0.3)\n"
        "import torchestra as dist\n"
        "dist.init_process_group(init_method='tcp://127.0.0.1:0', rank=0, world_size=1)\n"
        "assert dist.group.WORLD.pending_joiners() == 0\n"
        "time.sleep(0.1)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=SOON, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
