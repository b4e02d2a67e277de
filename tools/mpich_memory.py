"""The shared memory of MPICH's ranks that have ended without MPI_Finalize."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchestra.store.base import pauses

_FILES = "mpich_shm_*"
_END_SECONDS = 10.0


@contextmanager
def mpich_memory_removed() -> Iterator[None]:
    """Remove what ranks of MPICH leave that begin and end within the block; if killed, they remove nothing.

    A process may take a moment more to end than who started it: what one still has mapped stays until then.
    One user of this at a time runs ranks of MPICH, in whatever process: a file that another one's rank has
    made and not yet mapped would be removed, and then its peers cannot begin.
    """
    with open(__file__, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = _files()
        try:
            yield
        finally:
            _remove_since(before)
            fcntl.flock(lock, fcntl.LOCK_UN)  # also for a process that was forked meanwhile


def _remove_since(before: set[str]) -> None:
    for _ in pauses(_END_SECONDS):
        left = _files() - before
        mapped = _mapped() if left else ""
        for file in left:
            if file not in mapped:
                Path(file).unlink(missing_ok=True)
        if not any(file in mapped for file in left):
            break


def _files() -> set[str]:
    return {str(file) for file in Path("/dev/shm").glob(_FILES)}


def _mapped() -> str:
    """Return which files all processes have mapped, among other things."""
    text = ""
    for process in os.listdir("/proc"):
        if process.isdecimal():
            with contextlib.suppress(OSError):
                text += Path("/proc", process, "maps").read_text()
    return text
