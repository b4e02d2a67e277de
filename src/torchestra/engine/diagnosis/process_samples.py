"""What the system tells of a process of this host: states, page faults, what it reads. Linux's /proc only."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torchestra.engine.diagnosis.facts import Process
from torchestra.system.deadline import RunningClock
from torchestra.system.proc import MAJOR_FAULTS, STATE, SYSTEM_TICKS, USER_TICKS, named_numbers, stat_fields

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_MAX_CHILDREN = 64
_FEW = 0.2  # a share of looks that is no accident
_THREADS_EVERY = 8  # looks: a process may have many threads


class RankProcess(NamedTuple):
    """Whom to look at: a process, the thread that runs the rank's program, and the one that answers for it.

    Without the latter, the rank is a thread among others, and only what that does counts.
    """

    pid: int
    program: int
    reporter: int = 0

    @property
    def whole(self) -> Path:
        """Return the directory of what counts."""
        process = _PROC / str(self.pid)
        return process if self.reporter else process / "task" / str(self.program)


class _Counters(NamedTuple):
    ticks: int
    major_faults: int
    read_bytes: int
    throttled_s: float


@dataclass
class _Seen:
    """What was seen of one process."""

    first: _Counters
    looks: int = 0
    ran: int = 0
    disk: int = 0
    stopped: int = 0
    slept: int = 0
    futex: int = 0
    reporter: int = 0
    thread_looks: int = 0
    # By process, and by thread: at how many looks it was in which state.
    children: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    threads: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


class ProcessSamples:
    """Looks at some processes again and again.

    Args:
        processes: by rank. Those that are gone, or that we may not look at, are left out of the results.
    """

    def __init__(self, processes: Mapping[int, RankProcess]) -> None:
        self._clock = RunningClock()
        self._processes = dict(processes)
        self._seen = {rank: _Seen(_counters(each)) for rank, each in self._processes.items()}

    def look(self) -> None:
        """Look once."""
        for rank, process in self._processes.items():
            seen = self._seen[rank]
            seen.looks += 1
            state = _state(process.pid, process.program or process.pid)
            seen.ran += state == "R"
            seen.disk += state == "D"
            seen.stopped += state in ("T", "t")
            seen.slept += state == "S"
            seen.futex += state == "S" and _sleeps_in(process).startswith("futex")
            seen.reporter += bool(process.reporter) and _state(process.pid, process.reporter) == "S"
            for child in _children(process.pid):
                seen.children[child][_state(child, child)] += 1
            if process.reporter and seen.looks % _THREADS_EVERY == 1:
                seen.thread_looks += 1
                for thread in _other_threads(process):
                    seen.threads[thread][_state(process.pid, thread)] += 1

    def results(self) -> dict[int, Process]:
        """Return by rank what was seen since the beginning."""
        seconds = max(1e-3, self._clock.elapsed())
        found = {}
        for rank, process in self._processes.items():
            seen, now = self._seen[rank], _counters(process)
            if seen.looks == 0 or _state(process.pid, process.pid) == "":
                continue
            found[rank] = Process(
                seconds=seconds,
                stopped=seen.stopped == seen.looks,
                disk=_disk_share(seen.disk, seen.ran, seen.looks),
                ready=seen.ran / seen.looks,
                cpu=(now.ticks - seen.first.ticks) / _TICKS / seconds,
                major_faults=(now.major_faults - seen.first.major_faults) / seconds,
                read_bytes=(now.read_bytes - seen.first.read_bytes) / seconds,
                swapped_bytes=_swapped(process.pid),
                throttled=min(1.0, (now.throttled_s - seen.first.throttled_s) / seconds),
                loader_disk=_most_on_disk(seen.children.values(), seen.looks),
                thread_disk=_most_on_disk(seen.threads.values(), seen.thread_looks),
                in_futex=seen.futex >= max(_FEW * seen.looks, (1 - _FEW) * seen.slept),
                reporter_sleeps=seen.reporter > seen.looks / 2,
            )
        return found

    def wants_processor(self, rank: int) -> bool:
        """Return whether the thread that answers for a rank was often ready to run, or was not looked at."""
        seen = self._seen.get(rank)
        return seen is None or seen.reporter < (1 - _FEW) * seen.looks

    def is_stopped(self, rank: int) -> bool:
        """Return whether a rank was stopped at every look."""
        seen = self._seen.get(rank)
        return seen is not None and seen.stopped == seen.looks > 1


def _disk_share(disk: int, ran: int, looks: int) -> float:
    """Return the share of looks at which a thread waited for a disk, of those at which it could not run."""
    return disk / max(1, looks - ran) if disk >= max(1, _FEW * looks) else 0.0


def _most_on_disk(states: Iterable[Counter[str]], looks: int) -> float:
    return max((_disk_share(each["D"], each["R"], looks) for each in states), default=0.0)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _stat(folder: Path) -> list[str]:
    """Return :func:`stat_fields`; an empty list if there are none."""
    with contextlib.suppress(OSError):
        return stat_fields(folder)
    return []


def _state(pid: int, thread: int) -> str:
    """Return the state of a thread; nothing if it is gone."""
    fields = _stat(_PROC / str(pid) / "task" / str(thread))
    return fields[STATE] if fields else ""


def _sleeps_in(process: RankProcess) -> str:
    """Return the function of the kernel in which a thread sleeps, where the system tells."""
    return _read(_PROC / str(process.pid) / "task" / str(process.program or process.pid) / "wchan")


def _counters(process: RankProcess) -> _Counters:
    fields = _stat(process.whole)
    if len(fields) <= SYSTEM_TICKS:
        return _Counters(0, 0, 0, 0.0)
    ticks = int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
    read = _values(process.whole / "io").get("read_bytes:", 0)
    return _Counters(ticks, int(fields[MAJOR_FAULTS]), read, _throttled(process.pid))


def _throttled(pid: int) -> float:
    """Return for how long, in seconds, the control group of a process was stopped by its processor limit."""
    for line in _read(_PROC / str(pid) / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            told = _values(Path(f"/sys/fs/cgroup{path}/cpu.stat"))
            if "throttled_usec" in told:
                return told["throttled_usec"] / 1e6
        elif "cpu" in controllers.split(","):
            told = _values(Path(f"/sys/fs/cgroup/cpu{path}/cpu.stat"))
            if "throttled_time" in told:
                return told["throttled_time"] / 1e9
    return 0.0


def _swapped(pid: int) -> int:
    return _values(_PROC / str(pid) / "status").get("VmSwap:", 0) * 1024


def _values(path: Path) -> dict[str, int]:
    """Return :func:`named_numbers`; none if there is no such file."""
    with contextlib.suppress(OSError):
        return named_numbers(path)
    return {}


def _other_threads(process: RankProcess) -> Iterable[int]:
    with contextlib.suppress(OSError):
        threads = map(int, os.listdir(_PROC / str(process.pid) / "task"))
        return [each for each in threads if each != (process.program or process.pid)][:_MAX_CHILDREN]
    return []


def _children(pid: int) -> Iterable[int]:
    tasks = _read(_PROC / str(pid) / "task" / str(pid) / "children").split()
    return [int(each) for each in tasks[:_MAX_CHILDREN]]
