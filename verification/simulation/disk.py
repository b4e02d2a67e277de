"""A simulated disk: it is full, its writes and its flushes fail, and it forgets what was not flushed.

The files are real ones, in a directory of the run's own; reading them is left alone. What changes them goes
through :class:`Disk`, which replaces ``open`` and the functions of ``os``, and keeps beside each file and
each directory what is certain to be on the disk. As POSIX has it, a file's contents are certain after
``fsync`` of the file, and its name after ``fsync`` of the directory. Of what is not, a power failure keeps
in each directory the first few changes, and of a file the first few writes, the last of them in part.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

_OPEN, _FSTAT = os.open, os.fstat
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Died(BaseException):
    """The simulated process is gone: nothing that it still does has an effect."""


class Node:
    """A file or a directory; ``pending`` are changes that a power failure may undo.

    Attributes:
        names: of a directory: what is in it, for certain.
        data: of a file: its contents, for certain.
    """

    def __init__(self, *, is_directory: bool) -> None:
        self.is_directory = is_directory
        self.names: dict[str, Node] = {}
        self.data = b""
        self.pending: list[Callable[[float], None]] = []

    def write(self, offset: int, data: bytes) -> None:
        """Write into a file; a power failure may leave a part of it."""

        def apply(part: float) -> None:
            kept = data[: int(len(data) * part)]
            padded = self.data.ljust(offset, b"\0")
            self.data = padded[:offset] + kept + padded[offset + len(kept) :]

        self.pending.append(apply)

    def cut(self, size: int) -> None:
        """Cut a file off."""

        def apply(part: float) -> None:
            if part == 1.0:
                self.data = self.data[:size].ljust(size, b"\0")

        self.pending.append(apply)

    def change(self, *changes: tuple[str, Node | None]) -> None:
        """Set names of a directory, all at once; None takes one away."""

        def apply(part: float) -> None:
            for name, node in changes if part == 1.0 else ():
                if node is None:
                    self.names.pop(name, None)
                else:
                    self.names[name] = node

        self.pending.append(apply)

    def flush(self) -> None:
        """Make all changes certain."""
        self.keep(len(self.pending), 0.0)

    def keep(self, count: int, part: float) -> None:
        """Make the first changes certain, and a part of the next, and forget the others."""
        for each in self.pending[:count]:
            each(1.0)
        for each in self.pending[count : count + 1]:
            each(part)
        self.pending = []


class Disk:
    """The files below a directory.

    Args:
        root: the directory, which exists and is empty.
        choices: decide what a power failure keeps.

    Attributes:
        room: how many bytes the files may have together.
        dies_in: after how many more changes the process dies; None: never.
        fails_to_flush: the next flush fails, and what it was to bring to the disk is lost.
        events: the changes, for people.
    """

    def __init__(self, root: Path, choices: random.Random) -> None:
        self.root, self.choices = root, choices
        self.room = 1 << 40
        self.dies_in: int | None = None
        self.fails_to_flush = False
        self.is_dead = False
        self.events: list[str] = []
        self._nodes = {root.stat().st_ino: Node(is_directory=True)}

    def used(self) -> int:
        """Return how many bytes the files have."""
        return sum(each.stat().st_size for each in self.root.rglob("*") if each.is_file())

    def revive(self) -> None:
        """Begin another process, after the death of one; all files are as that left them."""
        self.is_dead, self.dies_in = False, None

    def lose_power(self) -> None:
        """Forget what is not certain. The disk must not be :meth:`mounted`."""
        self.events.append("power fails")
        top = self._nodes[self.root.stat().st_ino]
        for each in self.root.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        self._nodes = {self.root.stat().st_ino: top}
        self._restore(top, self.root)
        self.revive()

    def _restore(self, node: Node, path: Path) -> None:
        node.keep(self.choices.randint(0, len(node.pending)), 0.99 * self.choices.random())
        if not node.is_directory:
            path.write_bytes(node.data)
        for name, inner in node.names.items():
            if inner.is_directory:
                (path / name).mkdir()
            self._restore(inner, path / name)
        self._nodes[path.stat().st_ino] = node

    # -- what programs call

    def _has(self, path: object) -> bool:
        return isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(self.root)

    def _step(self, what: str) -> bool:
        """Count a change; return whether the process dies in the midst of it."""
        if self.is_dead:
            raise Died
        self.events.append(what)
        if self.dies_in is None:
            return False
        self.dies_in -= 1
        self.is_dead = self.dies_in < 0
        return self.is_dead

    def _change(self, what: str) -> None:
        if self._step(what):
            self.events.append("the process dies before that")
            raise Died

    def _parent(self, path: Any) -> tuple[Node, str]:
        return self._nodes[Path(path).parent.stat().st_ino], Path(path).name

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Open a file; make it where there is none, if that is asked for."""
        if not self._has(path) or not flags & _WRITING:
            return _OPEN(path, flags, mode, dir_fd=dir_fd)
        is_new = not Path(path).exists()
        if is_new:
            self._change(f"make {Path(path).relative_to(self.root)}")
        elif self.is_dead:
            raise Died
        descriptor = _OPEN(path, flags & ~os.O_TRUNC, mode)
        if is_new:
            node = self._nodes[_FSTAT(descriptor).st_ino] = Node(is_directory=False)
            parent, name = self._parent(path)
            parent.change((name, node))
        elif flags & os.O_TRUNC:
            self.ftruncate(descriptor, 0)
        return descriptor

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        """Write at a place, or a part, if there is no room for all."""
        node = self._nodes.get(_FSTAT(descriptor).st_ino)
        content = bytes(data)
        if node is None:
            return _PWRITE(descriptor, content, offset)
        dies = self._step(f"write {len(content)} bytes")
        more = offset + len(content) - max(_FSTAT(descriptor).st_size, offset)
        if more > 0 and (missing := self.used() + more - self.room) > 0:
            content = content[: max(0, len(content) - missing)]
            if not content:
                self.events.append("no room")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if dies:
            content = content[: self.choices.randint(0, len(content))]
            self.events.append(f"the process dies after {len(content)}")
        _PWRITE(descriptor, content, offset)
        node.write(offset, content)
        if dies:
            raise Died
        return len(content)

    def write(self, descriptor: int, data: Any) -> int:
        """Write at the end of what was written."""
        if _FSTAT(descriptor).st_ino not in self._nodes:
            return _WRITE(descriptor, data)
        offset = os.lseek(descriptor, 0, os.SEEK_CUR)
        count = self.pwrite(descriptor, data, offset)
        os.lseek(descriptor, offset + count, os.SEEK_SET)
        return count

    def ftruncate(self, descriptor: int, size: int) -> None:
        node = self._nodes.get(_FSTAT(descriptor).st_ino)
        if node is not None:
            self._change(f"cut at {size}")
            node.cut(size)
        _FTRUNCATE(descriptor, size)

    def fsync(self, descriptor: int) -> None:
        """Make a file's contents certain, or a directory's names; or fail."""
        node = self._nodes.get(_FSTAT(descriptor).st_ino)
        if node is None:
            return _FSYNC(descriptor)
        self._change("flush " + ("a directory" if node.is_directory else "a file"))
        if self.fails_to_flush:
            self.fails_to_flush = False
            if not node.is_directory:
                node.pending = []  # Linux takes these pages for written
            self.events.append("that fails")
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        node.flush()
        return None

    def rename(self, old: Any, new: Any, **_: object) -> None:
        if not self._has(old):
            return _RENAME(old, new)
        self._change(f"rename {Path(old).relative_to(self.root)} to {Path(new).name}")
        node = self._nodes[Path(old).stat().st_ino]
        _RENAME(old, new)
        parent, name = self._parent(old)
        assert self._parent(new)[0] is parent, "only within one directory"
        parent.change((name, None), (Path(new).name, node))
        return None

    def _removing(self, function: Callable[..., None], path: Any, named: dict[str, Any]) -> None:
        if not self._has(path):
            return function(path, **named)
        self._change(f"remove {Path(path).relative_to(self.root)}")
        function(path)
        parent, name = self._parent(path)
        parent.change((name, None))
        return None

    def unlink(self, path: Any, **named: Any) -> None:
        self._removing(_UNLINK, path, named)

    def rmdir(self, path: Any, **named: Any) -> None:
        self._removing(_RMDIR, path, named)

    def mkdir(self, path: Any, mode: int = 0o777, **named: Any) -> None:
        if not self._has(path) or Path(path).exists():
            return _MKDIR(path, mode, **named)
        self._change(f"make {Path(path).relative_to(self.root)}")
        _MKDIR(path, mode)
        node = self._nodes[Path(path).stat().st_ino] = Node(is_directory=True)
        parent, name = self._parent(path)
        parent.change((name, node))
        return None

    def open_file(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
        """Return a file object, as ``open`` does."""
        if not self._has(file) or not set(mode) & set("wax+"):
            return _OPEN_FILE(file, mode, buffering, *rest, **named)
        flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if "w" in mode else 0)
        raw = _Raw(self, self.open(file, flags | os.O_CLOEXEC, 0o666))
        binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding="utf-8")

    def _on_thread_error(self, error: Any) -> None:
        if not self.is_dead:
            _EXCEPTHOOK(error)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """Have what is done to files below the root go through here."""
        with contextlib.ExitStack() as patches:
            for name in ("open", "pwrite", "write", "ftruncate", "fsync", "unlink", "rmdir", "mkdir"):
                patches.enter_context(mock.patch.object(os, name, getattr(self, name)))
            for name in ("rename", "replace"):
                patches.enter_context(mock.patch.object(os, name, self.rename))
            for module in (io, builtins):
                patches.enter_context(mock.patch.object(module, "open", self.open_file))
            patches.enter_context(mock.patch.object(shutil, "_use_fd_functions", False))
            patches.enter_context(mock.patch.object(threading, "excepthook", self._on_thread_error))
            yield


class _Raw(io.FileIO):
    """An open file whose writes go through the disk."""

    def __init__(self, disk: Disk, descriptor: int) -> None:
        super().__init__(descriptor, "rb+")
        self._disk = disk

    def write(self, data: Any) -> int:
        return self._disk.write(self.fileno(), data)


_PWRITE, _WRITE, _FTRUNCATE, _FSYNC = os.pwrite, os.write, os.ftruncate, os.fsync
_RENAME, _UNLINK, _RMDIR, _MKDIR = os.rename, os.unlink, os.rmdir, os.mkdir
_OPEN_FILE, _EXCEPTHOOK = io.open, threading.excepthook
