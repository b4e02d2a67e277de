"""Describe the machine of a benchmark, and how busy it was with other things."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from torchestra.performance.conditions import processor_name

__all__ = ["available_memory", "describe_machine"]

_PACKAGES = ("torchestra", "torch", "llvmlite", "numpy")


def describe_machine() -> dict[str, Any]:
    """Return processor, caches, memory, system and versions, for the report."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "caches": _caches(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def available_memory() -> int | None:
    """Return the bytes that can be allocated without swapping; None where the system does not say."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", _text("/proc/meminfo"))
    return int(found[1]) * 1024 if found else None


def _caches() -> dict[str, str]:
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind = _text(index / "level").strip(), _text(index / "type").strip()
        if kind != "Instruction":
            caches[f"L{level}"] = _text(index / "size").strip()
    return caches


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
