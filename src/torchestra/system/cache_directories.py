"""Directories for compiled kernels, into which only this user, or root, can put anything.

A compiled kernel is code. So a directory is used only if each part of its path belongs to this user or to
root, no part can be written by others (except parent directories with the sticky bit, such as /tmp, in which
only the owner of an entry can replace it), and this process can write it. Otherwise the next candidate is
tried, and if none is left kernels are compiled in memory: a cache is not required.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NATIVE = Path(__file__).parents[1] / "engine" / "native"
_MAX_LINKS = 40
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Directory(NamedTuple):
    """A directory for compiled kernels.

    Attributes:
        why: the setting or the location that it comes from, for messages.
    """

    folder: Path
    why: str


def candidates() -> Iterator[Directory]:
    """Yield the directories to try, best first; each is for this installation only."""
    own = f"native_{hashlib.sha256(str(_NATIVE).encode()).hexdigest()[:16]}"
    if directory := os.environ.get("TORCHESTRA_CACHE_DIR"):
        yield Directory(Path(directory).absolute() / own, "TORCHESTRA_CACHE_DIR")
    yield Directory(_NATIVE / "__pycache__", "the installation")
    home = os.path.expanduser("~")  # stays "~" where a user has none
    for cache, why in (
        (os.environ.get("XDG_CACHE_HOME", ""), "XDG_CACHE_HOME"),
        (os.path.join(home, ".cache"), "the home directory"),
    ):
        if os.path.isabs(cache):
            yield Directory(Path(cache, "torchestra", own), why)
    with contextlib.suppress(OSError):  # no such directory can be written
        yield Directory(Path(tempfile.gettempdir(), _own_name(), own).absolute(), "temporary files")
    yield Directory(Path("/dev/shm", _own_name(), own), "shared memory")


def _own_name() -> str:
    return f"torchestra-cache-{os.geteuid()}"


def choose() -> tuple[Directory | None, list[str]]:
    """Return the first usable directory, made if missing, and why those before it cannot be used."""
    refused: list[str] = []
    for candidate in candidates():
        if not (reason := prepare(candidate.folder)):
            return candidate, refused
        refused.append(f"{candidate.folder} ({candidate.why}): {reason}")
    return None, refused


def prepare(folder: Path) -> str:
    """Make a directory, for this user alone, if missing; return why it cannot be used, or an empty text."""
    try:
        missing_ones = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
        if missing_ones and (reason := distrust(missing_ones[-1].parent, is_parent=True)):
            return reason
        for missing in reversed(missing_ones):
            with contextlib.suppress(FileExistsError):  # another rank is quicker
                missing.mkdir(mode=0o700)
        if reason := distrust(folder):
            return reason
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def distrust(folder: Path, *, is_parent: bool = False) -> str:
    """Return why others could put files into a directory, or replace it; an empty text if they cannot.

    Args:
        is_parent: the directory is only a parent of the one to use.

    Raises:
        OSError: it does not exist, or this process may not inspect it.
    """
    here, rest = Path("/"), list(folder.absolute().parts[1:])
    links = 0
    while True:
        status = os.lstat(here)
        if stat.S_ISLNK(status.st_mode):
            if not _is_ours(status.st_uid):
                return f"{here} is a link that belongs to user {status.st_uid}"
            links += 1
            if links > _MAX_LINKS:
                return f"{here} is a link to itself"
            target = Path(os.readlink(here))
            here, rest = (Path("/") if target.is_absolute() else here.parent), [*_parts(target), *rest]
        elif not stat.S_ISDIR(status.st_mode):
            return f"{here} is no directory"
        elif reason := _distrusted(here, status, is_last=not rest and not is_parent):
            return reason
        if not rest:
            return ""
        part = rest.pop(0)
        here = here.parent if part == ".." else here / part


def _parts(path: Path) -> list[str]:
    return list(path.parts[1:] if path.is_absolute() else path.parts)


def _distrusted(path: Path, status: os.stat_result, *, is_last: bool) -> str:
    owner = status.st_uid
    if not _is_ours(owner) and (is_last or owner != _unmapped_root()):
        return f"{path} belongs to user {owner}"
    is_sticky = bool(status.st_mode & stat.S_ISVTX) and not is_last
    if status.st_mode & _OTHERS_WRITE and not is_sticky:
        return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def can_be_trusted(status: os.stat_result) -> bool:
    """Return whether nobody but this user and root can have written a file."""
    mode = status.st_mode
    return stat.S_ISREG(mode) and _is_ours(status.st_uid) and not mode & _OTHERS_WRITE


def _is_ours(owner: int) -> bool:
    return owner in (0, os.geteuid())


def _unmapped_root() -> int:
    """Return the owner that a user namespace without the host's root shows for root's directories; or -1.

    Other users that the namespace does not map have the same number, so trust it only for parent
    directories: "/" and "/home" have to belong to somebody.
    """
    try:
        known = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if any(outside == 0 for _, outside, _ in known):
            return -1
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return -1
