"""What Numba has compiled, kept in files that only this user, or root, can have written.

Numba's own caches take any directory that can be written, unpickle whatever they find there, raise where
there is none, and where a disk is full. These keep the same files, in directories that cache_directories.py
has chosen; whatever cannot be read or written is compiled anew, in memory.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, NullCache

from torchestra.system.cache_directories import Directory, can_be_trusted, choose, prepare

__all__ = ["cache_of", "chosen_directory", "open_own", "say_once"]

_UNREADABLE = (OSError, EOFError, pickle.UnpicklingError, ValueError, AttributeError, ImportError, IndexError)


@functools.cache
def say_once(text: str) -> None:
    """Tell the user on stderr; of the ranks of a host, the first one does."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"torchestra: {text}", file=sys.stderr, flush=True)


@functools.cache
def chosen_directory() -> Directory | None:
    """Return where this process keeps compiled kernels; None: in memory only."""
    place, refused = choose()
    named = os.environ.get("NUMBA_CACHE_DIR") and place is not None and place.why != "NUMBA_CACHE_DIR"
    if place is None:
        say_once(
            "no directory can be used to keep compiled kernels, so every process compiles them in memory,"
            f" which takes some 10 seconds ({'; '.join(refused)})"
        )
    elif named:
        say_once(f"compiled kernels are kept in {_named(place)}, not in {refused[0]}")
    elif place.why in ("temporary files", "shared memory"):
        say_once(f"compiled kernels are kept in {_named(place)} until that is cleared: {'; '.join(refused)}")
    return place


def _named(place: Directory) -> str:
    return place.why if place.root is None else str(place.root)


@functools.cache
def _usable(folder: Path) -> bool:
    reason = prepare(folder)
    if reason:
        say_once(f"{folder} cannot be used to keep compiled kernels ({reason}); they are compiled in memory")
    return not reason


def cache_of(function: Any) -> Any:
    """Return the cache of what is compiled of a function."""
    place = chosen_directory()
    if place is None:
        return NullCache()
    source = Path(function.__code__.co_filename)
    return _Cache(function) if _usable(place.folder(source)) else NullCache()


def open_own(path: str | Path, flags: int) -> int:
    """Open a file of the cache, made for this user alone where there is none.

    Raises:
        OSError: it cannot be, or others may have written it.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if can_be_trusted(os.fstat(descriptor)):
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} belongs to another user, or others can write it")


class _Locator:
    """Says where the files of a function are, and of which source they are."""

    def __init__(self, function: Any, source: str) -> None:
        place = chosen_directory()
        assert place is not None, "asked before"
        self._py_file = source
        self._folder = str(place.folder(Path(source)))
        self._line = str(function.__code__.co_firstlineno)

    def get_cache_path(self) -> str:
        return self._folder

    def ensure_cache_path(self) -> None:
        Path(self._folder).mkdir(mode=0o700, exist_ok=True)

    def get_source_stamp(self) -> str:
        return _stamp(self._py_file)

    def get_disambiguator(self) -> str:
        return self._line


@functools.cache
def _stamp(source: str) -> str:
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()


class _Implementation(CompileResultCacheImpl):
    def __init__(self, function: Any) -> None:
        # Not Numba's own, which asks the environment for places too (NUMBA_CACHE_LOCATOR_CLASSES).
        source = function.__code__.co_filename
        self._lineno = function.__code__.co_firstlineno
        self._locator = _Locator(function, source)
        name = f"{Path(source).stem}.{function.__qualname__}"
        self._filename_base = self.get_filename_base(name, getattr(sys, "abiflags", ""))


class _Files(IndexDataCacheFile):
    """The index of a function, and a file for each of its compiled forms."""

    def _load_index(self):
        try:
            with _opened(self._index_path) as file:
                version = pickle.load(file)
                if version != self._version:
                    return {}
                stamp, overloads = pickle.load(file)
        except _UNREADABLE:
            return {}
        return overloads if stamp == self._source_stamp else {}

    def _load_data(self, name):
        try:
            with _opened(self._data_path(name)) as file:
                return pickle.load(file)
        except _UNREADABLE as error:
            raise OSError(f"{name} cannot be read") from error  # which means: there is none

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[BinaryIO]:
        temporary = f"{filepath}.tmp.{uuid.uuid4().hex[:16]}"
        try:
            with os.fdopen(open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                yield file
            os.replace(temporary, filepath)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _opened(path: str) -> BinaryIO:
    return os.fdopen(open_own(path, os.O_RDONLY), "rb")


class _Cache(FunctionCache):
    _impl_class = _Implementation

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        locator = self._impl.locator
        self._cache_file = _Files(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=locator.get_source_stamp(),
        )

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except OSError as error:
            say_once(
                f"compiled kernels cannot be kept in {self._cache_path} ({error.strerror or error}); the next"
                " process compiles them anew"
            )
