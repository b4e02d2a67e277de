"""Readings of the processes of a job's ranks, taken from outside while they run: why is one of them slow?

The system counts a process's time on cores, its page faults and its reads from disks (proc(5)). The line of
the program is asked of the thread that answers for a rank (engine/failure/stack_reporter.py), as other ranks
do whose wait has timed out. So a job pays only while it is looked at.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchestra.engine import layout as at
from torchestra.engine.diagnosis.last_seen import read_site
from torchestra.engine.kernels import shared_words
from torchestra.engine.memory.foreign import ForeignArena
from torchestra.engine.memory.mapping import MemoryFile
from torchestra.engine.recorder.trace import SAMPLE
from torchestra.monitor.jobs import Group

_PROC, _CPUS = Path("/proc"), Path("/sys/devices/system/cpu")
_INTERVAL_S = 0.05
# Fields of /proc/PID/stat, counted from the state, which comes after the name.
_STATE, _MINOR_FAULTS, _MAJOR_FAULTS, _CORE = 0, 7, 9, 36

Event = dict[str, Any]


@dataclass(frozen=True)
class ProcessCounts:
    """What the system has counted of a process until now.

    Attributes:
        cpu_s: seconds that its main thread was on a core.
        runnable_s: seconds that this could have been, but no core was free.
        minor_faults, major_faults: page faults, without and with a read from a disk.
        read_bytes: from disks.
        swapped_bytes, resident_bytes: of its memory, in swap space and in RAM.
        mhz: the frequency of the core that it was on last; None: the system does not tell it.
        threads, all_threads: how many run or could run, and how many there are.
    """

    cpu_s: float
    runnable_s: float
    minor_faults: int
    major_faults: int
    read_bytes: int
    swapped_bytes: int
    resident_bytes: int
    mhz: float | None
    threads: int
    all_threads: int


def read_process(pid: int) -> ProcessCounts:
    """Return the present counts of a process of this user.

    Raises:
        OSError, ValueError, IndexError: it has ended.
    """
    folder = _PROC / str(pid)
    stat = _stat(folder / "stat")
    on_core_ns, runnable_ns = map(int, (folder / "schedstat").read_text().split()[:2])
    states = [_stat(thread / "stat")[_STATE] for thread in (folder / "task").iterdir()]
    return ProcessCounts(
        cpu_s=on_core_ns / 1e9,
        runnable_s=runnable_ns / 1e9,
        minor_faults=int(stat[_MINOR_FAULTS]),
        major_faults=int(stat[_MAJOR_FAULTS]),
        read_bytes=_field(folder / "io", "read_bytes:"),
        swapped_bytes=_field(folder / "status", "VmSwap:") << 10,
        resident_bytes=_field(folder / "status", "VmRSS:") << 10,
        mhz=_frequency(int(stat[_CORE])),
        threads=states.count("R"),
        all_threads=len(states),
    )


def sample(groups: Sequence[Group], seconds: float) -> list[Event]:
    """Read the processes of some groups' ranks again and again; return the readings, as events of a trace.

    A process is read for the first of the groups that it is in; ranks that are threads of one process are
    left out, for the system's numbers are the process's. So are those of processes that cannot be found.

    Args:
        groups: in the order in which they stand in the trace.
        seconds: how long to look.
    """
    ranks = [rank for number, group in enumerate(groups, start=1) for rank in _ranks(number, group)]
    ranks = list({rank.pid: rank for rank in reversed(ranks)}.values())
    events: list[Event] = []
    end = time.monotonic() + seconds
    while ranks:
        began = time.monotonic()
        for rank in ranks:
            with contextlib.suppress(OSError, ValueError, IndexError):  # the process has just ended
                events.append(rank.read())
        if began >= end:
            break
        time.sleep(max(0.0, _INTERVAL_S - (time.monotonic() - began)))
    return events


def _ranks(number: int, group: Group) -> Iterator[_SampledRank]:
    arena = group.arena
    pids = [arena.process(local_rank)[0] for local_rank in range(arena.layout.size)]
    asking = None if os.getpid() in group.pids else _writable_control_blocks(arena)
    for local_rank, pid in enumerate(pids):
        if pid in group.pids and pids.count(pid) == 1:
            yield _SampledRank(number, local_rank, pid, arena, asking)


def _writable_control_blocks(arena: ForeignArena) -> Any:
    """Map the control blocks of an arena, to ask its ranks; None if this process may not."""
    try:
        descriptor = arena.open_to_write()
    except OSError:
        return None
    try:
        # The mapping stays when the file is closed; one that stayed open would look like a rank's.
        return MemoryFile(descriptor).map(arena.layout.control, arena.layout.size * at.CONTROL_BYTES)
    finally:
        os.close(descriptor)


class _SampledRank:
    """A rank whose process is read.

    Args:
        group: its number in the trace.
        local_rank: its number in the arena.
        asking: the control blocks, mapped to be written to; None: the rank cannot be asked.
    """

    def __init__(self, group: int, local_rank: int, pid: int, arena: ForeignArena, asking: Any) -> None:
        self.pid = pid
        self._group, self._local_rank, self._arena, self._asking = group, local_rank, arena, asking
        block = arena.layout.control + local_rank * at.CONTROL_BYTES
        self._block = block
        crosses = arena.load_word(at.HEADER_GROUP_SIZE) >= arena.layout.size
        self._rank = arena.load_word(block + at.GROUP_RANK) if crosses else local_rank
        self._asked_ns = 0

    def read(self) -> Event:
        """Return the present numbers.

        Raises:
            OSError, ValueError, IndexError: the process has ended.
        """
        told = asdict(read_process(self.pid))
        del told["all_threads"], told["resident_bytes"]
        told["site"] = self._site()
        where = {"pid": self._group, "tid": self._rank, "ts": time.monotonic() * 1e6}
        return {"ph": "i", "s": "t", "name": told["site"] or "sample", "cat": SAMPLE, **where, "args": told}

    def _site(self) -> str | None:
        """Return the line of the program that the rank has last told, and ask for the present one."""
        if self._asking is None:
            return None
        address = self._asking.ctypes.data + self._local_rank * at.CONTROL_BYTES + at.ASKED
        seen, asked_before = read_site(self._arena, self._local_rank), self._asked_ns
        self._asked_ns = time.monotonic_ns()
        shared_words.increment_and_wake(address)
        return seen[0] if seen is not None and asked_before and seen[1] >= asked_before else None


def _stat(path: Path) -> list[str]:
    """Return the fields of a process or thread after its name, which may hold spaces."""
    return path.read_text().rpartition(") ")[2].split()


def _field(path: Path, name: str) -> int:
    """Return a number of a file with a name and a number in each line; 0 if it is not there."""
    with contextlib.suppress(PermissionError):
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0


def _frequency(core: int) -> float | None:
    """Return the present frequency of a core in MHz, if the system tells it."""
    with contextlib.suppress(OSError, ValueError):
        return int((_CPUS / f"cpu{core}/cpufreq/scaling_cur_freq").read_text()) / 1e3
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = [line for line in (_PROC / "cpuinfo").read_text().splitlines() if line.startswith("cpu MHz")]
        return float(lines[core].partition(":")[2])
    return None
