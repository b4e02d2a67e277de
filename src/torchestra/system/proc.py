"""What Linux's /proc tells of a process, and of this boot of the host."""

from __future__ import annotations

from pathlib import Path

STATE, PARENT, MINOR_FAULTS, MAJOR_FAULTS, USER_TICKS, SYSTEM_TICKS, START, CORE = 0, 1, 7, 9, 11, 12, 19, 36
"""Places in :func:`stat_fields`; times are in clock ticks, START since boot."""


def stat_fields(folder: str | Path) -> list[str]:
    """Return the fields of the stat file of a process or thread, from its state on.

    Args:
        folder: ``/proc/PID``, or ``/proc/PID/task/THREAD``.

    Raises:
        OSError: it has ended, or there is no /proc.
    """
    with open(f"{folder}/stat", "rb") as file:
        # The name, in parentheses, may hold anything.
        return file.read().rpartition(b")")[2].decode().split()


def named_numbers(path: str | Path) -> dict[str, int]:
    """Return the whole numbers of a file with a name and a number in each line, as ``status`` and ``io``.

    Raises:
        OSError: it cannot be read.
    """
    lines = (line.split() for line in Path(path).read_text(errors="replace").splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def boot_id() -> str:
    """Return what only this boot of this host has, in all its namespaces; empty where it is not told."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
