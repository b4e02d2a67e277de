"""The jobs that run on this host, found only by the arenas that their processes have open.

A job registers nowhere, so nothing is left when it is killed. Every rank keeps its groups' arenas open
(arena.py), under a name that /proc shows; the system lets a user see only the user's own processes there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchestra.engine.failure.liveness import process_start
from torchestra.engine.memory.foreign import ForeignArena
from torchestra.engine.memory.mapping import close, open_to_read
from torchestra.errors import DistBackendError, InvalidArgumentError
from torchestra.launcher.membership_file import read_membership
from torchestra.launcher.open_arenas import PROC, open_arenas

_PROC = PROC
_SERVERS = ("torchestra.launcher.fork_server", "from multiprocessing.")
"""What is in the command lines of processes that fork ranks, or start them."""


@dataclass
class Group:
    """A group of a job.

    Attributes:
        arena: the memory that its ranks share.
        pids: the processes that have the arena open.
    """

    arena: ForeignArena
    pids: set[int] = field(default_factory=set)

    def is_alive(self, rank: int) -> bool:
        """Return whether the process of a rank runs (ranks that are threads have the same process)."""
        pid, started = self.arena.process(rank)
        if pid in self.pids and process_start(pid) == started:
            return True
        return self.arena.is_held(rank)  # the rank may have another pid in a PID namespace of its own


@dataclass
class Job:
    """Groups that have processes in common.

    Attributes:
        groups: the largest first, those of one size in the order in which they were made.
    """

    groups: list[Group]

    @property
    def pids(self) -> set[int]:
        """The process ids of its ranks."""
        return {pid for group in self.groups for pid in group.pids}

    @property
    def pid(self) -> int:
        """Return the pid that names the job: the process of rank 0 of its first group, or the first
        rank's that lives.
        """
        pid, _ = self.groups[0].arena.process(0)
        return pid if pid in self.pids else min(self.pids)

    @property
    def command(self) -> str:
        """Return the command line of that process, or of the one that has started it.

        A process of a fork server has the server's command line, which says nothing of the program.
        """
        lines = [_command_line(pid) for pid in _ancestry(self.pid) or [self.pid]]
        return next(
            (line for line in lines if line and not any(each in line for each in _SERVERS)), lines[0] or "?"
        )

    @property
    def membership(self) -> dict[str, Any] | None:
        """Return what the job's launcher tells of members and restarts; None if the job is not elastic."""
        told = (read_membership(pid, _PROC) for pid in _ancestry(self.pid))
        return next((each for each in told if each is not None), None)

    def was_started_by(self, pid: int) -> bool:
        """Return whether a process started a rank, directly or not, as the launcher and its shell did."""
        return any(pid in _ancestry(rank) for rank in self.pids)


def find_jobs(pids: Iterable[int] | None = None) -> tuple[list[Job], list[str]]:
    """Return this user's jobs that run on this host now, in the order in which they began, and complaints.

    Looks at all processes, or only at those given. There is a complaint, in one line, for each process with
    arenas that cannot be read because they are damaged or of another version of torchestra.
    """
    groups: dict[tuple[int, int], Group] = {}
    refused: dict[tuple[int, int], str] = {}  # by the arena; a process can have hundreds
    for pid, path, key in open_arenas(pids, _PROC):
        if key not in groups and key not in refused:
            try:
                groups[key] = Group(_opened(path))
            except DistBackendError as error:
                refused[key] = f"process {pid}: {error}"
            except OSError:
                continue  # the process has just ended
        if key in groups:
            groups[key].pids.add(pid)
    jobs: list[Job] = []
    for group in groups.values():
        met = [job for job in jobs if job.pids & group.pids]
        jobs = [job for job in jobs if job not in met]
        jobs.append(Job([*(other for job in met for other in job.groups), group]))
    for job in jobs:
        job.groups.sort(key=lambda group: (-group.arena.layout.size, group.arena.made))
    jobs.sort(key=lambda job: job.groups[0].arena.made)
    return jobs, list(dict.fromkeys(refused.values()))


def choose_job(pid: int | None) -> Job:
    """Return the job of a process (a rank or the launcher), or the only job that runs.

    Raises:
        InvalidArgumentError: there is none, or there are several, which the message lists.
    """
    jobs, unreadable = find_jobs()
    refused = "".join(f"\n  {text}" for text in unreadable)
    if pid is not None:
        meant = [job for job in jobs if pid in job.pids] or [job for job in jobs if job.was_started_by(pid)]
        if len(meant) == 1:
            return meant[0]
        if meant:
            raise InvalidArgumentError(
                f"process {pid} has started {len(meant)} jobs: choose one with --job{_listed(meant)}"
            )
        raise InvalidArgumentError(
            f"process {pid} belongs to no running job of this user on this host{_listed(jobs)}{refused}"
        )
    if not jobs:
        raise InvalidArgumentError(f"no job of this user runs on this host{refused}")
    if len(jobs) > 1:
        raise InvalidArgumentError(f"{len(jobs)} jobs run on this host: choose one with --job{_listed(jobs)}")
    return jobs[0]


def _listed(jobs: list[Job]) -> str:
    return "".join(f"\n  --job {job.pid}: {job.command}, {_ranks_of(job)}" for job in jobs)


def _ranks_of(job: Job) -> str:
    size = job.groups[0].arena.layout.size
    return f"{size} rank{'' if size == 1 else 's'}"


def _opened(path: Path) -> ForeignArena:
    descriptor = open_to_read(path)
    try:
        return ForeignArena(descriptor)
    finally:
        close(descriptor)  # the arena may be this process's own


def _command_line(pid: int) -> str:
    """Return the command line of a process, as one line; empty if it has ended."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return " ".join(b" ".join(words).decode(errors="replace").split())


def _ancestry(pid: int) -> list[int]:
    """Return a process, its parent, and so on."""
    ancestry: list[int] = []
    while pid > 1 and pid not in ancestry:
        ancestry.append(pid)
        try:
            status = (_PROC / str(pid) / "stat").read_bytes()
            pid = int(status[status.rindex(b")") + 2 :].split()[1])
        except (OSError, ValueError):
            break
    return ancestry
