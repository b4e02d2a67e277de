"""Phases of a rank's membership in its job, reported to whoever started the rank.

Ranks of ``torchestra run`` report to their launcher (launcher/rank_process.py), which replaces those that
die, and prints how long each phase took. In any other process a report does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Phase = Literal["joined", "shrunk", "grown", "trains"]
"""A phase that a rank has reached.

joined: it is in the job's default group, for the first time.
shrunk: its default group has lost ranks; it goes on in the new one.
grown: its default group has new ranks; it goes on in the new one.
trains: it has done the first step since the last of these.
"""

_reporter: Callable[[Phase], object] | None = None


def report_to(reporter: Callable[[Phase], object]) -> None:
    """Have a function called with every phase that this process reports; it must not raise."""
    global _reporter
    _reporter = reporter


def report(phase: Phase) -> None:
    """Report that the calling rank has reached a phase."""
    if _reporter is not None:
        _reporter(phase)
