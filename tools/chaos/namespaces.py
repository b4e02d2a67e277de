"""Namespaces of mounts, processes and time for single ranks."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
import signal
from pathlib import Path

MOUNTS, PIDS, TIME = 0x20000, 0x20000000, 0x80
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_AHEAD_S = 86_400
_libc = ctypes.CDLL(None, use_errno=True)


def why_not(flags: int) -> str:
    """Return why a process cannot have such namespaces; empty if it can."""
    pid = os.fork()
    if pid == 0:
        os._exit(ctypes.get_errno() if _libc.unshare(flags) else 0)
    _, status = os.waitpid(pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        return f"namespaces cannot be made here: {os.strerror(code)}"
    return ""


def _unshare(flags: int) -> None:
    if _libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")


def _mount(kind: str, where: str, flags: int = 0, options: str = "") -> None:
    words = (kind.encode(), where.encode(), kind.encode(), flags, options.encode())
    if _libc.mount(*words):
        raise OSError(ctypes.get_errno(), f"mount {where}")


def private_mounts() -> None:
    """Have mounts of this process's own from now on."""
    _unshare(MOUNTS)
    _mount("none", "/", _MS_REC | _MS_PRIVATE)


def small_shm(size: int) -> None:
    """Put a tmpfs of this size in the place of /dev/shm; for the calling process only."""
    private_mounts()
    _mount("tmpfs", "/dev/shm", 0, f"size={size}")


def fill(directory: str) -> None:
    """Write into a directory until there is no space left."""
    with contextlib.suppress(OSError), open(Path(directory, "full"), "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def live_in(flags: int) -> None:
    """Go on in a child process that is in new namespaces, of processes with their own /proc, or of time.

    The calling process waits for it, passes signals on, and ends as it does.
    """
    _unshare(flags)
    if flags & TIME:
        Path("/proc/self/timens_offsets").write_text(f"monotonic {_AHEAD_S} 0\nboottime {_AHEAD_S} 0\n")
    pid = os.fork()
    if pid == 0:
        if flags & PIDS:
            _mount("none", "/", _MS_REC | _MS_PRIVATE)
            _mount("proc", "/proc")
        return
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
