"""Whether the other ranks are alive: processes through pidfd, threads through their Thread."""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path
from typing import Protocol

from torchestra.engine.callsites import call_site


class Peers(Protocol):
    """What a member asks about the ranks of its group."""

    def dead(self) -> tuple[int, ...]:
        """The ranks that have died."""

    def site(self, rank: int) -> str | None:
        """Where the program of a rank is, if that can be seen from here: ``is at file:line in function``."""

    def close(self) -> None:
        """Release what was opened to find out."""


def process_start(pid: int) -> int:
    """When a process started, in clock ticks since boot, or -1 if there is none (or no /proc)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return -1
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


class PeerProcesses:
    """Ranks that are processes of this host.

    A pidfd becomes readable when its process ends, also while nobody has reaped it, and never
    means another process that got the same number.
    """

    def __init__(self, pids: list[tuple[int, int]], own: int) -> None:
        self._descriptors: dict[int, int] = {}
        self._dead: list[int] = []
        # Several threads may wait in one group (messages, collectives), and poll() is not for two at once.
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._owner = os.getpid()
        for rank, (pid, started) in enumerate(pids):
            if rank == own:
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead.append(rank)
                continue
            if started >= 0 and process_start(pid) not in (started, -1):
                os.close(descriptor)
                self._dead.append(rank)
                continue
            self._descriptors[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)

    def dead(self) -> tuple[int, ...]:
        with self._lock:
            for descriptor, _ in self._poll.poll(0):
                self._poll.unregister(descriptor)
                self._dead.append(self._descriptors[descriptor])
            return tuple(sorted(self._dead))

    def site(self, rank: int) -> str | None:
        return None

    def close(self) -> None:
        with self._lock:
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors.clear()
            self._poll = select.poll()


class PeerThreads:
    """Ranks that are threads of this process: the table is filled by the ranks as they join."""

    def __init__(self, threads: dict[int, threading.Thread], own: int) -> None:
        self._threads = threads
        self._own = own

    def dead(self) -> tuple[int, ...]:
        return tuple(
            rank
            for rank, thread in sorted(self._threads.items())
            if rank != self._own and not thread.is_alive()
        )

    def site(self, rank: int) -> str | None:
        thread = self._threads.get(rank)
        if thread is None:
            return "has not come"
        return "has ended" if not thread.is_alive() else f"is at {call_site(thread.ident)}"

    def close(self) -> None:
        pass
