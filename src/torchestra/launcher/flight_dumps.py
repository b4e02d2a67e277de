"""Flight dumps of ranks that are ended: the launcher keeps their arenas open until it has written them.

A rank that leaves a group, or finds it broken, writes the record itself. But when a job fails the
launcher ends its ranks at once, so it opens their arenas before it signals them, and then writes the records.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

from torchestra.launcher.open_arenas import open_arenas


class FlightDumps:
    """Writes records to a directory, or none if the directory is None."""

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._held: dict[tuple[int, int], int] = {}
        self._ended = 0.0

    def hold(self, pids: Iterable[int]) -> None:
        """Open the arenas of these processes, which are about to end or to be ended."""
        self._ended = time.monotonic()
        for arena in open_arenas(pids) if self._directory is not None else ():
            if arena.key not in self._held:
                with contextlib.suppress(OSError):
                    self._held[arena.key] = os.open(arena.path, os.O_RDONLY | os.O_CLOEXEC)

    def release(self) -> None:
        """Close the opened arenas: their ranks go on, and write the record of a broken one themselves."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def write(self) -> None:
        """Write the records of the opened arenas, and close these."""
        if not self._held:
            return
        from torchestra.engine.memory.foreign import ForeignArena
        from torchestra.engine.recorder.flight_dump import dump_flight_record
        from torchestra.errors import DistBackendError

        for descriptor in self._held.values():
            with contextlib.suppress(DistBackendError):
                dump_flight_record(ForeignArena(descriptor), self._directory, self._ended)
        self.release()
