"""Folders for temporary files that do not stay when the process that made them is killed.

Such a folder is locked as long as the process lives: the kernel drops the lock with it. Who makes the next
folder with the same prefix removes those of this user that nobody has locked. The invariant: **a folder that
its maker uses is locked**. The maker locks it and looks then whether it is still there; so one that another
process had removed before it was locked is not used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_ONLY_FOLDERS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """Yield a new folder for this user alone; remove it at the end, and before that the folders left behind.

    Args:
        prefix: of its name. Only :func:`temporary_folder` may make folders with this prefix.

    Raises:
        OSError: there is no place for temporary files.
    """
    _remove_unlocked(prefix)
    path, descriptor = _locked_folder(prefix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _locked_folder(prefix: str) -> tuple[str, int]:
    while True:
        path = tempfile.mkdtemp(prefix=prefix)
        # Another process may remove it, or have it locked for that, before this one has locked it.
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            descriptor = os.open(path, _ONLY_FOLDERS)
            try:
                _lock(descriptor)
                os.stat(path)
            except BaseException:
                os.close(descriptor)
                raise
            return path, descriptor


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # where there are none, nobody removes what others have left
            raise


def _remove_unlocked(prefix: str) -> None:
    """Remove the folders of this user with a prefix that nobody uses."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is in use, or another process has just removed it
            descriptor = os.open(folder, _ONLY_FOLDERS)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
