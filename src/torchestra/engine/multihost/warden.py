"""Whether the other hosts live, and what their ranks have to say to all.

The rank at place 0 of each host runs two sleeping threads for each group. Through the group's store it says
every so often that its host lives and which of its ranks have died or left, and hears the same of the others.
A host that has said nothing for the *heartbeat bound* (TORCHESTRA_HEARTBEAT, default 10 s) is given up: the
group is aborted on all hosts that are left. So it is if the store cannot be reached for so long: then this
host is the one cut off, or the store's host is gone.

News are for all, come at once, and are numbered; any rank may tell some::

    beat/H        what host H says: a count, the ranks that have died, those that have left
    news          how many news there are
    news/N        {"abort": ...} or {"ask": place}
    left/R        rank R has left the group
    answer/N/H    what host H answers to news N: where its ranks stand
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torchestra.engine.callsites import call_site
from torchestra.engine.member import Member
from torchestra.engine.multihost.hosts import Hosts
from torchestra.errors import DistError, InvalidArgumentError, StoreTimeoutError
from torchestra.store import Store

__all__ = ["HEARTBEAT_VARIABLE", "Outlook", "Warden", "heartbeat_bound"]

HEARTBEAT_VARIABLE = "TORCHESTRA_HEARTBEAT"
"""How many seconds a host may be silent before it is given up; the same for all ranks."""

_DEFAULT_BOUND = 10.0
_BEATS_PER_BOUND = 8
_ANSWER_SECONDS = 3.0
_FATE_SECONDS = 1.0
_TELL_SECONDS = 1.0


def heartbeat_bound() -> float:
    """How long a host may be silent, in seconds."""
    given = os.environ.get(HEARTBEAT_VARIABLE)
    try:
        seconds = _DEFAULT_BOUND if not given else float(given)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise InvalidArgumentError(f"{HEARTBEAT_VARIABLE} must be a number of seconds, got {given!r}")
    return seconds


class Outlook:
    """What a rank can learn of the other hosts, and tell them.

    Args:
        store: one that only the ranks of this group, and only for this purpose, use.
        hosts: of the group.
        host: which this rank is on.
        member: this rank's place among those of its host.
    """

    def __init__(self, store: Store, hosts: Hosts, host: int, member: Member) -> None:
        self.hosts = hosts
        self.host = host
        self.bound = heartbeat_bound()
        self._member = member
        self._store = store.clone()
        self._store.set_timeout(self.bound)
        self._fates: dict[int, tuple[float, Sequence[int], Sequence[int]]] = {}

    def tell_aborted(self, why: str, failed: tuple[int, ...], standing: str) -> None:
        """Have the ranks of all hosts know that the group can be used no more."""
        news = {"abort": [why, list(failed), standing], "host": self.host}
        _try_for(_TELL_SECONDS, lambda: self._publish(news))

    def fate(self, rank: int) -> str | None:
        """What has become of a rank elsewhere: ``"died"``, ``"destroyed the group"``, or None if it is there.

        As far as its host has said by a second ago.
        """
        host = self.hosts.host_of[rank]
        looked, dead, left = self._fates.get(host, (0.0, (), ()))
        if time.monotonic() - looked > _FATE_SECONDS:
            with contextlib.suppress(DistError, OSError):
                if self._store.check([f"beat/{host}"]):
                    _, dead, left = json.loads(self._store.get(f"beat/{host}"))
                if self._store.check([f"left/{rank}"]):
                    left = [*left, rank]
            self._fates[host] = (time.monotonic(), dead, left)
        return "died" if rank in dead else "destroyed the group" if rank in left else None

    def leave(self) -> None:
        """Say that this rank has left the group."""
        _try_for(_TELL_SECONDS, self._say_left)

    def _say_left(self) -> None:
        self._store.set(f"left/{self._member.own_number}", b"")

    def _publish(self, news: dict[str, Any]) -> int:
        """Tell some news; their number, or 0 if nobody can be told."""
        try:
            number = self._store.add("news", 1)
            self._store.set(f"news/{number}", json.dumps(news))
        except (DistError, OSError):
            return 0
        return number

    def ask_where_they_are(self) -> str:
        """A line for each rank of the other hosts: where it stands. Takes up to some seconds."""
        told: list[str] = []
        _try_for(min(self.bound, _ANSWER_SECONDS) + 0.5, lambda: told.append(self._ask_all()))
        answers = told[0] if told else "\nthe group's store does not answer"
        return f"{answers}\nhost {self.hosts.names[self.host]}:"

    def _ask_all(self) -> str:
        number = self._publish({"ask": self.host})
        others = [host for host in range(len(self.hosts)) if host != self.host]
        keys = {host: f"answer/{number}/{host}" for host in others}
        deadline = time.monotonic() + min(self.bound, _ANSWER_SECONDS)
        lines = []
        for host in others:
            answer = None
            if number:
                with contextlib.suppress(DistError, OSError):
                    self._store.wait([keys[host]], max(0.01, deadline - time.monotonic()))
                    answer = self._store.get(keys[host]).decode()
            named = f"host {self.hosts.names[host]}"
            lines.append(f"\n{named}:{answer}" if answer is not None else f"\n{named} does not answer")
        return "".join(lines)


class Warden(Outlook):
    """The outlook of the rank at place 0, with the threads. Takes what :class:`Outlook` does.

    Attributes:
        dead, left: ranks of other hosts, in the group's numbering, that have died, or left the group.
        silent: hosts that have been given up.
    """

    def __init__(self, store: Store, hosts: Hosts, host: int, member: Member) -> None:
        super().__init__(store, hosts, host, member)
        self.dead: set[int] = set()
        self.left: set[int] = set()
        self.silent: set[int] = set()
        self._interval = self.bound / _BEATS_PER_BOUND
        self._closed = threading.Event()
        self._count = 0
        self._heard: dict[int, tuple[bytes, int]] = {}  # by host: the last beat, and for how many of ours
        self._unreached = 0
        name = f"torchestra-warden-{member.name}-{host}"
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

    def leave(self) -> None:
        self._closed.set()
        super().leave()

    def _run(self) -> None:
        seen = 0
        while not self._closed.is_set():
            try:
                self._beat()
                self._listen()
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
            if self._unreached >= _BEATS_PER_BOUND:
                self._member.abort(
                    f"host {self.hosts.names[self.host]} has not reached the group's store for"
                    f" {self.bound:g} s: it is cut off, or the host of the store is gone",
                    self._elsewhere(),
                )
                return

    def _beat(self) -> None:
        member = self._member
        dead = member.peers.dead() if member.peers is not None else ()
        left = [place for place in range(member.size) if member.has_left(place)]
        self._count += 1
        said = [self._count, member.called(set(dead) - set(left)), member.called(left)]
        self._store.set(f"beat/{self.host}", json.dumps(said))

    def _listen(self) -> None:
        """Hear the others' beats; those that have not begun are not waited for."""
        others = [host for host in range(len(self.hosts)) if host != self.host]
        keys = [f"beat/{host}" for host in others]
        if len(self._heard) < len(others) and not self._store.check(keys):
            return
        for host, beat in zip(others, self._store.multi_get(keys), strict=True):
            before, times = self._heard.get(host, (b"", 0))
            _, dead, left = json.loads(beat)
            self.dead.update(dead)
            self.left.update(left)
            if beat != before or self.hosts.members[host][0] in left:  # its warden has left
                self._heard[host] = (beat, 0)
                continue
            self._heard[host] = (beat, times + 1)
            if times + 1 >= _BEATS_PER_BOUND - 1 and host not in self.silent:
                self.silent.add(host)
                gone = self.hosts.members[host]
                self._member.abort(
                    f"host {self.hosts.names[host]} with {_ranks(gone)} has been silent for {self.bound:g} s:"
                    " it is down, or the network to it is",
                    gone,
                )

    def _await_news(self, seen: int) -> int:
        """Sleep until there are news, or for so long as may lie between two beats; how many were heard."""
        key = f"news/{seen + 1}"
        try:
            self._store.wait([key], self._interval)
        except StoreTimeoutError:
            return seen
        news = json.loads(self._store.get(key))
        if "abort" in news and news["host"] != self.host:
            why, failed, standing = news["abort"]
            self._member.abort(why, tuple(failed), lambda: standing)
        elif "ask" in news and news["ask"] != self.host:
            where = call_site(self._member.program.ident)
            standing = self._member.report(range(self._member.size), where)
            self._store.set(f"answer/{seen + 1}/{self.host}", standing)
        return seen + 1

    def _elsewhere(self) -> tuple[int, ...]:
        here = set(self.hosts.members[self.host])
        return tuple(rank for rank in range(len(self.hosts.host_of)) if rank not in here)


def _try_for(seconds: float, what: Callable[[], object]) -> None:
    """Try to tell the store something; go on after so long, though a store that is gone may not say so."""

    def run() -> None:
        with contextlib.suppress(DistError, OSError):
            what()

    thread = threading.Thread(target=run, name="torchestra-telling", daemon=True)
    thread.start()
    thread.join(seconds)


def _ranks(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
