"""The attacked process as an attack sees it: its descriptors, its log, and whether it serves."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator

from tools.attacks import Outcome

NOBODY = 65534
MAX_LINES = 10
SERVED_SECONDS = 60.0
"""How long a process of the job may have to wait among strangers, on a busy machine too."""


class Watched:
    """While the block runs: counts this process's descriptors and what its loggers warn of.

    Args:
        outcome: gets what is wrong at the end.
        descriptors: how many more than before there may be at any time that :meth:`look` looks.
    """

    def __init__(self, outcome: Outcome, descriptors: int) -> None:
        self._outcome = outcome
        self._allowed = descriptors
        self._handler = _Counting()

    def __enter__(self) -> Watched:
        self._before = self.most = _descriptors()
        logging.getLogger("torchestra").addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("torchestra").removeHandler(self._handler)
        lines = self._handler.lines
        more = self.most - self._before
        self._outcome.expect(lines <= MAX_LINES, f"{lines} lines in the log, the last: {self._handler.last}")
        self._outcome.expect(more <= self._allowed, f"{more} descriptors taken, {self._allowed} allowed")

    def look(self) -> None:
        """Count the descriptors."""
        self.most = max(self.most, _descriptors())

    def serve(self, seconds: float, ask: Callable[[], object]) -> Iterator[int]:
        """For so many seconds: do what a process of the job would do, and look; numbers of what was done."""
        until = time.monotonic() + seconds
        number = 0
        while number == 0 or time.monotonic() < until:
            began = time.monotonic()
            try:
                ask()
            except Exception as error:
                self._outcome.expect(
                    False, f"the job's own process was not served: {type(error).__name__}: {error}"
                )
                return
            took = time.monotonic() - began
            self._outcome.expect(
                took < SERVED_SECONDS, f"the job's own process was served after {took:.1f} s"
            )
            self.look()
            number += 1
            yield number


class _Counting(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines = 0
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += 1
        self.last = record.getMessage()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def root_only() -> str:
    """For an attack as another user."""
    return "" if os.geteuid() == 0 else "only root can be another user too"
