"""Suspicion timers: measure for how long hosts have been silent, by the time in which somebody looked."""

from __future__ import annotations

from collections.abc import Iterable

from torchestra.system.deadline import RunningClock

PINGS_PER_BOUND = 8
"""How often a host is pinged within the time for which it may be silent."""


class SuspicionTimers:
    """Measure how long each host has been silent, for an observer that looks repeatedly.

    Only the time in which the observer looked counts, however often. An observer that was stopped for a while
    must not take the others for silent: perhaps they were stopped too.

    Args:
        longest: how many seconds count from one look to the next at most.

    Attributes:
        heard: hosts that have been heard from since the last look.
    """

    def __init__(self, longest: float) -> None:
        self._clock = RunningClock(longest)
        self._since: dict[int, float] = {}
        self.heard: set[int] = set()

    def hear(self, host: int) -> None:
        """Note that something has come from a host."""
        self.heard.add(host)

    def unheard(self, hosts: Iterable[int]) -> dict[int, float]:
        """Look, and return by host for how many seconds it has been silent; 0 if asked for the first time."""
        now = self._clock.elapsed()
        for host in self.heard:
            self._since[host] = now
        self.heard.clear()
        return {host: now - self._since.setdefault(host, now) for host in hosts}

    def heard_lately(self, within_s: float) -> set[int]:
        """Return the hosts heard from within ``within_s`` seconds before the last look, or since."""
        now = max(self._since.values(), default=0.0)
        return self.heard | {host for host, since in self._since.items() if now - since < within_s}
