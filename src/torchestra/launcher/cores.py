"""The cores that this process may use: its affinity, and the quota of its control group."""

from __future__ import annotations

import math
import os
from pathlib import Path

_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


def _quota() -> float:
    """Return the number of cores that the control group allows; infinite if it sets no quota."""
    try:
        allowed, period = _QUOTA_FILE.read_text(encoding="ascii").split()
        return math.inf if allowed == "max" else int(allowed) / int(period)
    except (OSError, ValueError):
        return math.inf


def usable_cores() -> int:
    """Return how many cores this process's affinity mask or a container's lower quota allows; at least 1."""
    return max(1, int(min(len(os.sched_getaffinity(0)), _quota())))
