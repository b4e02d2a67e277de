"""How the survivors of a group make a new one, without anybody starting again: ``group.shrink()``.

What they decide, and why they agree, stands in agreement.py; how the new arena gets from one to the others,
in arena_transfer.py. Here is what a rank does, in one loop that looks at the decision until it is final:

- while a round is open: if no rank is missing, the lowest of those that have come makes a new arena and a new
  store, and proposes;
- while it is proposed: every survivor fetches the arena, enters it under its new number and says that it is
  ready; the proposer hands the arena out; whoever sees all of them ready commits, and whoever sees one of
  them gone voids.

A rank is missing if it lives and has neither come nor left nor been excluded: its program may be computing,
or in an operation of another group, and is waited for. Numbers keep their order.

The steps of a rank that is interrupted anywhere are taken back by :meth:`_Attempt.give_up`. Ranks look every
millisecond at first, and every 20 when it lasts; a Python program that waits for a store's reply or sleeps
lets Ctrl-C through.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchestra.engine.failure.liveness import PeerThreads
from torchestra.engine.kernels.selection import waiting_policy
from torchestra.engine.membership.agreement import Round, State
from torchestra.engine.membership.arena_transfer import (
    ArenaTransfer,
    Offer,
    Request,
    make_offer,
    make_request,
)
from torchestra.engine.membership.rank_context import RankContext
from torchestra.errors import CollectiveTimeoutError, InvalidArgumentError
from torchestra.store import Store

__all__ = ["Shrunk", "shrink"]

_FIRST_NAP, _LONGEST_NAP = 0.0005, 0.02


@dataclass(frozen=True)
class Shrunk:
    """What a survivor has in its hands.

    Attributes:
        context: its place in the new group.
        store: what the new group's ranks share; it has no keys yet.
        survivors: by new number, the number in the group that was.
    """

    context: RankContext
    store: Store
    survivors: tuple[int, ...]


def shrink(context: RankContext, name: str, exclude: Sequence[int], seconds: float) -> Shrunk:
    """Agree with the other survivors who goes on, and enter a new group with them.

    Must be called by every rank that shall go on. The old group is left as it is: unusable for operations, if
    it was aborted, but another attempt may be made if this one fails.

    Args:
        context: this rank's place in the old group.
        name: of the new group, for messages; the same on all ranks.
        exclude: ranks to go on without, whether they live or not.
        seconds: how long to wait for the others.

    Raises:
        RankExcludedError: the others go on without this rank.
        CollectiveTimeoutError: a rank lives but has not come; it is named.
        InvalidArgumentError: another thread of this rank is shrinking the group.
    """
    lock, claim = context.shrinking, object()
    try:
        if not lock.take(claim):
            raise InvalidArgumentError(
                f"rank {context.rank}: another thread of this rank is shrinking group {context.name!r}"
                " already"
            )
        shrunk = _Attempt(context, name, seconds).run(exclude)
    finally:
        if lock.holder is claim:
            del lock.holder
    return shrunk


class _Attempt:
    """One call of :func:`shrink`."""

    def __init__(self, context: RankContext, name: str, seconds: float) -> None:
        self._context = context
        self._name = name
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._succession = context.agreement
        self._as_threads = isinstance(context.peers, PeerThreads)
        self._entering = 0  # the round whose arena this rank is about to enter, or has entered
        self._offer: Offer | None = None
        self._request: Request | None = None
        self._estate: ArenaTransfer | None = None
        self._place: RankContext | None = None

    def run(self, exclude: Sequence[int]) -> Shrunk:
        """Take part until it is decided."""
        nap = _FIRST_NAP
        try:
            self._succession.exclude(exclude)
            self._succession.come()
            while (now := self._succession.now()).state is not State.COMMITTED:
                if not self._step(now):
                    time.sleep(nap)
                    nap = min(nap * 1.3, _LONGEST_NAP)
            return self._conclude(now)
        except BaseException:
            self.give_up()
            raise
        finally:
            if self._offer is not None:
                self._offer.close()
            if self._request is not None:
                self._request.close()

    def give_up(self) -> None:
        """Leave without a group: void what waits for this rank, and leave what has come about without it."""
        self._succession.stop_coming()
        while (now := self._succession.now()).state is State.PROPOSED and self._rank in now.survivors:
            self._succession.void(now)
        self._drop()

    @property
    def _rank(self) -> int:
        return self._context.rank

    def _step(self, now: Round) -> bool:
        """Do what can be done in a round that is not final; whether something was."""
        gone = self._gone()
        excluded = self._succession.excluded()
        if self._rank in excluded:
            if (exclusion := self._succession.exclusion(self._context.name)) is not None:
                raise exclusion
            return True  # it has been committed meanwhile, and with this rank
        if now.state is State.OPEN:
            coming = self._succession.coming() - gone - excluded.keys()
            missing = set(range(self._context.size)) - gone - excluded.keys() - coming
            if not missing and min(coming) == self._rank:
                return self._propose(now, sorted(coming))
            late = missing or {min(coming)}
        else:
            if not gone.isdisjoint(now.survivors) or not excluded.keys().isdisjoint(now.survivors):
                return self._succession.void(now)
            if self._rank in now.survivors and self._enter(now):
                return True
            late = self._succession.unready(now)
            if not late:
                return self._succession.commit(now)
            if self._rank in late:
                late = {now.proposer}  # who does not hand the arena out
        if time.monotonic() > self._deadline:
            return self._end_late(now, sorted(late))
        return False

    def _gone(self) -> set[int]:
        """The ranks that have died or left."""
        context = self._context
        dead = context.peers.dead() if context.peers is not None else ()
        left = {rank for rank in range(context.size) if context.has_left(rank)}
        return left.union(dead)

    def _propose(self, now: Round, survivors: Sequence[int]) -> bool:
        self._drop()
        self._offer = offer = make_offer(len(survivors), self._name, threads=self._as_threads)
        self._estate = offer.estate
        self._entering = now.number
        proposed = self._succession.propose(now, survivors, offer.key)
        if not proposed:
            self._drop()
        return proposed

    def _enter(self, now: Round) -> bool:
        """Do the next thing for this rank, or others, to be in the new arena; whether there was something."""
        if now.proposer == self._rank:
            if self._offer is None or self._entering != now.number:
                return self._succession.void(now)  # an earlier attempt's, which nobody serves
            self._offer.serve()
        elif self._entering != now.number:
            self._drop()
            self._request = make_request(now.key, len(now.survivors), threads=self._as_threads)
            self._entering = now.number
        if self._place is not None:
            return False
        if self._estate is None and self._request is not None:
            self._estate = self._request.answer()
        if self._estate is None:
            return False
        size = len(now.survivors)
        spins, yields = waiting_policy(size)
        rank = now.survivors.index(self._rank)
        self._place = RankContext(self._estate.arena, rank, self._name, spins=spins, yields=yields)
        if self._estate.threads is not None:
            self._estate.threads[rank] = self._context.program
        self._place.announce()
        self._succession.get_ready(now)
        return True

    def _drop(self) -> None:
        """Let go of an arena that this rank does not stay in."""
        if self._offer is not None:
            self._offer.close()
        if self._request is not None:
            self._request.close()
        if self._place is not None:
            self._place.leave()
        if self._estate is not None:
            self._estate.abandon()
        self._offer = self._request = self._estate = self._place = None
        self._entering = 0

    def _end_late(self, now: Round, late: Sequence[int]) -> bool:
        """The time is over: raise, unless it turns out that this rank is in the new group after all."""
        if now.state is State.PROPOSED and self._rank in now.survivors and not self._succession.void(now):
            return True
        whom = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        came = self._succession.coming().issuperset(late)
        what = "does not go on with it" if came else "has not called shrink()"
        raise CollectiveTimeoutError(
            f"rank {self._rank}: group {self._context.name!r} was not shrunk within {self._seconds:g} s:"
            f" {whom} {'lives' if len(late) == 1 else 'live'}, but {what}. Call shrink() again to go on"
            f" waiting, or shrink(exclude={list(late)}) to go on without.{self._context.report(late)}",
            tuple(late),
        )

    def _conclude(self, final: Round) -> Shrunk:
        if (exclusion := self._succession.exclusion(self._context.name)) is not None:
            raise exclusion
        place, estate = self._place, self._estate
        assert place is not None, "a round is committed only when all its survivors were ready"
        assert estate is not None
        place.meet_peers(estate.threads, self._context.program)
        return Shrunk(place, estate.store, final.survivors)
