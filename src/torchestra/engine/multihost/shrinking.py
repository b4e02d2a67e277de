"""Make a new group of the remaining ranks of several hosts: ``group.shrink()`` beyond one host.

The ranks agree through the group's store (membership/agreement.py, store_registers.py). Each survivor enters
the new group in a thread of its own, so that the rank's program keeps checking for failures.

Deaths within a host are certain, and its other ranks report them. A host is gone when it has answered no ping
(failure_detector.py) for the heartbeat bound, which may be why the group was aborted. A host that comes back
too late is told that it was left out (RankExcludedError).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic

from torchestra.engine.hosts import Hosts
from torchestra.engine.membership.admission import is_offer
from torchestra.engine.membership.agreement import Ballot, MembershipAgreement, PollInterval
from torchestra.engine.membership.entering import E, EntryThread
from torchestra.engine.membership.growing import GrownGroup, Growth
from torchestra.engine.membership.shrinking import run_alone
from torchestra.engine.multihost.hierarchy import Hierarchy
from torchestra.engine.multihost.store_registers import StoreRegisters, registers_store
from torchestra.errors import DistError, DistNetworkError, DistStoreError, GroupAbortedError
from torchestra.store import PrefixStore, Store
from torchestra.system.deadline import Deadline

_FIRST_INTERVAL, _LONGEST_INTERVAL, _INTERVAL_PER_RANK = 0.005, 0.1, 0.001
_EXPLANATION_BOUNDS = 1.5
"""In how many heartbeat bounds it is known whether entering has failed because another rank has died."""

_MOST_FAILURES = 2
"""How often an attempt tries again to enter a new group that has failed: connections may have been reset."""

_SETTLING_BOUNDS = 2
"""For how many heartbeat bounds a rank that an epoch does not name leaves it to those that it names."""


def poll_interval(ranks: int) -> PollInterval:
    """Return how often each of so many ranks looks at the registers in the store."""
    return PollInterval(_FIRST_INTERVAL, max(_LONGEST_INTERVAL, _INTERVAL_PER_RANK * ranks))


Enter = Callable[[Store, int, Hosts, float], E]
"""Enters a group: over this store, as this rank, with the ranks on these hosts, within a time-out."""

Cancel = Callable[[Store, Hosts], None]
"""Has the ranks on these hosts that enter a group over this store give up."""


@dataclass(frozen=True)
class ShrunkHostGroup(Generic[E]):
    """A survivor's part in the new group.

    Attributes:
        entered: what :data:`Enter` returned.
        store: what the new group's ranks share; it has no keys yet.
        survivors: by new number, the number in the old group.
    """

    entered: E
    store: Store
    survivors: tuple[int, ...]


def shrink_hosts(
    hierarchy: Hierarchy,
    exclude: Sequence[int],
    timeout_s: float,
    enter: Enter[E],
    cancel: Cancel,
    growth: Growth[E] | None = None,
) -> ShrunkHostGroup[E] | GrownGroup[E]:
    """Agree with the other survivors which ranks go on, and enter a new group with them.

    Must be called by every rank that shall go on. If it fails, another attempt may be made.

    Args:
        hierarchy: this rank's, in the old group.
        exclude: ranks to go on without, whether they live or not.
        enter, cancel: how to enter the new group, and how to give it up.
        growth: lets others in; default: nobody is let in.

    Raises:
        RankExcludedError: the others go on without this rank.
        CollectiveTimeoutError: a rank lives but has not come; it is named.
        DistNetworkError: the store is gone, and with it the means to agree.
        DistBackendError: another process has written a decision into the store.
        InvalidArgumentError: another thread of this rank is shrinking the group.
    """
    rank, hosts = hierarchy.rank, hierarchy.hosts
    attempt = partial(_attempt, hierarchy, exclude, Deadline(timeout_s), enter, cancel, growth)
    try:
        return run_alone(hierarchy.context, rank, attempt)
    except (DistNetworkError, DistStoreError) as error:
        raise DistNetworkError(
            f"{hosts.describe(rank)}: group {hierarchy.name!r} cannot be shrunk, because its store is gone or"
            f" out of reach, and ranks on several hosts agree through it ({error}). Start the job again, from"
            " a checkpoint; a store that the launcher serves (torchestra run) outlives every rank"
        ) from error


def _attempt(
    hierarchy: Hierarchy,
    exclude: Sequence[int],
    deadline: Deadline,
    enter: Enter[E],
    cancel: Cancel,
    growth: Growth[E] | None,
) -> ShrunkHostGroup[E] | GrownGroup[E]:
    hosts, detector = hierarchy.hosts, hierarchy.detector
    group_store = PrefixStore("shrinking", detector.store)
    store = registers_store(detector.store, detector.bound)
    registers = StoreRegisters(store, hierarchy.rank, hosts.size, hierarchy.name)
    epoch_entry = _StoreEpochEntry(hierarchy, registers, group_store, deadline, enter, cancel)
    growing = None if growth is None else growth.around(epoch_entry, registers, deadline)

    def report(late: Sequence[int]) -> str:
        local = hierarchy.context.host_report(range(hierarchy.context.size))
        return "".join(each.lines for each in (*detector.ask_where_they_are(), local))

    agreement = MembershipAgreement(
        registers,
        growing or epoch_entry,
        hierarchy.name,
        deadline,
        poll_interval(hosts.size),
        hosts.describe,
        report,
        grows=growing is not None,
        grace_s=_SETTLING_BOUNDS * detector.bound,
    )
    ballot = agreement.run(exclude)
    if growing is not None and is_offer(ballot.key):
        return growing.conclude(ballot)
    return ShrunkHostGroup(
        epoch_entry.conclude(), PrefixStore(f"keys/{ballot.epoch}", store), ballot.survivors
    )


class _StoreEpochEntry(Generic[E]):
    """Enter the new group over a store, in a thread of its own."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        registers: StoreRegisters,
        store: Store,
        deadline: Deadline,
        enter: Enter[E],
        cancel: Cancel,
    ) -> None:
        self._hierarchy, self._registers, self._store = hierarchy, registers, store
        self._deadline, self._enter, self._cancel = deadline, enter, cancel
        detector = hierarchy.detector
        self._gone = detector.gone
        self._entry: EntryThread[E] | None = None
        self._failures = 0

    def gone(self) -> set[int]:
        context = self._hierarchy.context
        self._registers.report_gone(set(context.to_group_ranks(context.gone())))
        said_gone = self._registers.gone()
        return said_gone | self._gone(said_gone, self._registers.candidates())

    def offer(self, ballot: Ballot, survivors: Sequence[int]) -> bytes:
        return b""

    def advance(self, ballot: Ballot) -> bool | None:
        if is_offer(ballot.key):
            return None  # this rank admits no new ranks
        if self._entry is None:
            timeout_s = max(self._hierarchy.detector.bound, self._deadline.remaining())
            store = PrefixStore(f"next/{ballot.epoch}", self._store)
            hosts = self._hierarchy.hosts.among(ballot.survivors)
            rank = ballot.survivors.index(self._hierarchy.rank)
            # An error may be for the death of another, which will be known and voids the epoch.
            error_delay_s = _EXPLANATION_BOUNDS * self._hierarchy.detector.bound
            self._entry = EntryThread(
                lambda: self._enter(store, rank, hosts, timeout_s),
                error_delay_s,
                lambda: self._cancel(store, hosts),
            )
        try:
            return self._entry.has_entered()
        except (GroupAbortedError, DistNetworkError):
            self._failures += 1
            if self._failures > _MOST_FAILURES:
                raise
            return None

    def wait(self, seconds: float) -> None:
        if self._entry is None:
            time.sleep(seconds)
        else:
            self._entry.wait(seconds)

    def awaited(self, ballot: Ballot) -> set[int]:
        return set(ballot.survivors) - {self._hierarchy.rank}

    def leave(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            with contextlib.suppress(DistError, OSError):  # the store may be gone
                entry.abandon()

    def conclude(self) -> E:
        if self._entry is None or self._entry.entered is None:
            raise self._registers.forged_error()
        return self._entry.entered
