"""How long waits sleep before they let Python look for failures: an exponential backoff."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FIRST_S, _AT_ONCE_S = 0.005, 1e-9


class SleepTimes:
    """Hold two times that kernels read: of a collective's next sleep, and of each sleep for a message.

    A collective's wait sleeps for a short time first, as a peer may have died before it began, and then twice
    as long each time: a long wait shall cost nothing.

    Attributes:
        longest_s: how long waits sleep at most, in seconds.
        first_s: how long a collective's wait sleeps the first time.
        times, addresses: both times, each a struct timespec.
    """

    def __init__(self, longest_s: float) -> None:
        self.times: npt.NDArray[np.int64] = np.zeros((2, 2), dtype=np.int64)
        self.addresses: tuple[int, int] = self.times[0].ctypes.data, self.times[1].ctypes.data
        self.set(longest_s, _FIRST_S)

    def set(self, longest_s: float, first_s: float | None = None) -> None:
        """Set both, the first as the longest if it is not given."""
        self.longest_s, self.first_s = longest_s, longest_s if first_s is None else first_s
        self.times[1] = _timespec(longest_s)
        self.reset()

    def reset(self) -> None:
        """Have the next sleep be the first one of a collective's wait."""
        self._next_s = self.first_s
        self.times[0] = _timespec(self._next_s)

    def lengthen(self) -> None:
        """Have a collective's wait sleep for twice as long the next time."""
        self._next_s = min(2 * self._next_s, self.longest_s)
        self.times[0] = _timespec(self._next_s)

    def skip(self) -> None:
        """Have a collective's wait not sleep the next time."""
        self.times[0] = _timespec(_AT_ONCE_S)


def _timespec(seconds: float) -> tuple[int, int]:
    return divmod(round(seconds * 1e9), 1_000_000_000)
