"""What the log says of those who are refused: the first at once, many within a minute in one line."""

from __future__ import annotations

import logging
import time

__all__ = ["Refusals"]

_EVERY_SECONDS = 60.0

_log = logging.getLogger(__name__)


class Refusals:
    """Warns of clients that are turned away, at most once a minute however many there are.

    Args:
        server: who refuses, for the message.
    """

    def __init__(self, server: object) -> None:
        self._server = server
        self._count = 0
        self._next = 0.0

    def note(self, who: str, why: str) -> None:
        """One more, from the address ``who``."""
        self._count += 1
        now = time.monotonic()
        if now < self._next:
            return
        more = f" ({self._count} refused since the last such line)" if self._count > 1 else ""
        _log.warning("%r refused %s: %s%s", self._server, who, why, more)
        self._count = 0
        self._next = now + _EVERY_SECONDS
