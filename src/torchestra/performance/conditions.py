"""The circumstances of a measurement: the machine, and how busy it is with other things."""

from __future__ import annotations

import platform
import re
import sys
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from torchestra.performance.calibration import Conditions

__all__ = ["busy_share", "conditions", "processor_name"]


def conditions(watch_s: float) -> Conditions:
    """Return where and when this is, and how busy the machine is, after watching it for some seconds."""
    versions = {"python": platform.python_version()}
    for package in ("torchestra", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return Conditions(
        machine=f"{processor_name()}, {platform.system()} {platform.release()} {platform.machine()}",
        versions=versions,
        taken_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        busy_share=busy_share(watch_s),
    )


def busy_share(seconds: float) -> float | None:
    """Watch for some seconds; return the share (0 to 1) of all cores in use, or None if unknown."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


def processor_name() -> str:
    """Return the processor's name as the system tells it."""
    found = re.search(r"model name\s*: (.+)", _text("/proc/cpuinfo")) if sys.platform == "linux" else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _ticks() -> tuple[int, int] | None:
    """Return busy and total time of all cores since boot, in the system's ticks."""
    found = re.match(r"cpu +([\d ]+)", _text("/proc/stat"))
    if not found:
        return None
    times = [int(number) for number in found[1].split()[:8]]
    idle = times[3] + times[4]
    return sum(times) - idle, sum(times)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
