"""For how long a host has said nothing, and which hosts are gone by that."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping

from torchestra.engine.multihost.hosts import Hosts
from torchestra.engine.multihost.peer_values import read_beat
from torchestra.store import Store
from torchestra.system.deadline import RunningClock

__all__ = ["BEATS_PER_BOUND", "Silence", "Watch"]

BEATS_PER_BOUND = 8
"""How often a host says that it lives, within the time for which it may be silent."""


class Watch:
    """For how long each host's beat has been the same, for one who looks again and again.

    What counts is the time in which somebody looked, however often. Who was stopped for a while must not take
    the others for silent: perhaps they were stopped too.

    Args:
        interval: about how many seconds are between two looks; more than twice as many do not count.
    """

    def __init__(self, interval: float) -> None:
        self._clock = RunningClock(2 * interval)
        self._heard: dict[int, tuple[bytes, float]] = {}  # by host: its beat, and since when by that clock

    def knows(self, hosts: Iterable[int]) -> bool:
        """Whether beats of all these hosts have been seen."""
        return self._heard.keys() >= set(hosts)

    def unchanged(self, beats: Mapping[int, bytes]) -> dict[int, float]:
        """Look at hosts' beats: for how many seconds, by host, each has been what it is."""
        now = self._clock.elapsed()
        for host, beat in beats.items():
            if host not in self._heard or self._heard[host][0] != beat:
                self._heard[host] = beat, now
        return {host: now - self._heard[host][1] for host in beats}


class Silence:
    """Which hosts of a group are gone, for one who looks again and again.

    Args:
        store: what the wardens of the group write to.
        hosts: of the group.
        host: which that one is on.
        bound: the heartbeat bound.
    """

    def __init__(self, store: Store, hosts: Hosts, host: int, bound: float) -> None:
        self._bound = bound
        self._hosts = hosts
        self._others = [each for each in range(len(hosts)) if each != host]
        self._store = store.clone()
        self._store.set_timeout(self._bound)
        self._store.compare_set("silent", "", "")
        self._looked = -math.inf
        self._watch = Watch(self._bound / BEATS_PER_BOUND)
        self._gone: frozenset[int] = frozenset()

    def gone(self) -> frozenset[int]:
        """The ranks that have died or left by what their wardens say, and those of silent hosts.

        As far as was known an eighth of the heartbeat bound ago.
        """
        now, pause = time.monotonic(), self._bound / BEATS_PER_BOUND
        if now - self._looked < pause:
            return self._gone
        self._looked = now
        given_up, *beats = self._store.multi_get(["silent", *(f"beat/{host}" for host in self._others)])
        said = dict(zip(self._others, beats, strict=True))
        gone: set[int] = set()
        for host, unchanged in self._watch.unchanged(said).items():
            beat = read_beat(said[host], self._hosts, host)
            gone.update(beat.dead, beat.left)
            silent = f"{host}:{beat.number}".encode() in given_up.split()
            if silent or unchanged > self._bound:
                gone.update(self._hosts.on(host))
        self._gone = frozenset(gone)
        return self._gone
