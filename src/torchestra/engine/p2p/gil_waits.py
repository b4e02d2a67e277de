"""How long threads that receive wait for the GIL: from when a message has come to when Python goes on."""

from __future__ import annotations

import time
from typing import Any

_NS_PER_US = 1e3


class GilWaits:
    """The waits of an endpoint's receiving threads for the GIL, measured while that is enabled.

    A receiving thread sleeps in a kernel, without the GIL. While this is enabled the kernel writes the time
    into a word before it returns, and Python, which has the GIL then, compares that with its own clock.

    Args:
        words: of the endpoint's private state; None if there is no endpoint, and nothing to measure.
        word: which of them the kernel writes to, unless it is 0.

    Attributes:
        enabled: whether they are measured.
    """

    def __init__(self, words: Any = None, word: int = 0) -> None:
        self._words = [0] if words is None else words
        self._word = word
        self._count = 0
        self._total_ns = 0
        self.enabled = False

    def enable(self, flag: bool) -> None:
        """Measure from now on, or no more; what was measured before stays."""
        if flag and not self.enabled:
            self._words[self._word] = time.monotonic_ns()
        self.enabled = flag
        if not flag:
            self._words[self._word] = 0

    def note(self) -> None:
        """Count a wait that has just ended. For one thread at a time."""
        returned = int(self._words[self._word])
        if returned:  # else it was disabled meanwhile
            self._count += 1
            self._total_ns += time.monotonic_ns() - returned

    @property
    def average_us(self) -> float:
        """Return the average of all waits that were measured, in microseconds; 0.0 if there were none."""
        return self._total_ns / self._count / _NS_PER_US if self._count else 0.0
