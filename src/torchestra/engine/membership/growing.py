"""Let joiners into a group: ``group.grow()``, on its members.

The members agree as in ``shrink()`` (agreement.py), in their arena or in their store. The proposer looks who
waits to be let in, and makes an offer of them and the survivors (admission.py); if nobody waits, or one of
those that have come has called ``shrink()``, it proposes what ``shrink()`` would. Every rank that an offer
names enters its group over the admission store, in a thread of its own. A joiner that dies or withdraws
before all have entered is a reason to void the epoch, as a survivor's death is; the next goes on without it.
One that lives and does not get in is refused, and told why.

All who are named are in the new group's first barrier when one of them leaves it; so a member that says that
it is ready says it for the joiners too, and the registers need not know them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic

from torchestra.engine.membership.admission import (
    COMMITTED,
    VOID,
    Admission,
    JoinRequest,
    Offer,
    Terms,
    is_offer,
)
from torchestra.engine.membership.agreement import Ballot, EpochEntry, Registers, State
from torchestra.engine.membership.entering import E, EntryThread
from torchestra.engine.membership.joiner_detector import JoinerDetector
from torchestra.engine.membership.tidying import tidy_later
from torchestra.errors import DistError
from torchestra.store import Store
from torchestra.store.process import ProcessIdentity
from torchestra.system.deadline import Deadline

_MIN_ENTERING_S = 10.0
_RECENTLY_S = 0.05
"""How old what an offer is made of may be; who has died since is noticed before it is committed."""
_LOOK_S = 0.02
"""How often a rank on its way into a group looks whether another one has died."""
ENTERING_BOUNDS = 2
"""In how many heartbeat bounds all must have entered the group of an offer; ten seconds, if that is more."""

EnterOffer = Callable[[Store, int, Offer, float], E]
"""Enters the group of an offer: over this store, as this rank, within a time-out."""

Cancel = Callable[[Store, Offer], None]
"""Has those that enter the group of an offer over this store give up."""


def entering_seconds(bound_s: float) -> float:
    """Return how long it may take to enter the group of an offer."""
    return max(_MIN_ENTERING_S, ENTERING_BOUNDS * bound_s)


@dataclass
class Growth(Generic[E]):
    """How a member lets others in.

    Attributes:
        terms: of the new group.
        admission, detector: this rank's view of those that wait.
        enter, cancel: enter the group of an offer, and give it up.
        host: of all members, as of a :class:`JoinRequest`; empty if they have several, or that must be tried.
    """

    terms: Terms
    admission: Admission
    detector: JoinerDetector
    enter: EnterOffer[E]
    cancel: Cancel
    host: str = ""

    def around(
        self, epoch_entry: EpochEntry, registers: Registers, deadline: Deadline
    ) -> GrowingEpochEntry[E]:
        """Return an entry that lets others in, and does as ``epoch_entry`` where nobody waits."""
        return GrowingEpochEntry(self, epoch_entry, registers, deadline)


@dataclass(frozen=True)
class GrownGroup(Generic[E]):
    """A member's or a joiner's part in a group with joiners.

    Attributes:
        entered: what :data:`EnterOffer` returned.
        store: what the ranks share; it has no keys of theirs yet.
        offer: the group.
    """

    entered: E
    store: Store
    offer: Offer


class GrowingEpochEntry(Generic[E]):
    """Enter the group that an epoch proposes, whether it has joiners or not."""

    def __init__(
        self, growth: Growth[E], plain: EpochEntry, registers: Registers, deadline: Deadline
    ) -> None:
        self._growth, self._plain, self._registers = growth, plain, registers
        self._deadline = deadline
        self._own: Offer | None = None  # this rank's own proposal
        self._offer: Offer | None = None
        self._entry: EntryThread[E] | None = None
        self._joiners: dict[str, ProcessIdentity] = {}

    def gone(self) -> set[int]:
        return self._plain.gone()

    def offer(self, ballot: Ballot, survivors: Sequence[int]) -> bytes:
        growth = self._growth
        grows = self._registers.growing().issuperset(survivors)
        requests = growth.detector.waiting(_RECENTLY_S) if grows else []
        requests = [request for request in requests if self._fits(request)]
        if not requests:
            return self._plain.offer(ballot, survivors)
        offer = self._own = Offer.of(growth.terms, survivors, requests, growth.host)
        growth.admission.write(offer)
        return offer.key

    def _fits(self, request: JoinRequest) -> bool:
        """Return whether a joiner can be a rank here; refuse it if it cannot."""
        kind, own = self._growth.terms.kind, ProcessIdentity.current()
        if request.kind == kind and (kind != "threads" or request.process == own):
            return True
        are = f"threads of {own}" if kind == "threads" else "processes"
        what = "a thread" if request.kind == "threads" else "a process"
        why = f"its ranks are {are}, and it is {what}: {request.process}"
        self._growth.admission.refuse([request.number], why)
        return False

    def advance(self, ballot: Ballot) -> bool | None:
        if not is_offer(ballot.key):
            return self._plain.advance(ballot)
        if self._entry is None:
            self._begin(ballot)
        assert self._entry is not None
        if self._growth.detector.lost(self._joiners):
            return None
        try:
            return self._entry.has_entered()
        except Exception as error:
            self._growth.admission.refuse(self._joiners, f"{type(error).__name__}: {error}")
            return None

    def _begin(self, ballot: Ballot) -> None:
        growth, admission = self._growth, self._growth.admission
        own = self._own if self._own is not None and self._own.key == ballot.key else None
        offer = self._offer = own or admission.offer(ballot.key)
        if ballot.proposer == self._registers.rank:
            admission.invite(offer, ballot.epoch)
        self._joiners = offer.processes
        rank, store = offer.previous.index(self._registers.rank), admission.meeting(offer.key)
        bound_s = admission.bound_s
        seconds = min(entering_seconds(bound_s), max(bound_s, self._deadline.remaining()))
        self._entry = EntryThread(
            lambda: growth.enter(store, rank, offer, seconds),
            bound_s,
            lambda: growth.cancel(store, offer),
        )

    def wait(self, seconds: float) -> None:
        if self._entry is None or self._entry.has_ended():
            self._plain.wait(seconds)
        else:
            self._entry.wait(max(seconds, _LOOK_S))  # its end is noticed at once

    def awaited(self, ballot: Ballot) -> set[int]:
        if is_offer(ballot.key):
            return set(ballot.survivors) - {self._registers.rank}
        return self._plain.awaited(ballot)

    def leave(self) -> None:
        entry, offer, self._entry, self._offer = self._entry, self._offer, None, None
        try:
            if offer is not None:
                with contextlib.suppress(DistError, OSError):  # the store may be gone
                    self._write_verdict(offer)
            if entry is not None:
                with contextlib.suppress(DistError, OSError):
                    entry.abandon()
        finally:
            self._plain.leave()

    def _write_verdict(self, offer: Offer) -> None:
        """Tell the joiners what has become of an offer, if the registers say so."""
        ballot = self._registers.ballot()
        if ballot.key == offer.key:
            if ballot.state is State.COMMITTED:
                self._growth.admission.write_verdict(offer.key, COMMITTED)
        else:
            self._growth.admission.write_verdict(offer.key, VOID)

    def conclude(self, ballot: Ballot) -> GrownGroup[E]:
        """Return what this rank has entered, once the joiners can know that it is committed."""
        assert self._offer is not None, "an epoch is committed only when all its survivors were ready"
        assert self._entry is not None
        assert self._entry.entered is not None
        admission = self._growth.admission
        if ballot.proposer == self._registers.rank:
            with contextlib.suppress(DistError, OSError):  # another member tells them
                admission.write_verdict(ballot.key, COMMITTED)
            tidy_later(partial(admission.remove_offers, self._growth.terms.generation))
        else:  # the proposer may have died
            tidy_later(partial(admission.write_verdict, ballot.key, COMMITTED))
        keys = admission.meeting(ballot.key)
        return GrownGroup(self._entry.entered, keys, self._offer)
