"""Control groups that limit one process, of version 2 or 1, below the root of the hierarchy."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_numbers = itertools.count()


def why_not(controller: str) -> str:
    """Return why there can be no group with this controller; empty if there can."""
    try:
        Cgroup(controller).close()
    except OSError as error:
        return f"no cgroup for {controller} can be made: {error}"
    return ""


class Cgroup:
    """A group with one controller, ``cpu`` or ``memory``.

    Raises:
        OSError: it cannot be made here.
    """

    def __init__(self, controller: str) -> None:
        self._second = (_ROOT / "cgroup.controllers").exists()
        self._above = _ROOT if self._second else _ROOT / controller
        if self._second and controller not in (_ROOT / "cgroup.subtree_control").read_text().split():
            raise OSError(f"{_ROOT}/cgroup.subtree_control does not have {controller}")
        if not (self._above / "cgroup.procs").exists():
            raise OSError(f"{self._above} is no cgroup")
        self.path = self._above / f"torchestra-chaos-{os.getpid()}-{next(_numbers)}"
        self.path.mkdir()

    def add(self, pid: int) -> None:
        """Put a process into it, if it still is there."""
        with contextlib.suppress(ProcessLookupError):
            (self.path / "cgroup.procs").write_text(str(pid))

    def limit_memory(self, size: int) -> None:
        """Set how many bytes may be added."""
        (self.path / ("memory.max" if self._second else "memory.limit_in_bytes")).write_text(str(size))

    def limit_cpu(self, cores: float) -> None:
        """Set how many cores the processes get, together."""
        if self._second:
            (self.path / "cpu.max").write_text(f"{int(cores * 100_000)} 100000")
        else:
            (self.path / "cpu.cfs_period_us").write_text("100000")
            (self.path / "cpu.cfs_quota_us").write_text(str(int(cores * 100_000)))

    def release(self) -> None:
        """Move its processes to the root."""
        for pid in (self.path / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (self._above / "cgroup.procs").write_text(pid)

    def close(self) -> None:
        """Remove it; the last processes may take a moment to leave it."""
        if not self.path.exists():
            return
        deadline = time.monotonic() + 5.0
        while True:
            try:
                self.path.rmdir()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                self.release()
                time.sleep(0.01)
