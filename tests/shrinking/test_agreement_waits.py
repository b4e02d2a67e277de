"""A rank that waits for another one's step looks at the ballot only, but notices soon if that one dies.

If all ranks looked at all registers each time, agreement would cost the square of their number.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_agreement_orders import MEMBERS, Door, Job, View

from torchestra.engine.membership.agreement import MembershipAgreement, PollInterval, State
from torchestra.system.deadline import Deadline

INTERVAL = PollInterval(0.001, 0.02)
ASLEEP_S = 0.05
WOKEN = PollInterval(0.001, 0.02, ASLEEP_S)


class EnoughSeenError(Exception):
    """Ends an attempt."""


class CountingView(View):
    looks = 0

    def candidates(self) -> set[int]:
        self.looks += 1
        return super().candidates()


class WaitingDoor(Door):
    """Waits in no time, and has a function called instead with how often and how long it has waited."""

    def __init__(self, job: Job, rank: int, on_wait: Callable[[int, float], None]) -> None:
        super().__init__(job, rank)
        self.waits, self.waited_s, self._on_wait = 0, 0.0, on_wait

    def wait(self, seconds: float) -> None:
        self.waits += 1
        self.waited_s += seconds
        self._on_wait(self.waits, self.waited_s)


def attempt(
    job: Job, rank: int, on_wait: Callable[[int, float], None], interval: PollInterval = INTERVAL
) -> tuple[CountingView, WaitingDoor]:
    """Have a rank take part until ``on_wait`` ends it, or an epoch is committed."""
    view, door = CountingView(job, rank), WaitingDoor(job, rank, on_wait)
    agreement = MembershipAgreement(view, door, "g", Deadline(), interval, str, lambda _: "")
    with pytest.raises(EnoughSeenError):
        agreement.run(())
    return view, door


def end_after(waits: int) -> Callable[[int, float], None]:
    def on_wait(count: int, _: float) -> None:
        if count == waits:
            raise EnoughSeenError

    return on_wait


def test_a_rank_that_waits_for_a_proposal_seldom_looks_at_the_others() -> None:
    job = Job(came=set(range(MEMBERS)))
    view, door = attempt(job, MEMBERS - 1, end_after(15))
    assert view.looks <= 1 + door.waited_s / INTERVAL.longest < 5


def test_a_rank_that_steps_wake_waits_for_one_as_long_as_it_may() -> None:
    view, door = attempt(Job(came=set(range(MEMBERS))), MEMBERS - 1, end_after(15), WOKEN)
    assert door.waited_s == pytest.approx(15 * ASLEEP_S)
    assert view.looks == 15  # each time, as it has slept for so long


@pytest.mark.parametrize("interval", [INTERVAL, WOKEN])
def test_the_rank_that_proposes_looks_each_time(interval: PollInterval) -> None:
    view, door = attempt(Job(came={0, 1}), 0, end_after(15), interval)
    assert view.looks == door.waits
    assert door.waited_s < 15 * interval.longest  # no step tells it that another rank has come


def test_a_rank_that_has_entered_leaves_it_to_the_proposer_to_see_that_all_have() -> None:
    job = Job(came=set(range(MEMBERS)))
    job.offers[b"\x00"] = tuple(range(MEMBERS))
    job.entered[b"\x00"] = set(range(MEMBERS))
    assert View(job, 0).propose(job.now, range(MEMBERS), b"\x00")
    view, door = attempt(job, MEMBERS - 1, end_after(15))
    assert job.ready == {MEMBERS - 1: 1}
    assert view.looks <= 3 + door.waited_s / INTERVAL.longest < 7


@pytest.mark.parametrize("interval", [INTERVAL, WOKEN])
@pytest.mark.parametrize("state", [State.OPEN, State.PROPOSED])
def test_the_death_of_the_rank_whose_step_is_next_is_noticed(state: State, interval: PollInterval) -> None:
    """Within an interval, whatever the ballot says: a dead rank changes nothing there."""
    job = Job(came=set(range(MEMBERS)))
    job.offers[b"\x00"] = tuple(range(MEMBERS))
    if state is State.PROPOSED:
        assert View(job, 0).propose(job.now, range(MEMBERS), b"\x00")
    began, died_at = job.now, 0.0

    def on_wait(waits: int, waited_s: float) -> None:
        nonlocal died_at
        if waits == 3:
            died_at = waited_s
            job.dead.add(0)
            door_of[0].learn()
        if job.now.word != began.word:
            raise EnoughSeenError
        noticing_s = 2 * (interval.asleep or interval.longest)
        assert waits < 3 or waited_s - died_at <= noticing_s, "the death was not noticed"

    door_of: list[WaitingDoor] = []
    view = CountingView(job, 1)
    door_of.append(WaitingDoor(job, 1, on_wait))
    agreement = MembershipAgreement(view, door_of[0], "g", Deadline(), interval, str, lambda _: "")
    with pytest.raises(EnoughSeenError):
        agreement.run(())
    assert died_at > 0.0
