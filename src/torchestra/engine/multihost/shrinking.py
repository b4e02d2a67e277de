"""How the survivors of a group on several hosts make a new one: ``group.shrink()`` beyond one host.

Within one host the arena is where survivors decide (engine/membership/shrinking.py); hosts have only the
store in common, so here the store is. Where its server is gone there is no agreement, hence no shrinking: two
halves of a network that cannot reach each other must not both go on. Rounds are numbered from 1; each has two
registers that are written once, by compare_set, whoever comes first::

    came        who has come, and with a minus who has stopped coming; this and the next two only grow
    gone        who has died or left, as a rank of its host says
    excluded    "R:Q", whom somebody goes on without, and who that is
    round/N     the proposal: the ranks that shall go on
    entered/N   how many of them have entered the new group
    verdict/N   "committed" or "void"

A rank that calls says that it has come, and then does what it can until there is a verdict:

- *propose*: when each rank has come, is gone, or is excluded, the lowest that has come proposes those that
  have.
- *enter*: who is proposed enters the new group, in a thread of its own, so that the rank's program goes on
  looking around; whoever is the last to have entered commits.
- *void*: whoever finds that a rank of the proposal is gone or excluded voids the round; the next begins.

*Agreement.* A rank has the new group only if it has read ``committed`` for the round whose proposal names it.
That is written only after all whom the proposal names have entered, and a round only begins after the one
before it is void; since registers are written once, there is one committed round at most. What a rank
believes about who lives decides only whether a round is proposed or voided, never who goes on.

*Who is gone.* Deaths within a host are certain, and told by its other ranks. A host is gone when nobody has
beaten for it (failure_detector.py) for the heartbeat bound, which may be why the group was aborted. A host
that comes back too late is told that it was left out (RankExcludedError).
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from torchestra.engine.multihost.hierarchy import Hierarchy
from torchestra.engine.multihost.hosts import Hosts
from torchestra.engine.multihost.peer_values import ranks_in_words, read_proposal
from torchestra.engine.multihost.silence import Silence
from torchestra.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    InvalidArgumentError,
    RankExcludedError,
)
from torchestra.store import PrefixStore, Store
from torchestra.store.secret import SECRET_ADVICE

__all__ = ["Entered", "ShrunkHosts", "shrink_hosts"]

_COMMITTED, _VOID = b"committed", b"void"
_FIRST_NAP, _LONGEST_NAP = 0.005, 0.1
_NAP_PER_RANK = 0.001


class Entered(Protocol):
    """What a rank holds of a group that it has entered."""

    def close(self) -> None:
        """Leave it."""


E = TypeVar("E", bound=Entered)
Enter = Callable[[Store, int, Hosts, float], E]
"""Enters a group: over this store, as this rank, with the ranks on these hosts, in so many seconds."""


@dataclass(frozen=True)
class ShrunkHosts(Generic[E]):
    """What a survivor has in its hands.

    Attributes:
        entered: what :data:`Enter` returned.
        store: what the new group's ranks share; it has no keys yet.
        survivors: by new number, the number in the group that was.
    """

    entered: E
    store: Store
    survivors: tuple[int, ...]


def shrink_hosts(
    hierarchy: Hierarchy, exclude: Sequence[int], seconds: float, enter: Enter[E]
) -> ShrunkHosts[E]:
    """Agree with the other survivors who goes on, and enter a new group with them.

    Must be called by every rank that shall go on. If it fails, another attempt may be made.

    Args:
        hierarchy: this rank's, in the old group.
        exclude: ranks to go on without, whether they live or not.
        seconds: how long to wait for the others.
        enter: how to enter the new group.

    Raises:
        RankExcludedError: the others go on without this rank.
        CollectiveTimeoutError: a rank lives but has not come; it is named.
        DistNetworkError: the store is gone, and with it the means to agree.
        DistBackendError: somebody else has written into the store that it is decided.
        InvalidArgumentError: another thread of this rank is shrinking the group.
    """
    member = hierarchy.member
    lock, claim = member.shrinking, object()
    try:
        if not lock.take(claim):
            raise InvalidArgumentError(
                f"rank {hierarchy.rank}: another thread of this rank is shrinking group {hierarchy.name!r}"
                " already"
            )
        shrunk = _Attempt(hierarchy, seconds, enter).run(exclude)
    except (DistNetworkError, DistStoreError) as error:
        raise DistNetworkError(
            f"{hierarchy.hosts.describe(hierarchy.rank)}: group {hierarchy.name!r} cannot be shrunk, because"
            f" its store is gone or out of reach, and ranks on several hosts agree through it ({error})."
            " Start the job again, from a checkpoint; a store that the launcher serves (torchestra run)"
            " outlives every rank"
        ) from error
    finally:
        if lock.holder is claim:
            del lock.holder
    return shrunk


class _View(NamedTuple):
    """What stands in the store in a round."""

    came: set[int]
    gone: set[int]
    excluded: dict[int, int]
    survivors: tuple[int, ...]
    verdict: bytes


class _Attempt(Generic[E]):
    """One call of :func:`shrink_hosts`."""

    def __init__(self, hierarchy: Hierarchy, seconds: float, enter: Enter[E]) -> None:
        self._hierarchy = hierarchy
        self._member = hierarchy.member
        self._hosts = hierarchy.hosts
        self._rank = hierarchy.rank
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._bound = hierarchy.detector.bound
        self._group_store = PrefixStore("shrinking", hierarchy.detector.store)
        self._store = self._group_store.clone()
        self._store.set_timeout(self._bound)
        self._enter = enter
        detector = hierarchy.detector
        self._silence = Silence(detector.store, hierarchy.hosts, hierarchy.host, detector.bound)
        self._told: set[int] = set()
        self._number = 1
        self._entry: _Entry[E] | None = None

    def run(self, exclude: Sequence[int]) -> ShrunkHosts[E]:
        """Take part until it is decided."""
        longest = max(_LONGEST_NAP, _NAP_PER_RANK * self._hosts.size)
        nap = _FIRST_NAP
        try:
            self._hierarchy.detector.stand_in_if_needed()
            self._begin_round()
            self._append("excluded", (f"{rank}:{self._rank}" for rank in exclude))
            self._append("came", [str(self._rank)])
            while (view := self._look()).verdict != _COMMITTED:
                if view.verdict == _VOID:
                    self._drop()
                    self._number += 1
                    self._begin_round()
                    nap = _FIRST_NAP
                elif not self._step(view):
                    time.sleep(nap)
                    nap = min(nap * 1.3, longest)
            return self._conclude(view)
        except BaseException:
            self._give_up()
            raise

    def _step(self, view: _View) -> bool:
        """Do what can be done in a round without a verdict; whether something was."""
        if self._rank in view.excluded:
            raise self._exclusion(view.excluded[self._rank])
        out = view.gone | view.excluded.keys() | self._silence.gone()
        if not view.survivors:
            coming = view.came - out
            missing = set(range(self._hosts.size)) - out - coming
            if not missing and min(coming) == self._rank:
                return self._set_once(f"round/{self._number}", json.dumps(sorted(coming)).encode())
            late = missing or {min(coming)}
        else:
            if not out.isdisjoint(view.survivors):
                return self._void()
            if self._rank in view.survivors and self._go_in(view.survivors):
                return True
            late = set(view.survivors) - {self._rank}
        if time.monotonic() > self._deadline:
            self._end_late(sorted(late), view)
        return False

    # -- what is known

    def _begin_round(self) -> None:
        """Make sure that there are the keys that are read together."""
        for key in self._keys():
            self._store.compare_set(key, "", "")

    def _keys(self) -> tuple[str, ...]:
        return "came", "gone", "excluded", f"round/{self._number}", f"verdict/{self._number}"

    def _look(self) -> _View:
        """What the others say, after having told them what is seen from here."""
        member = self._member
        dead = member.peers.dead() if member.peers is not None else ()
        left = [place for place in range(member.size) if member.has_left(place)]
        here = set(member.to_group_ranks({*dead, *left}))
        self._append("gone", map(str, here - self._told))
        self._told |= here
        came, gone, excluded, proposal, verdict = self._store.multi_get(self._keys())
        size, what = self._hosts.size, f"who goes on from group {self._hierarchy.name!r}"
        survivors = read_proposal(proposal, size) if proposal else ()
        if survivors is None:
            survivors = ()
            self._void()
        if verdict not in (b"", _COMMITTED):
            verdict = _VOID  # also what no rank has written: all read the same
        return _View(
            _those_who_came(came, size, what),
            {rank for (rank,) in ranks_in_words(gone, 1, size, what)},
            {ranks[0]: ranks[1] for ranks in ranks_in_words(excluded, 2, size, what)},
            survivors,
            verdict,
        )

    def _exclusion(self, excluder: int) -> RankExcludedError:
        return RankExcludedError(
            f"rank {self._rank}: {self._hosts.describe(excluder)} has excluded rank {self._rank} from group"
            f" {self._hierarchy.name!r}; this rank has no part in what the others do; end it, or start"
            " it anew"
        )

    # -- the new group

    def _go_in(self, survivors: tuple[int, ...]) -> bool:
        """Do the next thing for this rank to be in the new group; whether there was something."""
        if self._entry is None:
            seconds = max(self._bound, self._deadline - time.monotonic())
            store = PrefixStore(f"next/{self._number}", self._group_store)
            hosts = self._hosts.among(survivors)
            rank = survivors.index(self._rank)
            self._entry = _Entry(lambda: self._enter(store, rank, hosts, seconds))
            return True
        entry = self._entry
        if entry.counted or not entry.has_ended():
            return False
        if entry.error is not None:
            self._explain(entry.error, survivors)
            return True
        entry.counted = True
        if self._store.add(f"entered/{self._number}", 1) == len(survivors):
            self._set_once(f"verdict/{self._number}", _COMMITTED)
        return True

    def _explain(self, error: BaseException, survivors: Iterable[int]) -> None:
        """Entering has failed: for the death of another, which will be known, or for a reason of its own."""
        deadline = time.monotonic() + 1.5 * self._bound
        while not (view := self._look()).verdict:
            if not (view.gone | self._silence.gone()).isdisjoint(survivors):
                self._void()
            elif time.monotonic() > deadline:
                raise error
            else:
                time.sleep(_LONGEST_NAP)

    def _drop(self) -> None:
        if self._entry is not None:
            self._entry.abandon()
            self._entry = None

    # -- ends

    def _conclude(self, view: _View) -> ShrunkHosts[E]:
        if not view.survivors:
            raise self._forgery()
        if self._rank not in view.survivors:
            if self._rank in view.excluded:
                raise self._exclusion(view.excluded[self._rank])
            others = ", ".join(map(str, view.survivors))
            raise RankExcludedError(
                f"rank {self._rank}: group {self._hierarchy.name!r} was shrunk to ranks {others} without rank"
                f" {self._rank}, whose host had been silent; this rank has no part in what the others do; end"
                " it, or start it anew",
                view.survivors,
            )
        if self._entry is None or self._entry.entered is None:
            raise self._forgery()
        return ShrunkHosts(
            self._entry.entered, PrefixStore(f"keys/{self._number}", self._store), view.survivors
        )

    def _forgery(self) -> DistBackendError:
        return DistBackendError(
            f"rank {self._rank}: the store says that group {self._hierarchy.name!r} has been shrunk, before"
            " those have entered the new group who are to be in it: somebody else has written that into the"
            f" store; {SECRET_ADVICE}"
        )

    def _end_late(self, late: Sequence[int], view: _View) -> None:
        """The time is over: raise, unless it turns out that there is a verdict."""
        if self._rank in view.survivors and not self._void():
            return
        whom = ", ".join(map(self._hosts.describe, late))
        what = "not gone on with it" if view.came.issuperset(late) else "not called shrink()"
        verb = "lives, but has" if len(late) == 1 else "live, but have"
        raise CollectiveTimeoutError(
            f"rank {self._rank}: group {self._hierarchy.name!r} was not shrunk within {self._seconds:g} s:"
            f" {whom} {verb} {what}. Call shrink() again to go on waiting, or shrink(exclude={list(late)})"
            f" to go on without.{self._hierarchy.detector.ask_where_they_are()}"
            f"{self._member.report(range(self._member.size))}",
            tuple(late),
        )

    def _give_up(self) -> None:
        """Leave without a group: void what waits for this rank."""
        with contextlib.suppress(DistError, OSError):
            self._append("came", [f"-{self._rank}"])
            if self._rank in self._look().survivors:
                self._void()
        self._drop()

    # -- the store

    def _append(self, key: str, words: Iterable[str]) -> None:
        if text := "".join(f"{word} " for word in words):
            self._store.append(key, text)

    def _set_once(self, key: str, value: bytes) -> bool:
        return self._store.compare_set(key, "", value) == value

    def _void(self) -> bool:
        return self._set_once(f"verdict/{self._number}", _VOID)


class _Entry(Generic[E]):
    """A rank on its way into a new group, in a thread of its own."""

    def __init__(self, enter: Callable[[], E]) -> None:
        self.entered: E | None = None
        self.error: BaseException | None = None
        self.counted = False
        self._abandoned = False
        self._lock = threading.Lock()
        self._enter = enter
        # In the context of the rank, so that what is made knows which rank it is of.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._run,), name="torchestra-entering", daemon=True
        )
        self._thread.start()

    def has_ended(self) -> bool:
        """Whether there is something entered, or an error."""
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


def _those_who_came(text: bytes, size: int, what: str) -> set[int]:
    came: set[int] = set()
    for word in text.split():
        for (rank,) in ranks_in_words(word.removeprefix(b"-"), 1, size, what):
            (came.discard if word.startswith(b"-") else came.add)(rank)
    return came
