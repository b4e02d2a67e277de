"""Liveness of the other ranks: of processes by a lock that each holds, of threads by Thread."""

from __future__ import annotations

import fcntl
import functools
import os
import signal
import struct
import threading
import time
from typing import Protocol

from torchestra.engine import layout as at
from torchestra.engine.memory.arena import Arena
from torchestra.system.forking import forget_in_children
from torchestra.system.proc import START, STATE, stat_fields
from torchestra.system.readable import is_readable

# struct pidfd_info of <linux/pidfd.h>, in its first version: the request mask, cgroup, ids, the exit status.
_PIDFD_INFO = struct.Struct("=QQ11Ii")
_PIDFD_INFO_EXIT = 1 << 3
_LIVING_S = 0.001
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11


class Peers(Protocol):
    """Tell a context about the ranks of its group."""

    def dead(self, now: bool = False) -> tuple[int, ...]:
        """Return the ranks that have died; with ``now``, look even if the last look was a moment ago."""

    def thread(self, rank: int) -> threading.Thread | None:
        """Return the thread that is a rank, of those that are threads of this process and have come."""

    @property
    def are_threads(self) -> bool:
        """Return whether the ranks are threads of this process."""

    def end_reason(self, rank: int) -> str:
        """Return how a rank that is dead ended, as far as it can be known."""

    def close(self) -> None:
        """Release all resources that this holds."""


def process_start(pid: int) -> int:
    """Return when a process started, in clock ticks since boot, or -1 if there is none (or no /proc)."""
    try:
        return int(stat_fields(f"/proc/{pid}")[START])
    except OSError:
        return -1


def describe_status(status: int) -> str:
    """Return a status as from ``os.wait()`` in words: ``exit code 3``, ``killed by SIGSEGV``."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def status_of_dead(pid: int, started: int, descriptor: int | None) -> int | None:
    """Return the wait status of a process that has ended and is not our child, if the system reports it.

    While nobody has reaped it, /proc does; afterwards, since Linux 6.15, a pidfd opened before.
    """
    try:
        fields = stat_fields(f"/proc/{pid}")
        if fields[STATE] == "Z" and int(fields[START]) == started:
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


def pid_namespace() -> int:
    """Return the PID namespace of this process, as a number; 0 where the system does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


@functools.cache
def own_process() -> tuple[int, int, int]:
    """Return the number, the start and the PID namespace of this process, as the functions above do."""
    pid = os.getpid()
    return pid, process_start(pid), pid_namespace()


os.register_at_fork(after_in_child=own_process.cache_clear)


class _Handles:
    """Pidfds, by which the system tells how a process has ended: one for each, however many groups it is in.

    They are optional: nothing but the words of an error depends on them.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], tuple[int, int]] = {}  # by process: the descriptor, its users
        self._lock = threading.Lock()
        forget_in_children(self)

    def forget(self) -> None:
        """Drop, in a forked child, those of the parent, which may be using them."""
        self._open = {}
        self._lock = threading.Lock()

    def take(self, process: tuple[int, int]) -> int | None:
        """Return the pidfd of a process (its number and start), to be given back; None if there is none."""
        with self._lock:
            descriptor, users = self._open.get(process, (-1, 0))
            if users == 0:
                pid, started = process
                try:
                    descriptor = os.pidfd_open(pid)
                except (
                    AttributeError,
                    OSError,
                ):  # it is gone, or there are no pidfds, or no descriptors left
                    return None
                if started < 0 or process_start(pid) != started:
                    os.close(descriptor)
                    return None
            self._open[process] = descriptor, users + 1
            return descriptor

    def give_back(self, process: tuple[int, int]) -> None:
        """Give a pidfd back that :meth:`take` has returned."""
        with self._lock:
            if process not in self._open:
                return  # a forked child's parent has taken it
            descriptor, users = self._open[process]
            if users > 1:
                self._open[process] = descriptor, users - 1
            else:
                del self._open[process]
                os.close(descriptor)


_handles = _Handles()


class PeerProcesses:
    """Ranks that are processes of this host.

    Each holds a lock in the arena (arena.py) from before it is PRESENT there until it ends; the system then
    lets go of the lock, also while nobody has reaped the process. The locks are seen in every PID namespace,
    take no descriptors, and never mean another process that got the same number.

    A rank that has left may have closed the arena's file, and lives on: then its number tells.
    """

    def __init__(self, arena: Arena, own: int) -> None:
        self._arena = arena
        self._waiting = {rank for rank in range(arena.layout.size) if rank != own}  # not known to be dead
        self._taken: dict[int, tuple[tuple[int, int], int | None]] = {}  # by rank: the process, its pidfd
        self._dead: set[int] = set()
        self._space = pid_namespace()
        self._next_check = 0.0
        self._closed = False
        # Several threads may wait in one group (messages, collectives).
        self._lock = threading.Lock()

    def dead(self, now: bool = False) -> tuple[int, ...]:
        with self._lock:
            if (now or time.monotonic() >= self._next_check) and not self._closed:
                worked = time.thread_time()
                self._check()
                # Less than a twentieth of a core, however many there are.
                self._next_check = time.monotonic() + 20 * (time.thread_time() - worked)
            return tuple(sorted(self._dead))

    def _check(self) -> None:
        for rank in tuple(self._waiting):
            # A rank takes its lock before it is PRESENT, and says that it has LEFT before it may close the
            # file. So one that is PRESENT before and after it is seen without its lock has ended; seen only
            # before, it may have left in between, and only after, it may have come.
            before = self._load_word(rank, at.STATE)
            if before == at.ABSENT:
                continue
            held = self._arena.is_held(rank)
            state = self._load_word(rank, at.STATE)
            if rank not in self._taken and self._shares_pid_namespace(rank):
                process = self._load_word(rank, at.PROCESS), self._load_word(rank, at.STARTED)
                self._taken[rank] = process, _handles.take(process)
            if not held and (state == at.PRESENT or self._has_ended(rank)):
                self._waiting.discard(rank)
                self._dead.add(rank)

    def _has_ended(self, rank: int) -> bool:
        """Return whether the process of a rank that has left is gone, as far as its number tells."""
        (pid, started), descriptor = self._taken.get(rank, ((0, 0), None))
        if descriptor is not None:
            return is_readable(descriptor, 0.0)
        return rank in self._taken and process_start(pid) != started

    def _shares_pid_namespace(self, rank: int) -> bool:
        """Return whether its process has the same number here."""
        return self._load_word(rank, at.PID_NAMESPACE) == self._space

    def _load_word(self, rank: int, offset: int) -> int:
        return self._arena.load_word(self._arena.control(rank) + offset)

    def thread(self, rank: int) -> threading.Thread | None:
        return None

    @property
    def are_threads(self) -> bool:
        return False

    def end_reason(self, rank: int) -> str:
        with self._lock:
            process, descriptor = self._taken.get(rank, (None, None))
            status = None if process is None else status_of_dead(*process, descriptor)
        if status is not None:
            return describe_status(status)
        pid = self._load_word(rank, at.PROCESS)
        return (
            f"process {pid}{'' if self._shares_pid_namespace(rank) else ' of another PID namespace'} is gone"
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for process, descriptor in self._taken.values():
                if descriptor is not None:
                    _handles.give_back(process)
            self._taken.clear()


class _LivingThreads:
    """Hold the living threads of this process, as they were a moment ago.

    Where many ranks are threads, all look who lives, and would take turns at listing all.
    """

    def __init__(self) -> None:
        self._threads: frozenset[threading.Thread] = frozenset()
        self._until = 0.0

    def get(self, now: bool) -> frozenset[threading.Thread]:
        """Return them; those started in the last moment may be missing."""
        if now or time.monotonic() >= self._until:
            self._threads = frozenset(threading.enumerate())  # many times quicker than to ask each thread
            self._until = time.monotonic() + _LIVING_S
        return self._threads


_living = _LivingThreads()


class PeerThreads:
    """Ranks that are threads of this process: the table is filled by the ranks as they join."""

    def __init__(self, threads: dict[int, threading.Thread], own: int) -> None:
        self._threads = threads
        self._own = own

    def dead(self, now: bool = False) -> tuple[int, ...]:
        living = _living.get(now)
        ended = [  # of a copy, which is made in one step: others fill the table
            rank
            for rank, thread in list(self._threads.items())
            if thread not in living and rank != self._own and not thread.is_alive()
        ]
        return tuple(sorted(ended))

    def thread(self, rank: int) -> threading.Thread | None:
        return self._threads.get(rank)

    @property
    def are_threads(self) -> bool:
        return True

    def end_reason(self, rank: int) -> str:
        return "its thread has ended"

    def close(self) -> None:
        pass
