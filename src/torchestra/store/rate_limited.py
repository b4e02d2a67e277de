"""Warnings that strangers can cause: the first is logged at once, further ones in one line a minute."""

from __future__ import annotations

import logging
import threading
import time

_EVERY_SECONDS = 60.0


class RateLimitedWarnings:
    """Logs at most one warning a minute, with the number of those suppressed before.

    All warnings that somebody outside the job can cause go through one of these, so that nobody can fill the
    disk with them.

    Args:
        log: where the warnings go.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._left_out = 0
        self._next = 0.0
        self._lock = threading.Lock()

    def warn(self, message: str, *args: object) -> None:
        """Log a warning, or only count it. Any thread may call this.

        Args:
            message, args: as for :meth:`logging.Logger.warning`; ``message`` is one line.
        """
        now = time.monotonic()
        with self._lock:
            if now < self._next:
                self._left_out += 1
                return
            left_out, self._left_out = self._left_out, 0
            self._next = now + _EVERY_SECONDS
        more = f" ({left_out} more such warnings since the last one)" if left_out else ""
        self._log.warning(f"{message}%s", *args, more)
