"""When an elastic job starts the replacement of a rank: not while the others need its core to go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from torchestra.launcher import replacements
from torchestra.launcher.job import Job
from torchestra.launcher.replacements import ElasticLimits, Replacements
from torchestra.launcher.root_cause import FailedRank
from torchestra.launcher.spec import PhaseReached

RANKS = 3


class FakeJob:
    """A job whose ranks are nobody's, and whose time is the test's."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(nproc=RANKS, world_size=RANKS, joins=False, environment={})
        self.first_rank, self.stopping = 0, False
        self.ranks = [SimpleNamespace(pid=10 + rank, ended=None, dismissed=False) for rank in range(RANKS)]
        self.loop = self
        self.timers: list[Callable[[], object]] = []
        self.replaced: list[int] = []

    def call_at(self, when: float, function: Callable[[], object]) -> None:
        self.timers.append(function)

    def replace(self, rank: int) -> None:
        self.replaced.append(rank)

    def kill(self, rank: int) -> None:
        pass


class Course:
    """A job that runs, with its policy."""

    def __init__(self) -> None:
        self.job = FakeJob()
        self.policy = Replacements(cast(Job, self.job), ElasticLimits(1, RANKS), lambda line: None)
        self.policy.begun()
        for rank in range(RANKS):
            self.reach(rank, "joined", "trains")

    def reach(self, rank: int, *phases: Any) -> None:
        for phase in phases:
            self.policy.reached(rank, PhaseReached(phase, time.monotonic()))

    def die(self, rank: int) -> None:
        failed = FailedRank(rank, -9, time.monotonic())
        self.policy.failed(failed)
        self.policy.survived(failed)


@pytest.fixture
def course(monkeypatch: pytest.MonkeyPatch) -> Iterator[Course]:
    monkeypatch.setattr(replacements, "usable_cores", lambda: RANKS - 1)
    made = Course()
    yield made
    made.policy.close()


def test_a_replacement_is_started_when_the_others_train_again(course: Course) -> None:
    course.die(1)
    course.reach(0, "shrunk", "trains")
    course.reach(2, "shrunk")
    assert course.job.replaced == []
    course.reach(2, "trains")
    assert course.job.replaced == [1]


def test_it_is_started_after_a_moment_though_the_others_do_not_train(course: Course) -> None:
    course.die(1)
    assert course.job.replaced == []
    for timer in course.job.timers:
        timer()
    assert course.job.replaced == [1]
    course.reach(0, "shrunk", "trains")
    course.reach(2, "shrunk", "trains")
    assert course.job.replaced == [1], "once"


def test_it_is_started_at_once_where_there_is_a_core_for_each(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "usable_cores", lambda: RANKS)
    course.die(1)
    assert course.job.replaced == [1]


@pytest.mark.parametrize("how", ["ends well", "stops"])
def test_nobody_is_started_any_more_when_the_job_ends_meanwhile(course: Course, how: str) -> None:
    course.die(1)
    if how == "stops":
        course.job.stopping = True
    else:
        course.policy.ended_well(0)
    for timer in course.job.timers:
        timer()
    assert course.job.replaced == []


def test_two_that_die_at_once_are_both_replaced(course: Course) -> None:
    course.die(1)
    course.die(2)
    course.reach(0, "shrunk", "trains")
    assert sorted(course.job.replaced) == [1, 2]
