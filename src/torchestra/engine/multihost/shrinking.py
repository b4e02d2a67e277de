"""Make a new group of the remaining ranks of several hosts: ``group.shrink()`` beyond one host.

The ranks agree through the group's store (membership/agreement.py, store_registers.py). Each survivor enters
the new group in a thread of its own, so that the rank's program keeps checking for failures.

Deaths within a host are certain, and its other ranks report them. A host is gone when it has answered no ping
(failure_detector.py) for the heartbeat bound, which may be why the group was aborted. A host that comes back
too late is told that it was left out (RankExcludedError).
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torchestra.engine.membership.agreement import Ballot, MembershipAgreement, PollInterval
from torchestra.engine.membership.shrinking import run_alone
from torchestra.engine.multihost.hierarchy import Hierarchy
from torchestra.engine.multihost.hosts import Hosts
from torchestra.engine.multihost.store_registers import StoreRegisters
from torchestra.errors import DistNetworkError, DistStoreError
from torchestra.store import PrefixStore, Store
from torchestra.system.deadline import Deadline

_FIRST_INTERVAL, _LONGEST_INTERVAL, _INTERVAL_PER_RANK = 0.005, 0.1, 0.001
_EXPLANATION_BOUNDS = 1.5
"""In how many heartbeat bounds it is known whether entering has failed because another rank has died."""


class Entered(Protocol):
    """A rank's part in a group that it has entered."""

    def close(self) -> None:
        """Leave it."""


E = TypeVar("E", bound=Entered)
Enter = Callable[[Store, int, Hosts, float], E]
"""Enters a group: over this store, as this rank, with the ranks on these hosts, within a time-out."""


@dataclass(frozen=True)
class ShrunkHosts(Generic[E]):
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
    hierarchy: Hierarchy, exclude: Sequence[int], timeout_s: float, enter: Enter[E]
) -> ShrunkHosts[E]:
    """Agree with the other survivors which ranks go on, and enter a new group with them.

    Must be called by every rank that shall go on. If it fails, another attempt may be made.

    Args:
        hierarchy: this rank's, in the old group.
        exclude: ranks to go on without, whether they live or not.
        enter: how to enter the new group.

    Raises:
        RankExcludedError: the others go on without this rank.
        CollectiveTimeoutError: a rank lives but has not come; it is named.
        DistNetworkError: the store is gone, and with it the means to agree.
        DistBackendError: another process has written a decision into the store.
        InvalidArgumentError: another thread of this rank is shrinking the group.
    """
    rank, hosts, detector = hierarchy.rank, hierarchy.hosts, hierarchy.detector
    deadline = Deadline(timeout_s)

    def report(late: Sequence[int]) -> str:
        local = hierarchy.context.report(range(hierarchy.context.size))
        return f"{detector.ask_where_they_are()}{local}"

    def attempt() -> ShrunkHosts[E]:
        group_store = PrefixStore("shrinking", detector.store)
        store = group_store.clone()
        store.set_timeout(detector.bound)
        registers = StoreRegisters(store, rank, hosts.size, hierarchy.name)
        entrance = _StoreEntrance(hierarchy, registers, group_store, deadline, enter)
        longest = max(_LONGEST_INTERVAL, _INTERVAL_PER_RANK * hosts.size)
        interval = PollInterval(_FIRST_INTERVAL, longest)
        agreement = MembershipAgreement(
            registers, entrance, hierarchy.name, deadline, interval, hosts.describe, report
        )
        ballot = agreement.run(exclude)
        keys = PrefixStore(f"keys/{ballot.epoch}", store)
        return ShrunkHosts(entrance.conclude(), keys, ballot.survivors)

    try:
        return run_alone(hierarchy.context, rank, attempt)
    except (DistNetworkError, DistStoreError) as error:
        raise DistNetworkError(
            f"{hosts.describe(rank)}: group {hierarchy.name!r} cannot be shrunk, because its store is gone or"
            f" out of reach, and ranks on several hosts agree through it ({error}). Start the job again, from"
            " a checkpoint; a store that the launcher serves (torchestra run) outlives every rank"
        ) from error


class _StoreEntrance(Generic[E]):
    """Enter the new group over a store, in a thread of its own."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        registers: StoreRegisters,
        store: Store,
        deadline: Deadline,
        enter: Enter[E],
    ) -> None:
        self._hierarchy, self._registers, self._store = hierarchy, registers, store
        self._deadline, self._enter = deadline, enter
        detector = hierarchy.detector
        self._gone = detector.gone
        self._entry: _Entry[E] | None = None

    def gone(self) -> set[int]:
        context = self._hierarchy.context
        self._registers.report_gone(set(context.to_group_ranks(context.gone())))
        return self._registers.gone() | self._gone()

    def offer(self, ballot: Ballot, survivors: Sequence[int]) -> bytes:
        return b""

    def advance(self, ballot: Ballot) -> bool | None:
        if self._entry is None:
            timeout_s = max(self._hierarchy.detector.bound, self._deadline.remaining())
            store = PrefixStore(f"next/{ballot.epoch}", self._store)
            hosts = self._hierarchy.hosts.among(ballot.survivors)
            rank = ballot.survivors.index(self._hierarchy.rank)
            self._entry = _Entry(lambda: self._enter(store, rank, hosts, timeout_s))
        entry = self._entry
        if not entry.has_ended():
            return False
        if entry.error is not None:
            # For the death of another, which will be known and voids the epoch, or for a reason of its own.
            if entry.explanation is None:
                entry.explanation = Deadline(_EXPLANATION_BOUNDS * self._hierarchy.detector.bound)
            if entry.explanation.expired():
                raise entry.error
        return entry.entered is not None

    def awaited(self, ballot: Ballot) -> set[int]:
        return set(ballot.survivors) - {self._hierarchy.rank}

    def leave(self) -> None:
        if self._entry is not None:
            self._entry.abandon()
            self._entry = None

    def conclude(self) -> E:
        """Return what this rank has entered."""
        if self._entry is None or self._entry.entered is None:
            raise self._registers.forgery()
        return self._entry.entered


class _Entry(Generic[E]):
    """A rank on its way into a new group, in a thread of its own."""

    def __init__(self, enter: Callable[[], E]) -> None:
        self.entered: E | None = None
        self.error: BaseException | None = None
        self.explanation: Deadline | None = None
        self._abandoned = False
        self._lock = threading.Lock()
        self._enter = enter
        # In the context of the rank, so that the group's objects know which rank they are of.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._run,), name="torchestra-entering", daemon=True
        )
        self._thread.start()

    def has_ended(self) -> bool:
        """Return whether it has entered the group, or failed."""
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Leave the group, now or when it has been entered."""
        with self._lock:
            self._abandoned = True
            entered = self.entered
        if entered is not None:
            entered.close()

    def _run(self) -> None:
        try:
            entered = self._enter()
        except BaseException as error:
            self.error = error
            return
        with self._lock:
            self.entered = entered
            abandoned = self._abandoned
        if abandoned:
            entered.close()
