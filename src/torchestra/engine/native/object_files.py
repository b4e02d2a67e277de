"""The object file of the kernels on the disk: which is right, who may have written it, and who makes it.

Its name is made of all that it depends on: the contents of the sources, the version of LLVM, the processor,
and how long the header of Python's objects is (longer where Python is built to run without its lock).
So what is found is right, loading takes no lock, and several versions, processors and users get along. A
file is written under another name and renamed, begins with the digest of the rest, and is read only if
nobody but this user and root can have written it. Where nothing can be kept each process compiles in
memory.

A wheel brings such files for kinds of processors, and these do where none was compiled for the very one.

Who finds none compiles it. Several that come at once would all do the same work, so the first takes a lock,
and the others look for what it makes; when that takes too long (it was stopped, or is on another host) they
compile, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from torchestra.engine.native.target import LEVELS, Target
from torchestra.system.cache_directories import can_be_trusted, candidates, choose, distrust

PREBUILT = Path(__file__).parent / "objects"
"""Where a wheel has object files for several kinds of processors."""
_ENGINE = Path(__file__).parents[1]
_SOURCES = (
    "layout.py",
    "entry_layout.py",
    "entries/*.py",
    "kernels/*.py",
    "native/*.py",
    "p2p/*.py",
    "recorder/*.py",
)
# Before any module with kernels is: torchestra.engine itself imports this one.
_IMPORTED = time.time()
_USUAL_HEADER = 16
_DIGEST_BYTES = hashlib.sha256().digest_size
_QUIET_SECONDS = 2.0
_LOCK_SECONDS = 60.0
_POLL_SECONDS = 0.02


@functools.cache
def say_once(text: str) -> None:
    """Tell the user on stderr; of the ranks of a host, the first one does."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"torchestra: {text}", file=sys.stderr, flush=True)


def sources_digest() -> str:
    """Return a digest that changes whenever a file does that kernels, or their constants, are written in."""
    digest = hashlib.sha256()
    for source in _sources():
        text = source.read_bytes()
        digest.update(f"{source.relative_to(_ENGINE)} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:24]


def _sources() -> list[Path]:
    return sorted(source for pattern in _SOURCES for source in _ENGINE.glob(pattern))


def object_name() -> str:
    """Return the name of the file for these sources on this processor."""
    import llvmlite  # not for commands that load nothing
    import llvmlite.binding as llvm

    depends = (llvmlite.__version__, llvm.llvm_version_info, *Target.host(), object.__basicsize__)
    return f"{_stem()}{hashlib.sha256(repr(depends).encode()).hexdigest()[:16]}.o"


def _stem() -> str:
    return f"torchestra-kernels-{sources_digest()}-"


def find_or_make(build: Callable[[], bytes]) -> bytes:
    """Return the object file for this processor: read, or that of the wheel, or compiled and kept."""
    name = object_name()
    return find(name) or _prebuilt() or _make(name, build)


def make(build: Callable[[], bytes]) -> None:
    """Compile the object file for exactly this processor and keep it, where that has not been done."""
    name = object_name()
    if find(name) is None:
        _make(name, build)


def keep_prebuilt(level: str, data: bytes) -> Path:
    """Write an object file for a kind of processors, which a wheel brings; return where."""
    PREBUILT.mkdir(exist_ok=True)
    path = _prebuilt_path(level)
    path.write_bytes(hashlib.sha256(data).digest() + data)
    return path


def prebuilt_level() -> str | None:
    """Return the best kind of processors, this one among them, that the wheel has an object file for."""
    host = Target.host()
    with contextlib.suppress(OSError):
        if not distrust(PREBUILT):
            for level, target in LEVELS.items():
                if host.runs(target) and _read(_prebuilt_path(level)) is not None:
                    return level
    return None


def _prebuilt() -> bytes | None:
    level = prebuilt_level()
    return None if level is None else _read(_prebuilt_path(level))


def _prebuilt_path(level: str) -> Path:
    header = object.__basicsize__
    return PREBUILT / f"{_stem()}{level}{'' if header == _USUAL_HEADER else f'-header{header}'}.o"


def find(name: str) -> bytes | None:
    """Return the contents of the first object file of a name that can be trusted."""
    return next((data for _, data in _found(name)), None)


def directory_of(name: str) -> Path | None:
    """Return where :func:`find` finds it."""
    return next((folder for folder, _ in _found(name)), None)


def _found(name: str) -> Iterator[tuple[Path, bytes]]:
    for directory in candidates():
        with contextlib.suppress(OSError):
            if not distrust(directory.folder) and (data := _read(directory.folder / name)) is not None:
                yield directory.folder, data


def _make(name: str, build: Callable[[], bytes]) -> bytes:
    directory, refused = choose()
    if directory is None:
        say_once(
            "no directory can be used to keep compiled kernels, so every process compiles them in memory,"
            f" which takes some seconds ({'; '.join(refused)})"
        )
        return build()
    if directory.why in ("temporary files", "shared memory"):
        say_once(
            f"compiled kernels are kept in {directory.folder} until that is cleared: {'; '.join(refused)}"
        )
    path = directory.folder / name
    with _alone(path) as made_meanwhile:
        if made_meanwhile is not None:
            return made_meanwhile
        say_once("compiling its kernels for this machine, once; that takes 6 seconds of a core that is free")
        began = time.monotonic()
        data = build()
        say_once(f"its kernels are compiled, after {time.monotonic() - began:.0f} s")
        if any(source.stat().st_ctime > _IMPORTED for source in _sources()):
            say_once(
                "its sources have changed since this program began, so its compiled kernels are not kept"
            )
        else:
            _write(path, data)
    return data


def open_own(path: str | Path, flags: int) -> int:
    """Open a file, made for this user alone where there is none.

    Raises:
        OSError: it cannot be, or others may have written it.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if can_be_trusted(os.fstat(descriptor)):
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} belongs to another user, or others can write it")


def _read(path: Path) -> bytes | None:
    """Return what was written; None, if it is not there, not ours, or not whole."""
    try:
        with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
            content = file.read()
    except OSError:
        return None
    data = content[_DIGEST_BYTES:]
    return data if data and hashlib.sha256(data).digest() == content[:_DIGEST_BYTES] else None


def _write(path: Path, data: bytes) -> None:
    """Keep an object file, as a whole or not at all, and remove those of other sources."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:16]}.tmp")
    try:
        with os.fdopen(open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(temporary, path)
        for old in path.parent.glob("torchestra-kernels-*.o"):
            if not old.name.startswith(_stem()):  # hosts with other processors may share the directory
                old.unlink(missing_ok=True)
    except OSError as error:
        say_once(
            f"compiled kernels cannot be kept in {path.parent} ({error.strerror or error}); the next process"
            " compiles them anew"
        )
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bytes | None]:
    """Hold the lock of whoever compiles, or get what another process has compiled meanwhile.

    Without the lock, after a while, or where there are no such locks: nothing worse happens than that the
    same is compiled twice.
    """
    try:
        lock = open_own(path.with_name("torchestra-kernels.lock"), os.O_RDWR | os.O_CREAT)
    except OSError:
        yield None
        return
    try:
        made = _lock_or_find(lock, path)
        if made is None:
            with contextlib.suppress(OSError):  # a full disk
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()} on {platform.node()}".encode(), 0)
        yield made
    finally:
        with contextlib.suppress(OSError):
            # Not only closed: a child that was forked meanwhile has the descriptor too.
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _lock_or_find(lock: int, path: Path) -> bytes | None:
    """Wait for the lock, or for what its holder makes; None: it is this process that compiles."""
    began, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _read(path)  # made between this process's look and its lock, perhaps
        except BlockingIOError:
            waited = time.monotonic() - began
        except OSError:  # a file system without locks
            return None
        if (made := _read(path)) is not None:
            return made
        if waited > _LOCK_SECONDS:
            say_once(f"process {_holder(lock)} still compiles the kernels; compiling at the same time")
            return None
        if waited > _QUIET_SECONDS and not told:
            told = True
            say_once(f"waiting for process {_holder(lock)}, which compiles the kernels")
        time.sleep(_POLL_SECONDS)


def _holder(lock: int) -> str:
    return os.pread(lock, 200, 0).decode("ascii", "replace") or "unknown"
