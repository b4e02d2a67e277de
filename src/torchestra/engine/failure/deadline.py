"""How long a wait has lasted, not counting time in which its process did not run.

A process that is stopped (Ctrl-Z, a debugger, a frozen container or a suspended machine) would find its time
over when it goes on, although all peers are there and were stopped as well, or have come meanwhile. A wait
looks around some 20 times a second; when it finds that much more time has passed since it last looked, it was
not waiting but stopped, or busy with what peers did send. That is not counted.
"""

from __future__ import annotations

import time

_LONGEST_LOOK = 0.5
_SHORTEST_CAP = 0.1


class Patience:
    """The time that one wait has used up, begun now.

    Args:
        seconds: how long it may last. No single interruption uses up more than a quarter of it.
    """

    __slots__ = ("_cap", "_looked", "_started")

    def __init__(self, seconds: float = float("inf")) -> None:
        self._started = self._looked = time.monotonic()
        self._cap = max(_SHORTEST_CAP, min(_LONGEST_LOOK, seconds / 4))

    def started(self) -> float:
        """When it began, in ``time.monotonic()``, later by what is not counted.

        To be asked whenever the wait looks around.
        """
        now = time.monotonic()
        self._started += max(0.0, now - self._looked - self._cap)
        self._looked = now
        return self._started
