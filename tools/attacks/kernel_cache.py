"""Another user's files where the object file of the kernels is looked for: code, if they are read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tools.attacks import Outcome, _planter
from tools.attacks._target import NOBODY, root_only

from torchestra.engine.native.object_files import find
from torchestra.system.cache_directories import candidates

hindrance = root_only

_NAME = "torchestra-kernels-attacked.o"
_CODE = b"code of theirs"
_TRAP = hashlib.sha256(_CODE).digest() + _CODE
# What TORCHESTRA_CACHE_DIR is, below the directory of the attack, and what the attacker has done there.
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
    "pipe": "a pipe in the place of a file",
}


def attack(seconds: float) -> Outcome:
    """Load from all places, again and again, while somebody plants there."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as name, _own_choice():
        base = Path(name)
        base.chmod(0o755)
        file = _file_below(base).relative_to(base)
        _lay_out(base, file)
        if _load(base / "own") != _CODE:
            raise RuntimeError("a file of one's own is not loaded: this attack cannot find anything")
        order = {"user": NOBODY, "base": name, "files": [str(file)], "trap": _TRAP.hex()}
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
                _load_from_everywhere(base, outcome)
            said, _ = planter.communicate("", timeout=60)
        outcome.tried["files planted"] = json.loads(said)["files"]
    return outcome


def _load_from_everywhere(base: Path, outcome: Outcome) -> None:
    for where, what in _PLACES.items():
        found = _load(base / where)
        outcome.tried["loads"] += 1
        outcome.refused["loads"] += found is None
        outcome.expect(found is None, f"{what}: what they planted was loaded")


def _load(root: Path) -> bytes | None:
    """Return what a process finds of an object file, if TORCHESTRA_CACHE_DIR is this."""
    os.environ["TORCHESTRA_CACHE_DIR"] = str(root)
    return find(_NAME)


def _file_below(root: Path) -> Path:
    os.environ["TORCHESTRA_CACHE_DIR"] = str(root)
    return next(candidates()).folder / _NAME


@contextlib.contextmanager
def _own_choice() -> Iterator[None]:
    """Put back where this process keeps its kernels."""
    before = os.environ.get("TORCHESTRA_CACHE_DIR")
    try:
        yield
    finally:
        os.environ.pop("TORCHESTRA_CACHE_DIR", None)
        if before is not None:
            os.environ["TORCHESTRA_CACHE_DIR"] = before


def _lay_out(base: Path, file: Path) -> None:
    """Make what there is before the attacker comes: his directories, and one's own with something wrong."""
    for name in ("theirs", "through-theirs", "sticky-link", "for-all", "for-a-group", "sticky"):
        (base / name).mkdir()
    os.chown(base / "theirs", NOBODY, NOBODY)
    _fill(base / "own" / file)
    _fill(base / "through-theirs" / "cache" / file)
    os.chown(base / "through-theirs", NOBODY, NOBODY)
    (base / "link-to-theirs").symlink_to(base / "theirs", target_is_directory=True)
    (base / "for-all").chmod(0o777)
    os.chown(base / "for-a-group", 0, NOBODY)
    (base / "for-a-group").chmod(0o770)
    _fill(base / "parent-for-all" / "cache" / file)
    (base / "parent-for-all").chmod(0o777)
    (base / "sticky").chmod(0o1777)
    (base / "sticky-link").chmod(0o1777)
    (base / "sticky-link" / "cache").symlink_to(base / "own", target_is_directory=True)
    os.lchown(base / "sticky-link" / "cache", NOBODY, NOBODY)
    for name in ("their-files", "writable-files"):
        _fill(base / name / file)
    os.chown(base / "their-files" / file, NOBODY, NOBODY)
    (base / "writable-files" / file).chmod(0o666)
    for name in ("linked-files", "pipe"):
        (base / name / file).parent.mkdir(parents=True)
    (base / "linked-files" / file).symlink_to(base / "theirs" / file)
    os.mkfifo(base / "pipe" / file, 0o600)


def _fill(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_TRAP)
