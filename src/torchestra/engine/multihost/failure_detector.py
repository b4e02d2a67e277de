"""Whether the other hosts live, and what their ranks have to say to all.

The rank at place 0 of each host runs two sleeping threads for each group. Through the group's store it says
every so often that its host lives and which of its ranks have died or left. The *head*, the first host whose
monitor has not left the group, hears that of all others, and all others hear the head, so that a beat costs
O(hosts) in all; who has died or left, the head tells as news.
A host that has said nothing for the *heartbeat bound* (TORCHESTRA_HEARTBEAT, default 10 s) is given up: the
group is aborted on all hosts that are left. So it is if the store cannot be reached for so long: then this
host is the one cut off, or the store's host is gone.

News are for all, come at once, and are numbered; any rank may tell some. Who tells that the group is over
waits until the other hosts have heard it, or for a few seconds: its process may end next, and the store with
it, and they would never know why::

    beat/H        what host H says: a count, the ranks that have died, those that have left
    silent        "H:count ..." of hosts that were given up, with the count that was last heard
    news          how many news there are
    news/N        {"abort": ...}, {"ask": host, ...} or {"gone": [ranks that have died, that have left]}
    heard/H       host H knows that the group is over, or has left it
    left/R        rank R has left the group
    answer/N/H    what host H answers to news N: who has not begun the operation, where its ranks stand; or to
                  {"recount": host}, what they did last (remote_records.py)
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torchestra.engine import layout as at
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.multihost.hosts import Hosts
from torchestra.engine.multihost.peer_values import UNREADABLE, ranks_in, read_beat
from torchestra.engine.multihost.remote_records import Answer, answer, understand
from torchestra.engine.multihost.silence import BEATS_PER_BOUND, Watch
from torchestra.engine.recorder.callsites import call_site
from torchestra.engine.recorder.flight_record import read_flight_record
from torchestra.errors import DistError, RankFailedError, StoreTimeoutError
from torchestra.store import PrefixStore, Store
from torchestra.store.authenticated_values import UnauthenticatedValueError
from torchestra.store.rate_limited import RateLimitedWarnings

__all__ = ["FailureDetector", "HeartbeatMonitor"]

_UNREADABLE = (*UNREADABLE, zlib.error)

_ANSWER_SECONDS = 3.0
_FATE_SECONDS = 1.0
_TELL_SECONDS = 1.0
_HEARD_SECONDS = 3.0

warnings = RateLimitedWarnings(logging.getLogger(__name__))


class FailureDetector:
    """What a rank can learn of the other hosts, and tell them.

    Args:
        store: one that only the ranks of this group, and only for this purpose, use.
        hosts: of the group.
        host: which this rank is on.
        member: this rank's place among those of its host.
        bound: the heartbeat bound.

    Attributes:
        store, hosts, host, bound: those.
        begun: how many operations of the group this rank has begun; set by who counts them.
    """

    def __init__(self, store: Store, hosts: Hosts, host: int, member: RankContext, bound: float) -> None:
        self.hosts = hosts
        self.host = host
        self.bound = bound
        self.store = store
        self.begun: Callable[[], int] = lambda: 0
        self._member = member
        self._store = store.clone()
        self._store.set_timeout(self.bound)
        self._fates: dict[int, tuple[float, Sequence[int], Sequence[int]]] = {}
        self._interval = self.bound / BEATS_PER_BOUND
        self._closed = threading.Event()
        self._count = member.rank << 32  # no other rank of the host comes to the same
        self._stand_in: threading.Thread | None = None
        self._heard_abort = False
        self._process = os.getpid()
        _all.add(self)

    def tell_aborted(self, why: str, failed: tuple[int, ...], standing: str) -> None:
        """Have the ranks of all hosts know that the group can be used no more."""
        self.stand_in_if_needed()
        if not self._heard_abort:  # else it is what another host has told all
            news = {"abort": [why, list(failed), standing], "host": self.host}
            _try_for(_TELL_SECONDS, lambda: self._publish(news))
            self.await_heard()

    def await_heard(self, seconds: float = _HEARD_SECONDS) -> None:
        """If the group is over: wait until the other hosts that live know it, so many seconds at most."""
        if os.getpid() == self._process and self._member.is_aborted:
            _try_for(seconds, lambda: self._await_heard(time.monotonic() + seconds))

    def _await_heard(self, deadline: float) -> None:
        error = self._member.aborted()
        failed = error.ranks if isinstance(error, RankFailedError) else ()
        while (left := deadline - time.monotonic()) > 0:
            wardens = ((host, self.hosts.on(host)[0]) for host in range(len(self.hosts)))
            keys = [
                f"heard/{host}"
                for host, monitor in wardens
                if not (host == self.host or monitor in failed or self._is_deaf(host) or self.fate(monitor))
            ]
            with contextlib.suppress(StoreTimeoutError):
                self._store.wait(keys, min(left, _FATE_SECONDS))
                return

    def _say_heard(self) -> None:
        self._store.set(f"heard/{self.host}", b"")

    def stand_in_if_needed(self) -> None:
        """Beat for this host if its monitor has died, for as long as this rank lives."""
        dead = self._member.peers.dead() if self._member.peers is not None else ()
        if self._member.rank != 0 and 0 in dead and self._stand_in is None:
            name = f"torchestra-monitor-{self._member.name}-{self.host}"
            self._stand_in = threading.Thread(target=self._beat_on, name=name, daemon=True)
            self._stand_in.start()

    def _beat_on(self) -> None:
        while True:
            with contextlib.suppress(DistError, OSError):
                self._beat()
            if self._closed.wait(self._interval):
                return

    def _beat(self) -> None:
        member = self._member
        dead = member.peers.dead() if member.peers is not None else ()
        left = [place for place in range(member.size) if member.has_left(place)]
        self._count += 1
        said = [self._count, member.to_group_ranks(set(dead) - set(left)), member.to_group_ranks(left)]
        self._store.set(f"beat/{self.host}", json.dumps(said))

    def fate(self, rank: int) -> str | None:
        """What has become of a rank elsewhere: ``"died"``, ``"destroyed the group"``, or None if it is there.

        As far as its host has said by a second ago.
        """
        host = self.hosts.host_of[rank]
        looked, dead, left = self._fates.get(host, (0.0, (), ()))
        if time.monotonic() - looked > _FATE_SECONDS:
            with contextlib.suppress(DistError, OSError, *_UNREADABLE):
                if self._store.check([f"beat/{host}"]):
                    _, dead, left = read_beat(self._store.get(f"beat/{host}"), self.hosts, host)
                if self._store.check([f"left/{rank}"]):
                    left = (*left, rank)
            self._fates[host] = (time.monotonic(), dead, left)
        return "died" if rank in dead else "destroyed the group" if rank in left else None

    @property
    def has_left(self) -> bool:
        return self._closed.is_set()

    def leave(self) -> None:
        """Say that this rank has left the group."""
        if self.has_left:
            return
        self._closed.set()
        _try_for(_TELL_SECONDS, self._say_left)
        self.await_heard()

    def _say_left(self) -> None:
        self._store.set(f"left/{self._member.group_rank}", b"")

    def _publish(self, news: dict[str, Any]) -> int:
        """Tell some news; their number, or 0 if nobody can be told."""
        try:
            number = self._store.add("news", 1)
            self._store.set(f"news/{number}", json.dumps(news))
        except (DistError, OSError):
            return 0
        return number

    def ask_where_they_are(self) -> str:
        """A line for each other host and each of its ranks: where it stands. Takes up to some seconds."""
        return self.ask_who_is_missing(0)[1]

    def ask_who_is_missing(self, number: int) -> tuple[tuple[int, ...], str]:
        """The ranks elsewhere that have not begun the group's operation of a number, and where all stand.

        Of hosts that do not answer nobody is named. Takes up to some seconds.
        """
        told: list[tuple[tuple[int, ...], str]] = []
        seconds = min(self.bound, _ANSWER_SECONDS) + 0.5
        _try_for(seconds, lambda: told.append(self._ask_all(number)))
        missing, answers = told[0] if told else ((), "\nthe group's store does not answer")
        return missing, answers

    def ask_what_they_did(self) -> dict[int, Answer]:
        """What the ranks of other hosts did last, by host; takes some seconds if one does not answer."""
        told: dict[int, Answer] = {}
        seconds = min(self.bound, _ANSWER_SECONDS)
        _try_for(seconds + 0.5, lambda: self._hear_what_they_did(told, time.monotonic() + seconds))
        return dict(told)

    def _hear_what_they_did(self, told: dict[int, Answer], deadline: float) -> None:
        asked = time.monotonic()
        number = self._publish({"recount": self.host})
        others = [host for host in range(len(self.hosts)) if host != self.host and not self._is_deaf(host)]
        for host in others if number else ():
            key = f"answer/{number}/{host}"
            with contextlib.suppress(DistError, OSError, *_UNREADABLE):
                self._store.wait([key], max(0.01, deadline - time.monotonic()))
                said, got = self._store.get(key), time.monotonic()
                told[host] = understand(said, asked, got)
                with contextlib.suppress(NotImplementedError):
                    self._store.delete_key(key)

    def _is_deaf(self, host: int) -> bool:
        """Whether a host is known to have nobody any more who answers for it."""
        return False

    def _ask_all(self, operation: int) -> tuple[tuple[int, ...], str]:
        number = self._publish({"ask": self.host, "operation": operation})
        others = [host for host in range(len(self.hosts)) if host != self.host]
        keys = {host: f"answer/{number}/{host}" for host in others if not self._is_deaf(host)}
        deadline = time.monotonic() + min(self.bound, _ANSWER_SECONDS)
        lines: list[str] = []
        missing: list[int] = []
        for host in others:
            line = f"\nhost {self.hosts.names[host]} does not answer"
            if number and host in keys:
                with contextlib.suppress(DistError, OSError, *_UNREADABLE):
                    self._store.wait([keys[host]], max(0.01, deadline - time.monotonic()))
                    absent, standing = json.loads(self._store.get(keys[host]))
                    absent = ranks_in(absent, self.hosts.on(host))
                    line = _text(standing)
                    missing += absent
            lines.append(line)
        return tuple(missing), "".join(lines)


class HeartbeatMonitor(FailureDetector):
    """The detector of the rank at place 0, with the threads. Takes what :class:`FailureDetector` does.

    Attributes:
        dead, left: ranks of other hosts, in the group's numbering, that have died, or left the group.
        silent: hosts that have been given up.
    """

    def __init__(self, store: Store, hosts: Hosts, host: int, member: RankContext, bound: float) -> None:
        super().__init__(store, hosts, host, member, bound)
        self.dead: set[int] = set()
        self.left: set[int] = set()
        self.silent: set[int] = set()
        self._head = 0
        self._told_gone: tuple[set[int], set[int]] = set(), set()
        self._watch = Watch(self._interval)
        self._unreached = 0
        name = f"torchestra-monitor-{member.name}-{host}"
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True) for run in (self._run, self._count_silence)
        ]

    def start(self) -> None:
        """Begin, once the ranks of this host have met."""
        self._beat()
        for thread in self._threads:
            thread.start()

    def _say_left(self) -> None:
        super()._say_left()
        self._beat()
        self._say_heard()

    def _is_deaf(self, host: int) -> bool:
        return host in self.silent or self.hosts.on(host)[0] in self.dead | self.left

    def _run(self) -> None:
        seen = 0
        while not self._closed.is_set():
            try:
                self._beat()
                self.listen()
                seen = self._await_news(seen)
                self._unreached = 0
            except (DistError, OSError):
                self._closed.wait(self._interval)

    def _count_silence(self) -> None:
        """Give up if the store is not reached: a request of its own may wait for an answer for long.

        What is counted is how often this thread has slept, so that a process that was stopped meanwhile
        does not take that for silence.
        """
        while not self._closed.wait(self._interval):
            self._unreached += 1
            if self._unreached >= BEATS_PER_BOUND:
                self._member.abort(
                    f"host {self.hosts.names[self.host]} has not reached the group's store,"
                    f" {_innermost(self.store)}, for {self.bound:g} s: it is cut off, or the store's process"
                    " or host is gone",
                    self._elsewhere(),
                )
                return

    def listen(self) -> None:
        """Hear the beats of others; those that have not begun are not waited for."""
        is_head = self._head == self.host
        others = [host for host in range(len(self.hosts)) if host != self.host] if is_head else [self._head]
        keys = [f"beat/{host}" for host in others]
        if not self._watch.knows(others) and not self._store.check(keys):
            return
        beats = dict(zip(others, self._store.multi_get(keys), strict=True))
        for host, unchanged in self._watch.unchanged(beats).items():
            self._hear(host, beats[host], unchanged)
        while self._head < self.host and self.hosts.on(self._head)[0] in self.left:
            self._head += 1
        if is_head and (self.dead, self.left) != self._told_gone:
            self._told_gone = set(self.dead), set(self.left)
            self._publish({"gone": [sorted(self.dead), sorted(self.left)], "host": self.host})

    def _hear(self, host: int, beat: bytes, unchanged: float) -> None:
        """Take in what a host has said, which has been that for so many seconds."""
        count, dead, left = read_beat(beat, self.hosts, host)
        self.dead.update(dead)
        self.left.update(left)
        ranks = self.hosts.on(host)
        warden_has_left = ranks[0] in self.left
        # This was heard up to an interval after it was said, and the next look may be as much too late.
        if unchanged > self.bound - 1.5 * self._interval and not warden_has_left and host not in self.silent:
            self.silent.add(host)
            self._store.append("silent", f"{host}:{count} ")
            self._abort_aside(
                f"host {self.hosts.names[host]} with {_ranks(ranks)} has been silent for {self.bound:g} s:"
                " it is down, or the network to it is",
                ranks,
            )

    def _abort_aside(self, why: str, failed: tuple[int, ...], standing: str = "") -> None:
        """Abort the group, but beat on meanwhile, and answer what others ask.

        It may take seconds: until another rank of this host has said why it aborts the group, which may ask
        the other hosts first, and until these have heard it.
        """
        _try_for(self._interval, lambda: self._member.abort(why, failed, lambda: standing))

    def _await_news(self, seen: int) -> int:
        """Sleep until there are news, or for so long as may lie between two beats; how many were heard."""
        key = f"news/{seen + 1}"
        try:
            self._store.wait([key], self._interval)
        except StoreTimeoutError:
            return seen
        heard = time.monotonic()
        try:
            self._take_news(json.loads(self._store.get(key)), seen + 1, heard)
        except (UnauthenticatedValueError, *_UNREADABLE) as error:
            warnings.warn("host %s dropped news that nobody can have told: %r", self.host, error)
        return seen + 1

    def _take_news(self, news: dict[str, Any], number: int, heard: float) -> None:
        if "abort" in news and news["host"] != self.host:
            why, failed, standing = news["abort"]
            abort = _text(why), ranks_in(failed, range(self.hosts.size)), _text(standing)
            self._say_heard()
            self._heard_abort = True
            self._abort_aside(*abort)
        elif "gone" in news and news["host"] != self.host:
            dead, left = (ranks_in(gone, range(self.hosts.size)) for gone in news["gone"])
            here = self.hosts.on(self.host)
            self.dead.update(set(dead).difference(here))
            self.left.update(set(left).difference(here))
        elif "ask" in news and news["ask"] != self.host:
            where = call_site(self._member.program.ident)
            standing = self._member.report(range(self._member.size), where)
            told = json.dumps([self._missing_in(news["operation"]), standing])
            self._store.set(f"answer/{number}/{self.host}", told)
        elif "recount" in news and news["recount"] != self.host:
            record = read_flight_record(self._member.arena)
            self._store.set(f"answer/{number}/{self.host}", answer(record, heard))

    def _missing_in(self, operation: int) -> Sequence[int]:
        """The ranks of this host that have not begun an operation of the group.

        An operation is made of the same steps within the host for all of its ranks; so if some are behind, it
        is these, and else all of them, if the monitor's has not begun it.
        """
        member = self._member
        words = (member.arena.word(member.arena.control(place) + at.PROGRESS) for place in range(member.size))
        steps = [word >> at.STEP_BITS for word in words]
        behind = [place for place, number in enumerate(steps) if number < max(steps)]
        if behind or self.begun() >= operation:
            return member.to_group_ranks(behind)
        return self.hosts.on(self.host)

    def _elsewhere(self) -> tuple[int, ...]:
        here = set(self.hosts.members[self.host])
        return tuple(rank for rank in range(len(self.hosts.host_of)) if rank not in here)


_all: weakref.WeakSet[FailureDetector] = weakref.WeakSet()


def _await_heard_at_exit() -> None:
    """For ranks that did not tell: the rank that did may be another of this host, and the store be here."""
    deadline = time.monotonic() + _HEARD_SECONDS
    for detector in tuple(_all):
        if not detector.has_left:
            detector.await_heard(max(0.0, deadline - time.monotonic()))


atexit.register(_await_heard_at_exit)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not a text: {value!r:.100}")
    return value


def _innermost(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _try_for(seconds: float, what: Callable[[], object]) -> None:
    """Try to tell the store something; go on after so long, though a store that is gone may not say so."""

    def run() -> None:
        with contextlib.suppress(DistError, OSError):
            what()

    thread = threading.Thread(target=run, name="torchestra-telling", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is about to end, and begins no thread any more
        run()
        return
    thread.join(seconds)


def _ranks(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
