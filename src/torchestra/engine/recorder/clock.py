"""The clock of the flight recorder: one that all ranks of a host share, and that costs some nanoseconds.

Times are *ticks*. Where the processor has a counter that runs evenly and alike on all cores, they are that
counter's, which is read within 10 ns; elsewhere they are nanoseconds of CLOCK_MONOTONIC (24 ns). Who makes an
arena decides, and notes one moment by both clocks; a reader takes a second one, and the line through the two
turns ticks into seconds of ``time.monotonic()``.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchestra.engine import layout as at
from torchestra.engine.native.atomics import clock_gettime, counter, kernel, load

COUNTER = 1
NANOSECONDS = 2

_CLOCK_MONOTONIC = 1
_CLOCK_MONOTONIC_COARSE = 6
_CLOCK_SOURCES = Path("/sys/devices/system/clocksource/clocksource0/available_clocksource")
CLOCK, TIMESPEC = at.CLOCK, at.TIMESPEC


@kernel
def now(context):
    """Return the time in ticks, by the clock of the context."""
    return read_clock(load(context + CLOCK), context + TIMESPEC)


@kernel
def read_clock(clock, scratch):
    """Return the time in ticks by COUNTER or NANOSECONDS; ``scratch`` is the address of two words."""
    if clock == COUNTER:
        return counter()
    clock_gettime(_CLOCK_MONOTONIC, scratch)
    return load(scratch) * 1_000_000_000 + load(scratch + 8)


@kernel
def read_coarse_clock(scratch):
    """Return the time in nanoseconds, within 5 ns, but some milliseconds old.

    ``scratch`` is the address of two words.
    """
    clock_gettime(_CLOCK_MONOTONIC_COARSE, scratch)
    return load(scratch) * 1_000_000_000 + load(scratch + 8)


def best_clock() -> int:
    """COUNTER where it can be relied on, else NANOSECONDS.

    Linux offers the counter of an x86 as a clock source only while it finds it in step on all cores; that of
    64-bit ARM is so by its architecture.
    """
    if platform.machine() in ("aarch64", "arm64"):
        return COUNTER
    try:
        return COUNTER if "tsc" in _CLOCK_SOURCES.read_text().split() else NANOSECONDS
    except OSError:
        return NANOSECONDS


@dataclass(frozen=True)
class Moment:
    """One moment by two clocks: ticks, and nanoseconds of CLOCK_MONOTONIC."""

    ticks: int
    nanoseconds: int

    @classmethod
    def now(cls, clock: int) -> Moment:
        """This moment, to within a microsecond: the reading with the least between the two clocks."""
        scratch = np.zeros(2, dtype=np.int64)
        readings = []
        for _ in range(5):
            before = time.monotonic_ns()
            ticks = read_clock(clock, scratch.ctypes.data)
            after = time.monotonic_ns()
            readings.append((after - before, cls(ticks, (before + after) // 2)))
        return min(readings, key=lambda reading: reading[0])[1]


class TickScale:
    """Turns ticks into seconds of ``time.monotonic()``.

    Args:
        early, late: two moments of one clock.
    """

    def __init__(self, early: Moment, late: Moment) -> None:
        self._early = early
        passed = late.ticks - early.ticks
        self.seconds_per_tick = (late.nanoseconds - early.nanoseconds) / passed / 1e9 if passed > 0 else 1e-9
        self.now = late.nanoseconds / 1e9

    def time(self, ticks: int) -> float:
        """Return the moment, as ``time.monotonic()`` would have told it."""
        return self._early.nanoseconds / 1e9 + (ticks - self._early.ticks) * self.seconds_per_tick

    def duration(self, ticks: int) -> float:
        """Return a number of ticks in seconds."""
        return ticks * self.seconds_per_tick
