"""What a launcher tells ``torchestra top`` of an elastic job: a memory file that it has open.

As with arenas (monitor/jobs.py), nothing is registered anywhere, and nothing is left when the
launcher is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from torchestra.launcher.open_arenas import PROC
from torchestra.system.memory_files import make_memory_file

_NAME = "torchestra-membership"
_READS = 20


class MembershipFile:
    """The file, in the launcher."""

    def __init__(self) -> None:
        self._descriptor = make_memory_file(_NAME)
        self._length = 0

    def write(self, membership: dict[str, Any]) -> None:
        """Replace the contents."""
        text = json.dumps(membership).encode()
        os.pwrite(self._descriptor, text.ljust(self._length), 0)
        self._length = max(self._length, len(text))

    def close(self) -> None:
        """Close the file, which is gone then."""
        os.close(self._descriptor)


def read_membership(pid: int, proc: Path = PROC) -> dict[str, Any] | None:
    """Return what the launcher ``pid`` tells of its job; None if it has no such file, or ends meanwhile.

    The contents are those that launcher/replacements.py writes; times are of ``time.monotonic()``.
    """
    with contextlib.suppress(OSError):
        for path in (proc / str(pid) / "fd").iterdir():
            if os.readlink(path).startswith(f"/memfd:{_NAME}"):
                return _read(path)
    return None


def _read(path: Path) -> dict[str, Any] | None:
    """Read the file, again if the launcher was writing it."""
    for _ in range(_READS):
        with contextlib.suppress(json.JSONDecodeError):
            contents: dict[str, Any] = json.loads(path.read_bytes())
            return contents
    return None
