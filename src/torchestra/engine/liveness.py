"""Whether the other ranks are alive: processes through pidfd, threads through their Thread."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import threading
from pathlib import Path
from typing import Protocol

from torchestra.engine.callsites import call_site

# struct pidfd_info of <linux/pidfd.h>, in its first version: what is asked for, cgroup, ids, the exit status.
_PIDFD_INFO = struct.Struct("=QQ11Ii")
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11


class Peers(Protocol):
    """What a member asks about the ranks of its group."""

    def dead(self) -> tuple[int, ...]:
        """The ranks that have died."""

    def site(self, rank: int) -> str | None:
        """Where the program of a rank is, if that can be seen from here: ``is at file:line in function``."""

    def how(self, rank: int) -> str:
        """How a rank that is dead ended, as far as it can be known."""

    def close(self) -> None:
        """Release what was opened to find out."""


def process_start(pid: int) -> int:
    """When a process started, in clock ticks since boot, or -1 if there is none (or no /proc)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return -1
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def describe_status(status: int) -> str:
    """A status as from ``os.wait()`` in words: ``exit code 3``, ``killed by SIGSEGV``."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def status_of_dead(pid: int, started: int, descriptor: int | None) -> int | None:
    """The wait status of a process that has ended and is not our child, if the system tells.

    While nobody has reaped it, /proc does; afterwards, since Linux 6.15, a pidfd opened before.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        fields = stat[stat.rindex(b")") + 2 :].split()
        if fields[0] == b"Z" and int(fields[19]) == started:
            return int(fields[-1])
    except (OSError, ValueError, IndexError):
        pass
    if descriptor is None:
        return None
    request = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0, *[0] * 12))
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, request)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(request)
    return int(status) if mask & _PIDFD_INFO_EXIT else None


class PeerProcesses:
    """Ranks that are processes of this host.

    A pidfd becomes readable when its process ends, also while nobody has reaped it, and never
    means another process that got the same number.
    """

    def __init__(self, pids: list[tuple[int, int]], own: int) -> None:
        self._pids = pids
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

    def how(self, rank: int) -> str:
        with self._lock:
            descriptor = next((fd for fd, peer in self._descriptors.items() if peer == rank), None)
            status = status_of_dead(*self._pids[rank], descriptor)
        return f"process {self._pids[rank][0]} is gone" if status is None else describe_status(status)

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

    def how(self, rank: int) -> str:
        return "its thread has ended"

    def close(self) -> None:
        pass
