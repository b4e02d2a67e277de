"""Membership agreement: the remaining ranks of a group decide which of them go on, without a restart.

They share *registers*: ranks of one host in their arena (arena_registers.py), ranks of several hosts in the
group's store (multihost/store_registers.py). What they agree on is a *ballot*, in epochs numbered from 1::

    OPEN(n)  ──propose──▶  PROPOSED(n)  ──commit──▶  COMMITTED(n)
                                │
                                └──void──▶  OPEN(n + 1)

A rank says that it comes, and then polls the ballot and takes every step that is possible:

- *propose*, in an open epoch, when each rank has come, is gone (dead, or has left), or is excluded: the
  lowest of those that have come proposes them as the *survivors*;
- *enter*: every survivor enters the new group, and says that it is ready;
- *commit*: any survivor that sees all of them ready;
- *void*: a survivor that finds another one gone or excluded, or that gives up (deadline, Ctrl-C); and any
  other rank that finds one gone, once it has left the survivors some time to settle it.

The others wait for a rank that lives and has neither come nor left nor been excluded: its program may be
computing. A rank that waits for a step of another one (of the lowest that has come, or of the proposer) looks
at the ballot only, and at everything once in a while, in case that one has died.

Invariants, which both kinds of registers keep.

1. Each step is one compare-and-exchange of the epoch's register: of the steps that ranks attempt at the same
   state, one is taken, and the others learn so.
2. A rank that reads PROPOSED(n) or COMMITTED(n) reads the survivors of epoch n with it, the same as all
   others.
3. COMMITTED is final: no step leaves it.
4. A rank says that it is ready for epoch n only after it has entered the group that epoch n proposes.

Agreement (no split brain). At most one epoch is committed (1, 3), and all ranks read the same survivors of it
(2). A rank gets a new group only if that epoch names it; one that the epoch does not name gets an error, and
so does one that gave up, whose void came before any commit, or else failed and showed it the commit. None of
this depends on which ranks the others believe to live: a wrong belief could only void an epoch.

Validity. Every committed rank has come, was ready, and was excluded by no rank that came with it: an excluder
writes the exclusion before it says that it comes, and voids an epoch that names both before it enters.

Termination. Let the last death have happened and be known, and let each live rank come, be excluded, or
leave. From then on the lowest rank that has come waits for no other and proposes; any rank that looks voids
an epoch that names a dead rank; the survivors of the epoch after it all get ready. Until the deadline, the
others wait for a rank that lives and never comes; then they name it. Nothing is ever locked: a process that
dies between any two steps leaves registers from which the others go on.

Termination where beliefs differ. Two hosts that are cut off from each other, though both reach the store,
each take the other for dead as long as the cut lasts. They would void each other's epochs for ever. So a rank
that an epoch does not name leaves it to those that it names, for a while (``grace_s``): they get ready and
commit, and it is excluded. And a void names the ranks that were found gone; the next epoch goes on without
them, if any others have come. Else a third host, which reaches both, would propose all of them for ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from torchestra.errors import CollectiveTimeoutError, DistError, RankExcludedError
from torchestra.system.deadline import Deadline

_GROWTH = 1.15
_REMEDY = "this rank has no part in what the others do; end it, or start it anew"


class State(IntEnum):
    """The state of an epoch."""

    OPEN = 0
    PROPOSED = 1
    COMMITTED = 2


class Ballot(NamedTuple):
    """The registers at one moment.

    Attributes:
        word: the epoch's register, for :meth:`Registers.propose` and so on to compare.
        epoch: from 1.
        state: how far it has come.
        proposer: of what is proposed or committed.
        survivors: the ranks that shall go on, or do; empty while the epoch is open.
        key: secret bytes by which the survivors know each other; empty while it is open, or if not needed.
    """

    word: int
    epoch: int
    state: State
    proposer: int
    survivors: tuple[int, ...] = ()
    key: bytes = b""

    def __repr__(self) -> str:
        return f"Ballot({self.epoch}, {self.state.name}, {self.proposer}, {self.survivors})"  # not the key


class Registers(Protocol):
    """One rank's view of what the ranks share to agree."""

    rank: int
    size: int

    def ballot(self) -> Ballot:
        """Read the ballot of the present epoch."""

    def announce(self, grows: bool = False) -> None:
        """Say that this rank wants to go on; and that others may be let in, if ``grows``."""

    def withdraw(self) -> None:
        """Withdraw :meth:`announce`."""

    def acknowledge(self, ballot: Ballot) -> None:
        """Say that this rank has entered the group that an epoch proposes."""

    def exclude(self, ranks: Iterable[int]) -> None:
        """Make the group go on without these ranks, alive or not. Must precede :meth:`announce`."""

    def candidates(self) -> set[int]:
        """Return the ranks that want to go on."""

    def growing(self) -> set[int]:
        """Return those of them that want others to be let in."""

    def excluded(self) -> dict[int, int]:
        """Return the ranks that shall not go on, each with the rank that has said so."""

    def unacknowledged(self, ballot: Ballot) -> set[int]:
        """Return the survivors of a proposed epoch that have not entered the new group yet."""

    def propose(self, ballot: Ballot, survivors: Sequence[int], key: bytes) -> bool:
        """Make an open epoch a proposed one; like the next two, return whether this step was taken."""

    def commit(self, ballot: Ballot) -> bool:
        """Make a proposed epoch, whose survivors are all ready, final."""

    def void(self, ballot: Ballot, gone: Iterable[int] = ()) -> bool:
        """Give a proposed epoch up, and open the next; ``gone``: its survivors that are not there."""

    def accused(self) -> set[int]:
        """Return the ranks that were found gone by whoever voided the last epoch."""


class EpochEntry(Protocol):
    """Find out which ranks are gone, and enter the group that an epoch proposes, step by step."""

    def gone(self) -> set[int]:
        """Return the ranks that have died or left, as far as is known here."""

    def offer(self, ballot: Ballot, survivors: Sequence[int]) -> bytes:
        """Make what the new group needs at its start; return the key by which the others ask for it."""

    def advance(self, ballot: Ballot) -> bool | None:
        """Take the possible steps to enter; return whether this rank has entered, None if it never can."""

    def wait(self, seconds: float) -> None:
        """Sleep for so long, or until a step to enter may have become possible: the one call that blocks."""

    def awaited(self, ballot: Ballot) -> set[int]:
        """Return the ranks that may keep this one from entering."""

    def leave(self) -> None:
        """Leave what was entered or offered, if anything was."""


class PollInterval(NamedTuple):
    """The time between two looks at the registers, in seconds.

    Attributes:
        first, longest: at first, and in the end.
        asleep: that of a rank that waits for another one's step, where every step wakes it: it looks for a
            death only. None where no step does.
    """

    first: float
    longest: float
    asleep: float | None = None


class MembershipAgreement:
    """One attempt of one rank to agree with the others.

    Args:
        registers: what the ranks share.
        epoch_entry: of the new group.
        group: the name of the old group, for messages.
        deadline: until when to wait for the others.
        interval: between two looks.
        describe: names a rank in messages.
        report: tells where ranks are, in lines.
        grows: whether others may be let in.
        grace_s: for how long to leave an epoch that does not name this rank to those that it names, though
            one of them seems to be gone. Longer than they need to enter; 0 where it is certain who lives.
    """

    def __init__(
        self,
        registers: Registers,
        epoch_entry: EpochEntry,
        group: str,
        deadline: Deadline,
        interval: PollInterval,
        describe: Callable[[int], str],
        report: Callable[[Sequence[int]], str],
        *,
        grows: bool = False,
        grace_s: float = 0.0,
    ) -> None:
        self._registers, self._epoch_entry = registers, epoch_entry
        self._group, self._deadline, self._interval = group, deadline, interval
        self._describe, self._report = describe, report
        self._rank = registers.rank
        self._grows = grows
        self._patience_s = grace_s
        self._epoch = 0
        self._ready = False
        self._proposed: Deadline | None = None  # for how long this rank has seen the epoch's proposal
        self._next_by: int | None = None  # the rank that takes the next step, unless somebody dies

    def run(self, exclude: Sequence[int]) -> Ballot:
        """Take part until an epoch is committed that names this rank, and return its ballot.

        Raises:
            RankExcludedError: the others go on without this rank.
            CollectiveTimeoutError: a rank lives but has not come; it is named.
        """
        first, longest, asleep = self._interval
        pause, unstepped_s = first, 0.0
        try:
            self._registers.exclude(exclude)
            self._registers.announce(self._grows)
            seen = None
            while (ballot := self._registers.ballot()).state is not State.COMMITTED:
                # Where another rank takes the next step, this one looks at the ballot only, most of the time:
                # if all looked at all, agreement would cost the square of their number.
                if ballot.word != seen or self._next_by == self._rank or unstepped_s >= (asleep or longest):
                    unstepped_s = 0.0
                    if self._step(ballot):
                        pause = first
                        continue
                if ballot.word != seen:  # what follows a step of another is often soon possible
                    seen, pause = ballot.word, first
                seconds = pause if asleep is None or self._next_by == self._rank else asleep
                self._epoch_entry.wait(seconds)
                unstepped_s += seconds
                pause = min(pause * _GROWTH, longest)
            self._refuse_if_excluded(ballot)
            return ballot
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Leave without a group: void the epoch that waits for this rank, and leave the new group, if any."""
        registers = self._registers
        try:
            with contextlib.suppress(DistError, OSError):  # the store may be gone
                registers.withdraw()
                while (now := registers.ballot()).state is State.PROPOSED and self._rank in now.survivors:
                    registers.void(now)
        finally:
            self._epoch_entry.leave()

    def _step(self, ballot: Ballot) -> bool:
        """Take a step that is possible in an epoch that is not final; return whether one was taken."""
        registers = self._registers
        if ballot.epoch != self._epoch:
            self._epoch_entry.leave()
            self._epoch, self._ready, self._proposed = ballot.epoch, False, None
        candidates, gone = registers.candidates(), self._epoch_entry.gone()
        excluded = registers.excluded()
        out = gone | excluded.keys()
        if self._rank in excluded:
            self._refuse_if_excluded(registers.ballot())
            return True  # it has been committed meanwhile, and with this rank
        if ballot.state is State.OPEN:
            candidates -= out
            missing = set(range(registers.size)) - out - candidates
            survivors = sorted(candidates - registers.accused() or candidates)
            self._next_by = survivors[0]
            if not missing and survivors[0] == self._rank:
                return self._propose(ballot, survivors)
            late = missing or {survivors[0]}
        elif lost := out.intersection(ballot.survivors):
            self._next_by = self._rank
            if self._may_void(ballot):
                return registers.void(ballot, lost)
            late = set(ballot.survivors)
        else:
            entered = self._epoch_entry.advance(ballot) if self._rank in ballot.survivors else False
            if entered is None:
                return registers.void(ballot)
            if entered and not self._ready:
                registers.acknowledge(ballot)
                self._ready = True
                return True
            self._next_by = (
                self._rank if entered is False and self._rank in ballot.survivors else ballot.proposer
            )
            late = registers.unacknowledged(ballot)
            if not late:
                return registers.commit(ballot)
            if self._rank in late:
                late = self._epoch_entry.awaited(ballot)
        return self._deadline.expired() and self._end_late(ballot, sorted(late))

    def _may_void(self, ballot: Ballot) -> bool:
        """Return whether it is this rank's turn to give an epoch up that names a rank that is gone."""
        if self._proposed is None:
            self._proposed = Deadline(self._patience_s)
        return self._rank in ballot.survivors or self._proposed.expired()

    def _propose(self, ballot: Ballot, survivors: Sequence[int]) -> bool:
        proposed = self._registers.propose(ballot, survivors, self._epoch_entry.offer(ballot, survivors))
        if not proposed:
            self._epoch_entry.leave()
        return proposed

    def _refuse_if_excluded(self, ballot: Ballot) -> None:
        excluder = self._registers.excluded().get(self._rank)
        named = None if excluder is None else self._describe(excluder)
        if (error := exclusion_error(ballot, self._rank, named, self._group)) is not None:
            raise error
        if ballot.state is State.COMMITTED and not (self._ready and ballot.epoch == self._epoch):
            self._refuse_if_left(ballot)

    def _refuse_if_left(self, ballot: Ballot) -> None:
        """Raise if this rank was ready for the committed epoch in an attempt that was interrupted."""
        if self._rank not in self._registers.unacknowledged(ballot):
            raise RankExcludedError(
                f"rank {self._rank}: group {self._group!r} has gone on as ranks"
                f" {', '.join(map(str, ballot.survivors))}, but this rank's call was interrupted just then,"
                f" and it left the new group; {_REMEDY}",
                tuple(rank for rank in ballot.survivors if rank != self._rank),
            )

    def _end_late(self, ballot: Ballot, late: Sequence[int]) -> bool:
        """Raise, as the time is over, unless this rank turns out to be in the new group after all."""
        proposed = ballot.state is State.PROPOSED and self._rank in ballot.survivors
        if proposed and not self._registers.void(ballot):
            return True
        call, done = ("grow", "grown") if self._grows else ("shrink", "shrunk")
        what = (
            f"rank {self._rank}: group {self._group!r} was not {done} within {self._deadline.timeout_s:g} s: "
        )
        if not late:
            raise CollectiveTimeoutError(
                f"{what}a joining rank has not entered the new group yet. Call {call}() again"
            )
        one, came = len(late) == 1, self._registers.candidates().issuperset(late)
        lacks = f"{'does' if one else 'do'} not go on with it" if came else f"not called {call}()"
        if not came:
            lacks = f"{'has' if one else 'have'} {lacks}"
        raise CollectiveTimeoutError(
            f"{what}{', '.join(map(self._describe, late))} {'lives' if one else 'live'}, but {lacks}. Call"
            f" {call}() again to go on waiting, or {call}(exclude={list(late)}) to go on without."
            f"{self._report(late)}",
            tuple(late),
        )


def exclusion_error(ballot: Ballot, rank: int, excluder: str | None, group: str) -> RankExcludedError | None:
    """Return the error to raise if the others go on, or will, without this rank."""
    if ballot.state is State.COMMITTED and rank not in ballot.survivors:
        others = ", ".join(map(str, ballot.survivors))
        why = "which was taken for dead" if excluder is None else f"because {excluder} has excluded it"
        return RankExcludedError(
            f"rank {rank}: group {group!r} was shrunk to ranks {others} without rank {rank}, {why};"
            f" {_REMEDY}",
            ballot.survivors,
        )
    if excluder is not None and ballot.state is not State.COMMITTED:
        return RankExcludedError(
            f"rank {rank}: {excluder} has excluded rank {rank} from group {group!r}; {_REMEDY}"
        )
    return None
