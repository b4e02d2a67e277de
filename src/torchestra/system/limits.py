"""Errors that say which limit of the system is in the way: of threads, or of open files."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Iterator

from torchestra.errors import DistBackendError


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        DistBackendError: the system allows this process, user or container no more threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if thread.ident is not None:
            raise  # it was started before
        raise DistBackendError(
            f"thread {thread.name!r} cannot be started ({error}): this user has as many processes and threads"
            f" as it may (ulimit -u: {_limit_text(resource.RLIMIT_NPROC)}), or the container has (its pids"
            " limit)"
        ) from error


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


def _limit_text(limit: int) -> str:
    soft, _ = resource.getrlimit(limit)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
