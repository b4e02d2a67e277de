"""What the system has counted of a process until now, from Linux's /proc."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from torchestra.system.proc import CORE, MAJOR_FAULTS, MINOR_FAULTS, STATE, named_numbers, stat_fields

_PROC, _CPUS = Path("/proc"), Path("/sys/devices/system/cpu")


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
    stat = stat_fields(folder)
    on_core_ns, runnable_ns = map(int, (folder / "schedstat").read_text().split()[:2])
    states = _thread_states(folder / "task")
    return ProcessCounts(
        cpu_s=on_core_ns / 1e9,
        runnable_s=runnable_ns / 1e9,
        minor_faults=int(stat[MINOR_FAULTS]),
        major_faults=int(stat[MAJOR_FAULTS]),
        read_bytes=_field(folder / "io", "read_bytes:"),
        swapped_bytes=_field(folder / "status", "VmSwap:") << 10,
        resident_bytes=_field(folder / "status", "VmRSS:") << 10,
        mhz=_frequency(int(stat[CORE])),
        threads=states.count("R"),
        all_threads=len(states),
    )


def _thread_states(folder: Path) -> list[str]:
    """Return the state of each thread, but for those that end meanwhile."""
    states = []
    for thread in folder.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states.append(stat_fields(thread)[STATE])
    return states


def _field(path: Path, name: str) -> int:
    """Return one of the :func:`named_numbers` of a file; 0 if it is not there."""
    with contextlib.suppress(PermissionError):
        return named_numbers(path).get(name, 0)
    return 0


def _frequency(core: int) -> float | None:
    """Return the present frequency of a core in MHz, if the system tells it."""
    with contextlib.suppress(OSError, ValueError):
        return int((_CPUS / f"cpu{core}/cpufreq/scaling_cur_freq").read_text()) / 1e3
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = [line for line in (_PROC / "cpuinfo").read_text().splitlines() if line.startswith("cpu MHz")]
        return float(lines[core].partition(":")[2])
    return None
