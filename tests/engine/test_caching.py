"""The files of compiled functions: whose are read, how they are written, and that none is needed."""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core.caching import NullCache

import torchestra.engine
from torchestra.engine.native import compilation, kernel_cache
from torchestra.system.cache_directories import Directory, prepare

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


class Trap:
    """Does something when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def double(value: int) -> int:
    return value + value


def compiled() -> Any:
    function = numba.njit(double)
    compilation.use_caches([function])
    function.compile((numba.types.int64,))
    assert function(4) == 8
    return function


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this module's functions are kept, in a directory of the test's own."""
    place = Directory(tmp_path / "cache", "the test")
    assert not prepare(place.folder(Path(compilation.__file__)))
    monkeypatch.setattr(kernel_cache, "chosen_directory", lambda: place)
    monkeypatch.setattr(compilation, "chosen_directory", lambda: place)
    yield place.folder(Path(__file__))
    kernel_cache.say_once.cache_clear()
    kernel_cache._usable.cache_clear()


def test_files_are_for_this_user_alone_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        assert compiled().stats.cache_misses
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert compiled().stats.cache_hits, "and they are read again"


@pytest.mark.parametrize("how", ["others can write it", pytest.param("another's", marks=AS_ROOT), "a link"])
def test_a_poisoned_file_is_not_read(folder: Path, tmp_path: Path, how: str) -> None:
    compiled()
    (index,) = folder.glob("*.nbi")
    poison = tmp_path / "poison"
    poison.write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    if how == "a link":
        index.unlink()
        index.symlink_to(poison)
    else:
        index.write_bytes(poison.read_bytes())
        if how == "another's":
            os.chown(index, 4711, 4711)
        else:
            index.chmod(0o666)
    assert compiled().stats.cache_misses
    assert not (tmp_path / "ran").exists()
    assert compiled().stats.cache_hits, "it has been replaced"


def test_half_a_file_is_compiled_anew(folder: Path) -> None:
    compiled()
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    assert compiled().stats.cache_misses
    assert compiled().stats.cache_hits


def test_a_full_disk_is_told_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    compiled()
    compiled()
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert f"cannot be kept in {folder} (No space left on device)" in said
    assert not list(folder.iterdir())


def test_without_a_directory_functions_are_compiled_in_memory(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_cache, "choose", lambda: (None, ["/x: Read-only file system"]))
    kernel_cache.chosen_directory.cache_clear()
    try:
        assert isinstance(compiled()._cache, NullCache)
        with compilation.compiling("something"):
            pass
        said = capfd.readouterr().err
        assert said.count("\n") == 1
        assert "compiles them in memory" in said
        assert "/x: Read-only file system" in said
    finally:
        kernel_cache.chosen_directory.cache_clear()
        kernel_cache.say_once.cache_clear()


# -- the lock


@pytest.fixture
def held(folder: Path) -> Iterator[Path]:
    """The folder of the notes of what is compiled, while somebody has the lock."""
    place = kernel_cache.chosen_directory()
    assert place is not None
    notes = place.folder(Path(compilation.__file__))
    lock = notes / f"torchestra-{compilation._INSTALLATION}.lock"
    with open(lock, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write("4711 on another host")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        yield notes


def test_what_is_compiled_is_read_though_somebody_has_the_lock(
    held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(compilation, "_LOCK_SECONDS", -1.0)
        with compilation.compiling("a thing"):
            pass
    monkeypatch.setattr(compilation, "_lock", lambda *_: pytest.fail("asked for the lock"))
    with compilation.compiling("a thing"):
        pass


def test_who_waits_says_for_whom_and_goes_on_at_last(
    held: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compilation, "_QUIET_SECONDS", 0.01)
    monkeypatch.setattr(compilation, "_LOCK_SECONDS", 0.2)
    with compilation.compiling("a thing"):
        pass
    waiting, going_on = capfd.readouterr().err.splitlines()
    assert "waiting for process 4711 on another host" in waiting
    assert "compiling beside it" in going_on


def test_the_lock_names_who_has_it_and_is_let_go_in_children_too(folder: Path) -> None:
    with compilation.compiling("a thing"):
        place = kernel_cache.chosen_directory()
        assert place is not None
        (lock,) = place.folder(Path(compilation.__file__)).glob("*.lock")
        assert lock.read_text().startswith(f"{os.getpid()} on ")
        (descriptor,) = [int(each) for each in os.listdir("/proc/self/fd") if _leads_to(int(each), lock)]
        child = os.dup(descriptor)  # what a child that is forked now would have
    with open(lock) as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(child)


def _leads_to(descriptor: int, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
    except OSError:
        return False


def test_a_big_endian_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(ImportError, match="needs a little-endian processor"):
        importlib.reload(torchestra.engine)
