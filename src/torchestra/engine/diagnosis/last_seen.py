"""Publish every second where a rank's program is, for the day on which the rank can no longer say.

A thread of each process that is a rank writes the line into the arenas of all its groups. When an exception
ends the program, that is the last thing written: the others find it when they see that the rank has died.
What is written begins with a checksum, by which a reader sees that it has read all of it and not half of
two; nothing else is ordered.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import zlib
from typing import Protocol

from torchestra.engine import layout as at
from torchestra.engine.memory.arena import Arena
from torchestra.engine.recorder.callsites import call_site, exception_text, raise_site
from torchestra.engine.recorder.flight_record import Readable
from torchestra.system.forking import forget_in_children
from torchestra.system.limits import start_thread

INTERVAL_S = 1.0
_TRIES = 10
_CHECKSUM_DIGITS = 8


class RankProgram(Protocol):
    """A rank of this process, and the thread that runs its program."""

    arena: Arena
    rank: int
    program: threading.Thread


class _Publisher:
    """The thread, which runs while there is a rank in this process."""

    def __init__(self) -> None:
        self._ranks: list[RankProgram] = []
        self._running = False
        self._changed = threading.Condition()
        forget_in_children(self)

    def forget(self) -> None:
        """Begin anew, in a forked child, which has no rank."""
        self._ranks, self._running = [], False
        self._changed = threading.Condition()

    def add(self, rank: RankProgram) -> None:
        with self._changed:
            self._ranks.append(rank)
            write_last_seen(rank.arena, rank.rank, rank.program)
            if not self._running:
                start_thread(threading.Thread(target=self._run, name="torchestra-last-seen", daemon=True))
                self._running = True

    def remove(self, rank: RankProgram) -> None:
        with self._changed:
            if rank in self._ranks:
                self._ranks.remove(rank)
                self._changed.notify_all()

    def end_with(self, site: str) -> None:
        """Publish this of all ranks, and nothing more."""
        with self._changed:
            ranks, self._ranks = self._ranks, []
            for rank in ranks:
                _write(rank.arena, rank.rank, site)

    def _run(self) -> None:
        with self._changed:
            while self._ranks:
                for rank in self._ranks:
                    write_last_seen(rank.arena, rank.rank, rank.program)
                self._changed.wait(INTERVAL_S)
            self._running = False


_publisher = _Publisher()


@atexit.register
def publish_last_exception() -> None:
    """Publish which exception ends the program, if one does: Python has put it where a debugger finds it."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and not hasattr(sys, "ps1"):  # a prompt goes on after one
        site = f"{raise_site(error) or 'an unknown line'} with {exception_text(error)}"
        _publisher.end_with(site)


def publish_last_seen(rank: RankProgram) -> None:
    """Begin to publish where the program of a rank is."""
    _publisher.add(rank)


def end_last_seen(rank: RankProgram) -> None:
    """Publish it no more."""
    _publisher.remove(rank)


def write_last_seen(arena: Arena, rank: int, program: threading.Thread) -> None:
    """Write where the program of a rank is now. Two threads of the rank may do so at once."""
    _write(arena, rank, call_site(program.ident))


def _write(arena: Arena, rank: int, site: str) -> None:
    raw = f"{time.monotonic_ns()} {site}".encode(errors="replace")
    text = raw[: at.LAST_SEEN_BYTES - 1 - _CHECKSUM_DIGITS].decode(errors="ignore")
    arena.set_text(arena.control(rank) + at.LAST_SEEN, at.LAST_SEEN_BYTES, f"{_checksum(text)}{text}\0")


def read_last_seen(arena: Readable, rank: int) -> str:
    """Return where the program of a rank was when it was last looked at, and how long ago; or nothing."""
    seen = read_site(arena, rank)
    return "" if seen is None else f"at {seen[0]}, {(time.monotonic_ns() - seen[1]) / 1e9:.1f} s ago"


def read_site(arena: Readable, rank: int) -> tuple[str, int] | None:
    """Return the line of a rank's program when it was last looked at, and when, in ns of CLOCK_MONOTONIC."""
    offset = arena.layout.control + rank * at.CONTROL_BYTES + at.LAST_SEEN
    for _ in range(_TRIES):
        whole = arena.text(offset, at.LAST_SEEN_BYTES).partition("\0")[0]
        checksum, text = whole[:_CHECKSUM_DIGITS], whole[_CHECKSUM_DIGITS:]
        if text and checksum == _checksum(text):
            nanoseconds, _, site = text.partition(" ")
            return site, int(nanoseconds)
    return None


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode(errors='replace')):0{_CHECKSUM_DIGITS}x}"
