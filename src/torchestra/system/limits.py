"""Errors that say which limit of the system is in the way: of threads, or of open files."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Iterator

from torchestra.errors import DistBackendError

_LOOK_SECONDS = 0.2
_SPARE_DESCRIPTORS = 512
"""For what the program opens besides."""


class _NoFirstSteps(Exception):
    """A thread has ended before it ran."""


class _Started(threading.Event):
    """The event for which ``Thread.start()`` waits, with an end to that where the thread has ended before.

    Where there is no memory for a thread's first steps, Python lets it end, and nobody sets the event. But
    what it calls first is freed then, which needs no memory: a weak reference to it tells.
    """

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__()
        first = thread._bootstrap  # type: ignore[attr-defined]
        self._ended: deque[object] = deque()
        self._watch = weakref.ref(first, self._ended.append)
        self._thread: threading.Thread | None = thread
        thread.__dict__["_bootstrap"] = first  # else each look there makes another one

    def wait(self, timeout: float | None = None) -> bool:
        if self._thread is not None:
            del self._thread.__dict__["_bootstrap"]
            self._thread = None
        if timeout is not None:
            return super().wait(timeout)
        while not super().wait(_LOOK_SECONDS):
            if self._ended and not self.is_set():
                raise _NoFirstSteps
        return True


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        DistBackendError: the system allows this process, user or container no more threads, or there is no
            memory for it.
    """
    if thread.ident is None:
        thread._started = _Started(thread)  # type: ignore[attr-defined]
    try:
        thread.start()
    except _NoFirstSteps:
        getattr(threading, "_limbo", {}).pop(thread, None)
        raise DistBackendError(
            f"thread {thread.name!r} cannot be started: it ended in its first steps, as this process has no"
            f" memory left (ulimit -v: {_limit_text(resource.RLIMIT_AS)}), or its container has none"
        ) from None
    except RuntimeError as error:
        thread.__dict__.pop("_bootstrap", None)
        if thread.ident is not None:
            raise  # it was started before
        raise DistBackendError(
            f"thread {thread.name!r} cannot be started ({error}): {_why_no_thread()}"
        ) from error


def _why_no_thread() -> str:
    if _is_apart_from_its_children():
        return (
            "this process has unshared the PID namespace of its children, and may start no thread then; fork"
            " a process in it, and call torchestra there"
        )
    return (
        "this user has as many processes and threads as it may (ulimit -u:"
        f" {_limit_text(resource.RLIMIT_NPROC)}), or the container has (its pids limit)"
    )


def _is_apart_from_its_children() -> bool:
    of_children = "/proc/self/ns/pid_for_children"
    if not os.path.lexists(of_children):
        return False  # no /proc, or a system without such namespaces
    try:
        return os.readlink("/proc/self/ns/pid") != os.readlink(of_children)
    except FileNotFoundError:  # before the first process of the other one
        return True


def no_descriptors(what: str) -> DistBackendError:
    """Return the error for ``what``, for which no file descriptor is left."""
    return DistBackendError(
        f"{what}: process {os.getpid()} has as many files open as it may (ulimit -n:"
        f" {_limit_text(resource.RLIMIT_NOFILE)}); raise the limit, or have fewer ranks or groups"
    )


@contextlib.contextmanager
def naming_limits(what: str) -> Iterator[None]:
    """Replace the system's error that no descriptors are left, if the block raises it, by a helpful one."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise no_descriptors(what) from error


def check_free_descriptors(count: int) -> None:
    """Check that this process can open ``count`` files, while it may still have one to tell others if not.

    Raises:
        OSError: EMFILE or ENFILE, otherwise.
    """
    found: list[int] = []
    try:
        for _ in range(count):
            found.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for descriptor in found:
            os.close(descriptor)


def allow_descriptors(count: int) -> None:
    """Raise this process's own limit of open files, if ``count`` more would come near it, as far as it may.

    The usual limit, of 1,024, is far below what the system allows, for programs that call ``select()``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/dev/fd")) + count + _SPARE_DESCRIPTORS
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # who needs them says so when there are none
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _limit_text(limit: int) -> str:
    soft, _ = resource.getrlimit(limit)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
