"""The word by which survivors decide: whatever steps ranks take and when, they read one decision."""

from __future__ import annotations

import hashlib
import os
import random
import threading

import pytest

from torchestra.engine import layout as at
from torchestra.engine.membership.agreement import Ballot, MembershipAgreement, PollInterval, State
from torchestra.engine.membership.arena_registers import ArenaRegisters
from torchestra.engine.memory.arena import Arena
from torchestra.errors import RankExcludedError
from torchestra.system.deadline import Deadline

SOON = 20.0


def views(size: int) -> list[ArenaRegisters]:
    arena, descriptor = Arena.create(at.Layout(size, 4096, 4096, 0, 4096), "g")
    os.close(descriptor)
    return [ArenaRegisters(arena, rank) for rank in range(size)]


def key_of(proposer: int, number: int, survivors: tuple[int, ...]) -> bytes:
    """So that a reader can tell whether what it read belongs together."""
    return hashlib.sha256(repr((proposer, number, survivors)).encode()).digest()


def propose(view: ArenaRegisters, survivors: tuple[int, ...]) -> bool:
    now = view.ballot()
    return now.state is State.OPEN and view.propose(now, survivors, key_of(view.rank, now.epoch, survivors))


@pytest.mark.parametrize("step", ["propose", "commit", "void"])
def test_a_step_wakes_whoever_sleeps_until_there_is_one(step: str) -> None:
    zero, one = views(2)
    if step != "propose":
        assert propose(zero, (0, 1))
    now = one.ballot()
    sleeper = threading.Thread(target=one.sleep, args=(1e6,), daemon=True)
    sleeper.start()
    for _ in range(3):  # and not only one that comes before it sleeps
        sleeper.join(0.01)
        assert sleeper.is_alive()
    assert propose(zero, (0, 1)) if step == "propose" else getattr(zero, step)(now)
    sleeper.join(SOON)
    assert not sleeper.is_alive()


def test_whoever_reads_an_old_ballot_does_not_sleep() -> None:
    zero, one = views(2)
    one.ballot()
    assert propose(zero, (0, 1))
    one.sleep(1e6)


def test_a_decision_is_proposed_voided_proposed_again_and_final() -> None:
    zero, one, two = views(3)
    assert two.ballot() == (0, 1, State.OPEN, 0, (), b"")
    stale = one.ballot()
    assert propose(zero, (0, 1, 2))
    assert not one.propose(stale, (1, 2), bytes(32)), "one proposal a round"
    first = two.ballot()
    assert (first.epoch, first.state, first.proposer, first.survivors) == (1, State.PROPOSED, 0, (0, 1, 2))
    assert two.unacknowledged(first) == {0, 1, 2}
    for view in (zero, one):
        view.acknowledge(first)
    assert two.unacknowledged(first) == {2}
    assert two.void(first)
    assert not zero.commit(first), "what was voided cannot be committed"
    assert not zero.void(first)
    assert two.ballot().epoch == 2
    assert two.ballot().state is State.OPEN
    assert propose(one, (0, 1))
    second = zero.ballot()
    assert second.survivors == (0, 1)
    assert two.unacknowledged(second) == {0, 1}, "who was ready for one round is not for the next"
    assert one.commit(second)
    assert not two.void(second)
    assert not propose(two, (2,))
    for view in (zero, one, two):
        assert view.ballot()[1:] == (2, State.COMMITTED, 1, (0, 1), key_of(1, 2, (0, 1)))
    assert zero.exclusion("g") is None
    error = two.exclusion("g")
    assert isinstance(error, RankExcludedError)
    assert error.survivors == (0, 1)
    assert "group 'g' was shrunk to ranks 0, 1 without rank 2" in str(error)


class Alone:
    """The entry into a group of one rank."""

    def gone(self) -> set[int]:
        return set()

    def offer(self, ballot: Ballot, survivors: object) -> bytes:
        return bytes(32)

    def advance(self, ballot: Ballot) -> bool:
        return True

    def wait(self, seconds: float) -> None:
        raise AssertionError("there is nobody to wait for")

    def awaited(self, ballot: Ballot) -> set[int]:
        return set()

    def leave(self) -> None:
        pass


def test_a_rank_that_was_interrupted_after_the_commit_is_told_that_it_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (view,) = views(1)

    def attempt() -> Ballot:
        interval = PollInterval(0.001, 0.001)
        agreement = MembershipAgreement(view, Alone(), "g", Deadline(), interval, str, lambda late: "")
        return agreement.run(())

    commit = view.commit

    def commit_and_interrupt(ballot: Ballot) -> bool:
        assert commit(ballot)
        raise KeyboardInterrupt

    monkeypatch.setattr(view, "commit", commit_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        attempt()
    monkeypatch.undo()
    with pytest.raises(
        RankExcludedError, match=r"rank 0: group 'g' has gone on as ranks 0, .* interrupted"
    ) as caught:
        attempt()
    assert caught.value.survivors == ()


def test_who_comes_and_who_is_excluded_is_seen_by_all() -> None:
    zero, one, two = views(3)
    one.announce()
    two.announce()
    two.withdraw()
    assert zero.candidates() == {1}
    zero.exclude([2])
    one.exclude([2])
    assert one.excluded() == {2: 0}, "the first to say so is named"
    assert "rank 0 has excluded rank 2" in str(two.exclusion("g"))
    assert zero.exclusion("g") is None


@pytest.mark.parametrize("size", [1, 63, 64, 65, 130])
def test_any_number_of_ranks_can_be_named(size: int) -> None:
    arena = views(size)
    dice = random.Random(size)
    for number in range(6):
        survivors = tuple(sorted(dice.sample(range(size), dice.randint(1, size))))
        view = dice.choice(arena)
        assert propose(view, survivors)
        assert arena[0].ballot().survivors == survivors
        assert arena[-1].ballot().key == key_of(view.rank, number + 1, survivors)
        assert arena[size // 2].void(arena[0].ballot())


def test_ranks_that_propose_commit_and_void_against_each_other_read_one_decision() -> None:
    """Threads do what they like; a proposal is never read in part, and all see the same end."""
    size, dice = 5, random.Random(4)
    for _ in range(30):
        ranks = views(size)
        decided: list[tuple[int, ...]] = []
        torn: list[object] = []
        start = threading.Barrier(size)

        def act(
            view: ArenaRegisters,
            dice: random.Random,
            start: threading.Barrier = start,
            torn: list[object] = torn,
            decided: list[tuple[int, ...]] = decided,
        ) -> None:
            start.wait(SOON)
            while True:
                now = view.ballot()
                if now.survivors and now.key != key_of(now.proposer, now.epoch, now.survivors):
                    torn.append(now)
                if now.state is State.COMMITTED:
                    decided.append(now.survivors)
                    return
                if now.state is State.OPEN:
                    propose(view, tuple(sorted(dice.sample(range(size), dice.randint(1, size)))))
                elif dice.random() < 0.02:
                    view.commit(now)
                else:
                    view.void(now)

        threads = [
            threading.Thread(target=act, args=(view, random.Random(dice.random())), daemon=True)
            for view in ranks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        assert torn == []
        assert len(decided) == size
        assert len(set(decided)) == 1
