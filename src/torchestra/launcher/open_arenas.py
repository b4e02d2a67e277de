"""The arenas that the processes of this user have open.

Imports nothing slow: a launcher uses this when it is about to end its ranks.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from torchestra.engine.layout import MEMORY_FILE

PROC = Path("/proc")
_LINK = f"/memfd:{MEMORY_FILE}:"


class OpenArena(NamedTuple):
    """An arena that a process has open.

    Attributes:
        path: a path to open the arena by, while the process lives.
        key: the same for every process that has this arena open.
    """

    pid: int
    path: Path
    key: tuple[int, int]


def open_arenas(pids: Iterable[int] | None = None, proc: Path = PROC) -> Iterator[OpenArena]:
    """Return the arenas that these processes, by default all of this user, have open for writing.

    Only ranks have; a process that has an arena open only for reading observes it, as this one does.
    """
    user = os.geteuid()
    folders = proc.iterdir() if pids is None else (proc / str(pid) for pid in pids)
    for folder in folders:
        if not folder.name.isdecimal():
            continue
        try:
            descriptors = list((folder / "fd").iterdir()) if folder.stat().st_uid == user else []
        except OSError:
            continue  # the process has ended, or this one may not inspect it
        for path in descriptors:
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(_LINK) and path.lstat().st_mode & stat.S_IWUSR:
                    status = path.stat()
                    yield OpenArena(int(folder.name), path, (status.st_dev, status.st_ino))
