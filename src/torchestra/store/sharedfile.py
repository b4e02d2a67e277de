"""The file of a FileStore: locking, replaying, appending, and counting its users.

A user appends records, and cuts off an incomplete one, only under the exclusive lock, and reads the file
only under a lock, shared or exclusive. The holder of the exclusive lock therefore sees whole records and at
most one incomplete one, left by a writer that died; the kernel drops a lock when its holder dies.

The file is opened anew for every access. So a forked child shares no lock with its parent, network file
systems show what others wrote, and a file that was deleted and recreated is noticed by its number. Each
time the file's owner and mode are checked too: nobody but this user may be able to write to it, since its
contents are trusted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

from torchestra.errors import DistStoreError, InvalidArgumentError
from torchestra.store.filelog import HEADER_SIZE, MAGIC, DamagedLogError, Kind, encode, scan
from torchestra.store.process import ProcessIdentity
from torchestra.store.table import Table
from torchestra.system.deadline import Deadline
from torchestra.system.file_changes import FileChanges

_LOCK_SECONDS = 60.0
# Between two looks at the file while no change is seen: the first pause, that where changes can be seen,
# the longest.
_PAUSE_S, _SEEING_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.01, 0.05
# From a change to the next look, if the look after the change before was in vain.
_VAIN_S, _LONGEST_VAIN_S = 0.0001, 0.01
_GROWTH = 1.5
_CLOSE_SECONDS = 2.0

Change = tuple[Kind, str, bytes]


class Writer:
    """Appends records; valid while the exclusive lock is held. ``table`` is up to date."""

    def __init__(self, file: SharedFile, descriptor: int) -> None:
        self._file = file
        self._descriptor = descriptor

    @property
    def table(self) -> Table:
        return self._file.table

    def __call__(self, changes: Sequence[Change]) -> None:
        self._file.append(self._descriptor, changes)


class SharedFile:
    """One user's view of the file. Safe for several threads."""

    def __init__(self, path: str, world_size: int) -> None:
        self.path = path
        self.table = Table()
        self._world_size = world_size
        self._mutex = threading.Lock()
        self._offset = 0
        self._header = b""
        self._members: dict[str, ProcessIdentity] = {}
        self._ever_joined = 0
        self._pid = os.getpid()
        self._token = ""
        self._closed = False

    def join(self, owner: object) -> None:
        """Count this user in, until :meth:`leave`, the collection of ``owner`` or the end of the process."""
        with self._mutex:
            while True:
                with self._opened(create=True) as descriptor, self._locked(descriptor, fcntl.LOCK_EX):
                    if not self._is_current(descriptor):
                        continue
                    self._replay(descriptor, writing=True)
                    if self._is_left_behind():
                        os.unlink(self.path)
                        continue
                    token = os.urandom(8).hex()
                    me = ProcessIdentity.current().encode().encode()
                    self.append(descriptor, [(Kind.JOIN, token, me)])
                    self._token = token
                    break
        weakref.finalize(owner, self.leave)

    def leave(self) -> None:
        """Count this user out, delete the file if it was the last one, and close this view."""
        with self._mutex:
            if self._closed or self._pid != os.getpid():
                return
            self._closed = True
            # If this fails (a full disk, a deleted file), others find later that this user is dead.
            with contextlib.suppress(OSError, DistStoreError, InvalidArgumentError):
                self._count_out()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Table]:
        """Yield the table as the file has it now, for use inside the block only."""
        with self._mutex:
            self._check_open()
            with self._opened() as descriptor:
                size = os.fstat(descriptor).st_size
                if size != self._offset or _read(descriptor, 0, HEADER_SIZE) != self._header:
                    with self._locked(descriptor, fcntl.LOCK_SH):
                        self._replay(descriptor, writing=False)
            yield self.table

    @contextlib.contextmanager
    def writing(self) -> Iterator[Writer]:
        """Yield a writer; the table is up to date, and nobody else changes it during the block."""
        with self._mutex:
            self._check_open()
            with self._opened() as descriptor, self._locked(descriptor, fcntl.LOCK_EX):
                if not self._is_current(descriptor):
                    raise self._deleted()
                self._replay(descriptor, writing=True)
                yield Writer(self, descriptor)

    def changes(self, timeout_s: float) -> Iterator[None]:
        """Yield at once, after each change of the file, now and then, and a last time after ``timeout_s``.

        After changes that did not end the caller's wait it pauses longer and longer, up to 10 ms: else each
        rank would look at the file as often as all of them write.
        """
        yield
        if timeout_s <= 0:
            return
        deadline = Deadline(timeout_s)
        with FileChanges(self.path) as changes:
            pause_s, vain_s = _SEEING_PAUSE_S if changes.are_seen else _PAUSE_S, _VAIN_S
            while not deadline.expired():
                yield
                if changes.wait(min(pause_s, deadline.remaining())):
                    time.sleep(min(vain_s, deadline.remaining()))
                    vain_s = min(vain_s * _GROWTH, _LONGEST_VAIN_S)
                else:
                    pause_s = min(pause_s * _GROWTH, _LONGEST_PAUSE_S)
        yield

    def append(self, descriptor: int, changes: Sequence[Change]) -> None:
        """Append records and apply them. Call this only under the exclusive lock, after a replay."""
        data = b"".join(encode(*change) for change in changes)
        self._write(descriptor, data, self._offset)
        self._offset += len(data)
        for change in changes:
            self._apply(*change)

    def _count_out(self) -> None:
        with self._opened() as descriptor, self._locked(descriptor, fcntl.LOCK_EX, _CLOSE_SECONDS):
            if not self._is_current(descriptor):
                return
            self._replay(descriptor, writing=True)
            self._members.pop(self._token, None)
            complete = self._ever_joined >= self._world_size >= 0
            if complete and all(member.is_dead() for member in self._members.values()):
                os.unlink(self.path)
            else:
                self.append(descriptor, [(Kind.LEAVE, self._token, b"")])

    def _check_open(self) -> None:
        if self._closed:
            raise DistStoreError(f"FileStore({self.path}) is closed; make a new one to use the file again")

    @contextlib.contextmanager
    def _opened(self, create: bool = False) -> Iterator[int]:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        try:
            descriptor = os.open(self.path, flags, 0o600)
        except FileNotFoundError as error:
            raise (self._unusable(error) if create else self._deleted()) from error
        except OSError as error:
            raise self._unusable(error) from error
        try:
            self._check_owner(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)

    def _check_owner(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        wrong = None
        if not stat.S_ISREG(status.st_mode):
            wrong = "it is not a regular file"
        elif status.st_uid != os.geteuid():
            wrong = f"it belongs to another user (number {status.st_uid}), who could write anything into it"
        elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            wrong = (
                f"other users may write to it (its mode is {stat.S_IMODE(status.st_mode):03o}); "
                "delete it if it is left from an earlier job, or `chmod 600` it"
            )
        if wrong:
            raise InvalidArgumentError(f"FileStore does not use {self.path}: {wrong}, or name a new file")
        if status.st_mode & (stat.S_IRGRP | stat.S_IROTH):
            os.fchmod(descriptor, 0o600)

    def _unusable(self, error: OSError) -> InvalidArgumentError:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        return InvalidArgumentError(
            f"FileStore cannot open {self.path}: {reason}; "
            "it must be a file that every rank may read and write, in a directory that exists"
        )

    def _deleted(self) -> DistStoreError:
        return DistStoreError(
            f"FileStore: the file {self.path} was deleted while in use; give every job a file of its own"
        )

    @contextlib.contextmanager
    def _locked(self, descriptor: int, kind: int, timeout_s: float | None = None) -> Iterator[None]:
        # Not a blocking flock: signals must reach the main thread, and the time-out must hold.
        timeout_s = _LOCK_SECONDS if timeout_s is None else timeout_s
        for _ in Deadline(timeout_s).polls(0.0002, 0.02):
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                    raise DistStoreError(
                        f"FileStore cannot lock {self.path}: {error.strerror}; the file system lacks flock"
                    ) from error
        else:
            raise DistStoreError(
                f"FileStore({self.path}) was locked by another process for {timeout_s:g} s; is it stopped?"
            )
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _is_current(self, descriptor: int) -> bool:
        """Return whether the path still leads to the file that was opened."""
        mine = os.fstat(descriptor)
        try:
            named = os.stat(self.path)
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)

    def _replay(self, descriptor: int, *, writing: bool) -> None:
        size = os.fstat(descriptor).st_size
        header = _read(descriptor, 0, HEADER_SIZE)
        start = header[: len(MAGIC)]
        if not MAGIC.startswith(start):
            raise DistStoreError(
                f"{self.path} is not a FileStore's (it begins with {start!r}); name a new file, or delete "
                "this one if nobody needs it"
            )
        if len(header) < HEADER_SIZE and writing:
            header = MAGIC + os.urandom(HEADER_SIZE - len(MAGIC))
            self._write(descriptor, header, 0)
        if header != self._header or size < self._offset:
            self._header = header
            self._offset = len(header)
            self._ever_joined = 0
            self._members = {}
            self.table = Table()
        base = self._offset
        try:
            for kind, key, value, end in scan(_read(descriptor, base, size - base)):
                self._apply(kind, key, value)
                self._offset = base + end
        except (DamagedLogError, ValueError) as error:
            raise DistStoreError(
                f"{self.path} is damaged at byte {self._offset}: something else than FileStore wrote to it"
            ) from error
        if writing and self._offset < size:
            os.ftruncate(descriptor, self._offset)

    def _write(self, descriptor: int, data: bytes, offset: int) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.pwrite(descriptor, rest, offset + len(data) - len(rest)) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, offset)
            raise DistStoreError(f"FileStore cannot write to {self.path}: {error.strerror}") from error

    def _apply(self, kind: Kind, key: str, value: bytes) -> None:
        if kind is Kind.SET:
            self.table.set(key, value)
        elif kind is Kind.APPEND:
            self.table.append(key, value)
        elif kind is Kind.DELETE:
            self.table.delete(key)
        elif kind is Kind.PUSH:
            self.table.push(key, value)
        elif kind is Kind.POP:
            self.table.pop(key)
        elif kind is Kind.JOIN:
            self._members[key] = ProcessIdentity.decode(value.decode())
            self._ever_joined += 1
        else:
            self._members.pop(key, None)

    def _is_left_behind(self) -> bool:
        """Return whether the file belongs to a job whose last processes were killed."""
        if self._world_size < 0 or not self._members:
            return False
        return all(member.is_dead() for member in self._members.values())


def _read(descriptor: int, offset: int, size: int) -> bytes:
    parts = []
    while size > 0:
        part = os.pread(descriptor, size, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)
