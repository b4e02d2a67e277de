"""Time limits in which the time that this process was stopped does not count.

A process that is stopped (Ctrl-Z, a debugger, a frozen container, a suspended machine) would find its time
over when it goes on, although its peers were stopped as well, or have come meanwhile. A wait looks at its
clock again and again; when much more time has passed since the last look than lies between two looks, the
process was not waiting but stopped, or busy. So a clock advances by one *step* at most between two looks.

A wait must look at its clock at least once in each step, else the wait lasts longer than its limit: sleep for
``min(deadline.remaining(), interval)``, or loop over :meth:`Deadline.polls`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

_LONGEST_STEP_S = 0.5
_SHORTEST_STEP_S = 0.1
_GROWTH = 1.5


class RunningClock:
    """Counts the seconds in which this process has run, from 0 on.

    Several threads may look at it: each look counts what has passed since the last one of any thread.

    Args:
        longest_step_s: how much may count from one look to the next.
    """

    __slots__ = ("_counted", "_last_read", "_longest_step_s")

    def __init__(self, longest_step_s: float = _LONGEST_STEP_S) -> None:
        self._longest_step_s = longest_step_s
        self._last_read = time.monotonic()
        self._counted = 0.0

    def elapsed(self) -> float:
        """Look at the clock, and return the seconds counted since it was made."""
        now = time.monotonic()
        self._counted += min(now - self._last_read, self._longest_step_s)
        self._last_read = now
        return self._counted


class Deadline(RunningClock):
    """A clock with a limit, which begins to run now.

    Args:
        timeout_s: after how many seconds it expires; never by default.
        longest_step_s: how much may count from one look to the next; by default half a second, or a quarter
            of the limit where that is less.
    """

    __slots__ = ("timeout_s",)

    def __init__(self, timeout_s: float = float("inf"), longest_step_s: float | None = None) -> None:
        if longest_step_s is None:
            longest_step_s = _LONGEST_STEP_S
            if timeout_s < 4 * _LONGEST_STEP_S:
                longest_step_s = max(_SHORTEST_STEP_S, timeout_s / 4)
        super().__init__(longest_step_s)
        self.timeout_s = timeout_s

    def remaining(self) -> float:
        """Return the seconds left, at least 0."""
        return max(0.0, self.timeout_s - self.elapsed())

    def expired(self) -> bool:
        """Return whether no time is left."""
        return self.elapsed() >= self.timeout_s

    def polls(self, interval_s: float, longest_interval_s: float | None = None) -> Iterator[None]:
        """Yield at once, then after each pause, and a last time when the deadline has expired.

        Args:
            interval_s: the first pause.
            longest_interval_s: the longest pause, up to which they grow; by default they do not.
        """
        longest = max(interval_s, longest_interval_s or 0.0)
        while not self.expired():
            yield
            time.sleep(min(interval_s, self.remaining()))
            interval_s = min(interval_s * _GROWTH, longest)
        yield
