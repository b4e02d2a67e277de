"""Wait until another process changes a file: inotify, where there is one."""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from functools import cache
from typing import Any

from torchestra.errors import DistBackendError
from torchestra.system.limits import start_thread

# <linux/inotify.h>
_MODIFIED, _ATTRIBUTES, _DELETED, _MOVED = 0x2, 0x4, 0x400, 0x800
_WATCHED = _MODIFIED | _ATTRIBUTES | _DELETED | _MOVED
_LONGEST = 4096


class FileChanges:
    """The changes of a file from now on. A context manager, for one thread.

    Changes that other hosts make on a network file system are not seen; none are where the system has no
    inotify, or this user has as many as it may (128 by default). So look at the file now and then.

    Attributes:
        are_seen: whether :meth:`wait` sees changes; else it sleeps.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = _watch(path)
        self.are_seen = self._descriptor is not None

    def __enter__(self) -> FileChanges:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            _close_elsewhere(descriptor)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a change, at most ``timeout_s``; return whether there was one since the last wait."""
        if self._descriptor is None:
            time.sleep(timeout_s)
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if not poll.poll(1000 * timeout_s):
            return False
        os.read(self._descriptor, _LONGEST)
        return True


def _watch(path: str) -> int | None:
    """Return a descriptor of inotify that watches a file; None if there can be none."""
    libc = _libc()
    if not hasattr(libc, "inotify_init1"):
        return None
    descriptor: int = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if descriptor < 0:
        return None
    if libc.inotify_add_watch(descriptor, os.fsencode(path), _WATCHED) < 0:
        os.close(descriptor)
        return None
    return descriptor


def _close_elsewhere(descriptor: int) -> None:
    """Close a descriptor of inotify in a thread of its own: the kernel takes some 10 ms for it."""
    try:
        start_thread(
            threading.Thread(target=os.close, args=(descriptor,), name="torchestra-close", daemon=True)
        )
    except DistBackendError:  # no thread may be started
        os.close(descriptor)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
