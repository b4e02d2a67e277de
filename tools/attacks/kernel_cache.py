"""Another user's files where the cache of compiled kernels is looked for: they are code, if they are read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.attacks import Outcome, _planter
from tools.attacks._target import NOBODY, root_only

from torchestra.engine.native import kernel_cache

hindrance = root_only

_KEY = "compiled"
# What NUMBA_CACHE_DIR is, below the directory of the attack, and what the attacker has done there.
_PLACES = {
    "theirs": "a directory of theirs",
    "link-to-theirs": "a link of one's own to a directory of theirs",
    "through-theirs/cache": "a directory of one's own below one of theirs",
    "for-all": "a directory that all can write",
    "for-a-group": "a directory that their group can write",
    "parent-for-all/cache": "a directory that they put in the place of one's own",
    "sticky/cache": "a name that they take first, in a directory for all",
    "sticky-link/cache": "a link of theirs to a directory of one's own",
    "their-files": "files of theirs in a directory of one's own",
    "linked-files": "links to files of theirs",
    "writable-files": "files that they can write",
    "writable-data": "compiled code that they can write, in an index of one's own",
    "pipe": "a pipe in the place of a file",
}


class _Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.makedirs, (str(self._mark), 0o777, True)


def attack(seconds: float) -> Outcome:
    """Load from all places, again and again, while somebody plants there."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as name, _own_choice():
        base = Path(name)
        base.chmod(0o755)
        mark = base / "sprung"
        trap = pickle.dumps(_Trap(mark))
        files = _names(base / "names")
        _lay_out(base, files, trap)
        _load(base / "own")
        if not mark.exists():
            raise RuntimeError("a trap of one's own does not spring: this attack cannot find anything")
        mark.rmdir()
        order = {"user": NOBODY, "base": name, "files": files, "trap": trap.hex()}
        with subprocess.Popen(
            [sys.executable, "-S", _planter.__file__, json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as planter:
            assert planter.stdout is not None
            if planter.stdout.readline() != "planted\n":
                raise RuntimeError("the planter failed, see above")
            until = time.monotonic() + seconds
            while not outcome.tried or time.monotonic() < until:
                _load_from_everywhere(base, mark, outcome)
            said, _ = planter.communicate("", timeout=60)
        outcome.tried["files planted"] = json.loads(said)["files"]
    return outcome


def _load_from_everywhere(base: Path, mark: Path, outcome: Outcome) -> None:
    for where, what in _PLACES.items():
        found = _load(base / where)
        outcome.tried["loads"] += 1
        outcome.refused["loads"] += not found
        outcome.expect(not mark.exists(), f"{what}: what they planted was unpickled")
        outcome.expect(not found, f"{what}: {found!r} was loaded")
        if mark.exists():
            mark.rmdir()
    with contextlib.suppress(OSError):  # made by the load above, if it came first: the race goes on
        shutil.rmtree(base / "sticky" / "cache")


def _function(value: int) -> int:
    return value


def _load(root: Path) -> Any:
    """What a process finds of a compiled function, if NUMBA_CACHE_DIR is this."""
    os.environ["NUMBA_CACHE_DIR"] = str(root)
    _forget()
    with contextlib.redirect_stderr(io.StringIO()):
        return getattr(kernel_cache.cache_of(_function), "_cache_file", _NoFile()).load(_KEY)


class _NoFile:
    def load(self, _: str) -> None:
        """Nothing is kept in files."""


def _forget() -> None:
    """What a process finds out once."""
    for cached in (kernel_cache.chosen_directory, kernel_cache._usable, kernel_cache.say_once):
        cached.cache_clear()


@contextlib.contextmanager
def _own_choice() -> Iterator[None]:
    """Put back where this process keeps its kernels."""
    before = os.environ.get("NUMBA_CACHE_DIR")
    try:
        yield
    finally:
        os.environ.pop("NUMBA_CACHE_DIR", None)
        if before is not None:
            os.environ["NUMBA_CACHE_DIR"] = before
        _forget()


def _names(root: Path) -> list[str]:
    """The index of the function, and its data, below a directory for caches."""
    os.environ["NUMBA_CACHE_DIR"] = str(root)
    _forget()
    file = kernel_cache.cache_of(_function)._cache_file
    return [str(Path(path).relative_to(root)) for path in (file._index_path, file._data_path(_data(file)))]


def _data(file: Any) -> str:
    return str(file._data_name(1))


def _lay_out(base: Path, files: list[str], trap: bytes) -> None:
    """What there is before the attacker comes: his directories, and one's own with something wrong."""
    for name in ("theirs", "through-theirs", "sticky-link", "for-all", "for-a-group", "sticky"):
        (base / name).mkdir()
    os.chown(base / "theirs", NOBODY, NOBODY)
    _fill(base / "own", files, trap)
    _fill(base / "through-theirs" / "cache", files, trap)
    os.chown(base / "through-theirs", NOBODY, NOBODY)
    (base / "link-to-theirs").symlink_to(base / "theirs", target_is_directory=True)
    (base / "for-all").chmod(0o777)
    os.chown(base / "for-a-group", 0, NOBODY)
    (base / "for-a-group").chmod(0o770)
    _fill(base / "parent-for-all" / "cache", files, trap)
    (base / "parent-for-all").chmod(0o777)
    (base / "sticky").chmod(0o1777)
    (base / "sticky-link").chmod(0o1777)
    (base / "sticky-link" / "cache").symlink_to(base / "own", target_is_directory=True)
    os.lchown(base / "sticky-link" / "cache", NOBODY, NOBODY)
    index, data = files
    for name in ("their-files", "writable-files", "writable-data"):
        _fill(base / name, files, trap)
    for name in files:
        os.chown(base / "their-files" / name, NOBODY, NOBODY)
        (base / "writable-files" / name).chmod(0o666)
    os.environ["NUMBA_CACHE_DIR"] = str(base / "writable-data")
    _forget()
    file = kernel_cache.cache_of(_function)._cache_file
    file._save_index({_KEY: _data(file)})
    (base / "writable-data" / data).chmod(0o666)
    for name in ("linked-files", "pipe"):
        (base / name / index).parent.mkdir(parents=True)
    (base / "linked-files" / index).symlink_to(base / "theirs" / index)
    os.mkfifo(base / "pipe" / index, 0o600)


def _fill(root: Path, files: list[str], trap: bytes) -> None:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(trap)
