"""Membership agreement with joiners, in any order of steps and deaths: one epoch is committed, and all agree.

Each rank reads the ballot and takes a step of it at moments that are drawn, so its ballot may be stale. It
learns of deaths at moments that are drawn, too. In the end all deaths are known and the living take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from torchestra.engine.membership.agreement import (
    Ballot,
    EpochEntry,
    MembershipAgreement,
    PollInterval,
    Registers,
    State,
)
from torchestra.system.deadline import Deadline

MEMBERS, JOINERS = 4, 2
ENOUGH = 40


@dataclass
class Job:
    """What the ranks share; ``entered`` has, by key, the members and joiners in the group of an offer."""

    now: Ballot = field(default_factory=lambda: Ballot(0, 1, State.OPEN, 0))
    came: set[int] = field(default_factory=set)
    ready: dict[int, int] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    offers: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    entered: dict[bytes, set[int]] = field(default_factory=dict)
    committed: list[Ballot] = field(default_factory=list)

    def exchange(self, before: Ballot, state: State, epoch: int, *proposal: object) -> bool:
        if self.now.word != before.word:
            return False
        self.now = Ballot(self.now.word + 1, epoch, state, *proposal)  # type: ignore[arg-type]
        if state is State.COMMITTED:
            self.committed.append(self.now)
        return True


class View(Registers):
    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.size = job, rank, MEMBERS

    def ballot(self) -> Ballot:
        return self.job.now

    def announce(self, grows: bool = False) -> None:
        self.job.came.add(self.rank)

    def withdraw(self) -> None:
        self.job.came.discard(self.rank)

    def acknowledge(self, ballot: Ballot) -> None:
        self.job.ready[self.rank] = ballot.epoch

    def exclude(self, ranks: Iterable[int]) -> None:
        assert not list(ranks)

    def candidates(self) -> set[int]:
        return set(self.job.came)

    def growing(self) -> set[int]:
        return set(self.job.came)

    def excluded(self) -> dict[int, int]:
        return {}

    def unacknowledged(self, ballot: Ballot) -> set[int]:
        return {rank for rank in ballot.survivors if self.job.ready.get(rank) != ballot.epoch}

    def propose(self, ballot: Ballot, survivors: Sequence[int], key: bytes) -> bool:
        return self.job.exchange(ballot, State.PROPOSED, ballot.epoch, self.rank, tuple(survivors), key)

    def commit(self, ballot: Ballot) -> bool:
        return self.job.exchange(ballot, State.COMMITTED, *ballot[1:2], *ballot[3:])

    def void(self, ballot: Ballot, gone: Iterable[int] = ()) -> bool:
        return self.job.exchange(ballot, State.OPEN, ballot.epoch + 1, 0)

    def accused(self) -> set[int]:
        return set()


class Door(EpochEntry):
    """The group of an offer: all whom it names are in it when one of them is."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.known: set[int] = set()

    def learn(self) -> None:
        self.known = set(self.job.dead)

    def gone(self) -> set[int]:
        return {each for each in self.known if each < MEMBERS}

    def offer(self, ballot: Ballot, survivors: Sequence[int]) -> bytes:
        key = bytes([len(self.job.offers)])
        joiners = set(range(MEMBERS, MEMBERS + JOINERS)) - self.known
        self.job.offers[key] = (*survivors, *sorted(joiners))
        return key

    def advance(self, ballot: Ballot) -> bool | None:
        if any(each >= MEMBERS and each in self.known for each in self.job.offers[ballot.key]):
            return None
        inside = self.job.entered.setdefault(ballot.key, set())
        inside.add(self.rank)
        return inside.issuperset(self.job.offers[ballot.key])

    def awaited(self, ballot: Ballot) -> set[int]:
        return set()

    def leave(self) -> None:
        pass


class Member:
    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.view, self.door = job, rank, View(job, rank), Door(job, rank)
        interval = PollInterval(0.001, 0.001)
        self.agreement = MembershipAgreement(
            self.view, self.door, "g", Deadline(), interval, str, lambda _: "", grows=True
        )
        self.read: Ballot | None = None
        self.outcome: Ballot | None = None

    def act(self) -> None:
        """Read the ballot, or take a step of the one that was read."""
        if self.rank in self.job.dead or self.outcome is not None:
            return
        self.view.announce()
        if self.read is None:
            self.read = self.view.ballot()
            return
        ballot, self.read = self.read, None
        if ballot.state is State.COMMITTED:
            self.outcome = ballot
        else:
            self.agreement._step(ballot)


def enter_as_joiner(job: Job, joiner: int) -> None:
    key = job.now.key
    if joiner not in job.dead and joiner in job.offers.get(key, ()):
        job.entered.setdefault(key, set()).add(joiner)


ALL_RANKS = st.integers(0, MEMBERS + JOINERS - 1)
MOMENTS = st.lists(st.tuples(st.sampled_from(["act"] * 8 + ["learn"] * 2 + ["die"]), ALL_RANKS), max_size=150)


@settings(max_examples=250, deadline=None)
@given(MOMENTS)
def test_members_agree_on_one_epoch_whoever_dies_when(moments: list[tuple[str, int]]) -> None:
    job = Job()
    members = [Member(job, rank) for rank in range(MEMBERS)]
    for what, who in moments:
        if what == "die":
            job.dead.add(who)
        elif who >= MEMBERS:
            enter_as_joiner(job, who)
        elif what == "learn":
            members[who].door.learn()
        else:
            members[who].act()
    for _ in range(ENOUGH):
        for member in members:
            member.door.learn()
            member.act()
        for joiner in range(MEMBERS, MEMBERS + JOINERS):
            enter_as_joiner(job, joiner)
    living = [member for member in members if member.rank not in job.dead]
    outcomes = {member.outcome for member in members if member.outcome is not None}
    assert all(member.outcome is not None for member in living), "they end"
    assert len(job.committed) <= 1, "no rank is in two epochs"
    assert outcomes <= set(job.committed), "all agree"
    for ballot in outcomes:
        assert {member.rank for member in living} <= set(ballot.survivors) <= job.came
        assert job.entered[ballot.key].issuperset(job.offers[ballot.key]), "also the joiners were in"
