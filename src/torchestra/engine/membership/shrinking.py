"""Make a new group of the remaining ranks of one host: ``group.shrink()``.

The ranks agree in their arena (agreement.py, arena_registers.py); the proposer makes a new arena and a store,
and gives them to the others (arena_transfer.py). Ranks keep their order. Every rank that looks knows deaths
within the host for certain (liveness.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torchestra.engine.failure.liveness import PeerThreads
from torchestra.engine.kernels.selection import poll_interval, spin_policy
from torchestra.engine.membership.admission import is_offer
from torchestra.engine.membership.agreement import Ballot, MembershipAgreement, PollInterval
from torchestra.engine.membership.arena_transfer import (
    ArenaOffer,
    ArenaRequest,
    ArenaTransfer,
    make_offer,
    make_request,
)
from torchestra.engine.membership.entering import E
from torchestra.engine.membership.growing import GrownGroup, Growth
from torchestra.engine.membership.rank_context import RankContext
from torchestra.errors import InvalidArgumentError
from torchestra.store import Store
from torchestra.system.deadline import Deadline

_FIRST_LOOK_S, _LAST_LOOK_S = 0.0005, 0.02
T = TypeVar("T")


@dataclass(frozen=True)
class ShrunkGroup:
    """A survivor's part in the new group.

    Attributes:
        context: this rank's, in the new group.
        store: of the new group's ranks; it has no keys yet.
        survivors: by new rank, the rank in the old group.
    """

    context: RankContext
    store: Store
    survivors: tuple[int, ...]


def shrink(
    context: RankContext,
    name: str,
    exclude: Sequence[int],
    timeout_s: float,
    growth: Growth[E] | None = None,
) -> ShrunkGroup | GrownGroup[E]:
    """Agree with the other survivors which ranks go on, and enter a new group with them.

    Must be called by every rank that shall go on. The old group is left as it is: unusable for operations, if
    it was aborted, but another attempt may be made if this one fails.

    Args:
        context: this rank's, in the old group.
        name: of the new group, for messages; the same on all ranks.
        exclude: ranks to go on without, whether they live or not.
        growth: lets others in; default: nobody is let in.

    Raises:
        RankExcludedError: the others go on without this rank.
        CollectiveTimeoutError: a rank lives but has not come; it is named.
        InvalidArgumentError: another thread of this rank is shrinking the group.
    """
    epoch_entry, deadline = _ArenaEpochEntry(context, name), Deadline(timeout_s)
    growing = None if growth is None else growth.around(epoch_entry, context.registers, deadline)
    agreement = MembershipAgreement(
        context.registers,
        growing or epoch_entry,
        context.name,
        deadline,
        PollInterval(_FIRST_LOOK_S, _LAST_LOOK_S, poll_interval(context.size)),
        context.describe,
        lambda late: context.host_report(late).lines,
        grows=growing is not None,
    )

    def attempt() -> ShrunkGroup | GrownGroup[E]:
        try:
            ballot = agreement.run(exclude)
            if growing is not None and is_offer(ballot.key):
                return growing.conclude(ballot)
            return epoch_entry.conclude(ballot)
        finally:
            epoch_entry.stop_passing()

    return run_alone(context, context.rank, attempt)


def run_alone(context: RankContext, rank: int, attempt: Callable[[], T]) -> T:
    """Make an attempt, and return its result; only one thread of a rank at a time may.

    Raises:
        InvalidArgumentError: another thread of this rank is shrinking the group.
    """
    lock, claim = context.shrinking, object()
    try:
        if not lock.take(claim):
            raise InvalidArgumentError(
                f"rank {rank}: another thread of this rank is shrinking group {context.name!r} already"
            )
        outcome = attempt()
    finally:
        if lock.holder is claim:
            del lock.holder
    return outcome


class _ArenaEpochEntry:
    """Enter the group ``name`` through a new arena, in place of the group of ``context``."""

    def __init__(self, context: RankContext, name: str) -> None:
        self._old, self._name = context, name
        self._as_threads = isinstance(context.peers, PeerThreads)
        self._offer: ArenaOffer | None = None
        self._request: ArenaRequest | None = None
        self._transfer: ArenaTransfer | None = None
        self._new: RankContext | None = None

    def gone(self) -> set[int]:
        return set(self._old.gone())

    def offer(self, ballot: Ballot, survivors: Sequence[int]) -> bytes:
        self.leave()
        self._offer = make_offer(len(survivors), self._name, threads=self._as_threads)
        self._transfer = self._offer.transfer
        return self._offer.key

    def advance(self, ballot: Ballot) -> bool | None:
        rank, size = ballot.survivors.index(self._old.rank), len(ballot.survivors)
        if is_offer(ballot.key):
            return None  # this rank admits no new ranks
        if self._offer is not None:
            self._offer.serve()
        elif ballot.proposer == self._old.rank:
            return None  # an earlier attempt's, which no rank serves
        elif self._request is None:
            self._request = make_request(ballot.key, rank, size, self._name, threads=self._as_threads)
        if self._transfer is None and self._request is not None:
            self._transfer = self._request.answer()
        if self._new is None and self._transfer is not None:
            self._enter(self._transfer, rank, size)
        return self._new is not None

    def _enter(self, transfer: ArenaTransfer, rank: int, size: int) -> None:
        self._new = RankContext(transfer.arena, rank, self._name, spin_policy(size))
        if transfer.threads is not None:
            transfer.threads[rank] = self._old.program
        self._new.announce()

    def wait(self, seconds: float) -> None:
        if self._offer is not None:
            self._offer.serve(seconds)
        elif self._request is not None and self._new is None:
            self._request.sleep(seconds)
        else:
            self._old.registers.sleep(seconds)

    def awaited(self, ballot: Ballot) -> set[int]:
        return {ballot.proposer}  # which does not hand the arena out

    def leave(self) -> None:
        self.stop_passing()
        if self._new is not None:
            self._new.leave()
        if self._transfer is not None:
            self._transfer.abandon()
        self._offer = self._request = self._transfer = self._new = None

    def stop_passing(self) -> None:
        """Stop giving the arena out, and stop asking for it."""
        if self._offer is not None:
            self._offer.close()
        if self._request is not None:
            self._request.close()

    def conclude(self, ballot: Ballot) -> ShrunkGroup:
        """Begin to watch the liveness of the new group's ranks, and return the result."""
        assert self._new is not None, "an epoch is committed only when all its survivors were ready"
        assert self._transfer is not None
        self._new.meet_peers(self._transfer.threads, self._old.program)
        return ShrunkGroup(self._new, self._transfer.store, ballot.survivors)
