"""Suspicion timers: measure for how long hosts have been silent, by the time in which somebody looked."""

from __future__ import annotations

from collections.abc import Iterable

from torchestra.system.deadline import RunningClock

PINGS_PER_BOUND = 8
"""How often a host is pinged within the time for which it may be silent."""


class SuspicionTimers:
    """Measure how long each host has been silent, for an observer that looks repeatedly.

    Only the time in which the observer looked counts, however often. An observer that was stopped for a while
    must not take the others for silent: perhaps they were stopped too. Nor does the time count in which it
    looked at other hosts only: it pings those that it looks at, and the others have nothing to answer.

    Args:
        longest: how many seconds count from one look to the next at most.

    Attributes:
        heard: hosts that have been heard from since the last look.
    """

    def __init__(self, longest: float) -> None:
        self._clock = RunningClock(longest)
        self._longest = longest
        self._now = 0.0  # by that clock, when the observer looked last
        self._polled_at: dict[int, float] = {}  # by host: when it looked at that one
        self._since: dict[int, float] = {}
        self._heard_at: dict[int, float] = {}
        self.heard: set[int] = set()

    def record_contact(self, host: int) -> None:
        """Note that something has come from a host."""
        self.heard.add(host)

    def silent_seconds(self, hosts: Iterable[int]) -> dict[int, float]:
        """Look at some hosts; return by host for how many seconds it has been silent.

        That is 0 for a host that was not looked at the last time, give or take one.
        """
        now = self._now = self._clock.elapsed()
        for host in self.heard:
            self._since[host] = self._heard_at[host] = now
        self.heard.clear()
        silent = {}
        for host in hosts:
            if host not in self._polled_at or now - self._polled_at[host] > self._longest:
                self._since[host] = now
            self._polled_at[host] = now
            silent[host] = now - self._since[host]
        return silent

    def heard_lately(self, within_s: float) -> set[int]:
        """Return the hosts heard from within ``within_s`` seconds before the last look, or since."""
        return self.heard | {host for host, at in self._heard_at.items() if self._now - at < within_s}
