"""The identity of a process, by which others can tell later whether it still lives."""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass

from torchestra.system.proc import PARENT, START, STATE, boot_id, stat_fields


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, distinguished from a later one with the same process id.

    Attributes:
        hostname: the name of its host, for messages.
        started: when it started, in clock ticks since boot; 0 where the system does not tell.
        space: where process ids are unique and their starts comparable (one boot of one host, one container,
            one time namespace, which shifts what /proc tells); empty if unknown.
    """

    hostname: str
    pid: int
    started: int
    space: str

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Return the calling process."""
        return _own()

    @classmethod
    def decode(cls, text: str) -> ProcessIdentity:
        """Return the identity that :meth:`encode` wrote.

        Raises:
            ValueError: ``text`` is not such an identity.
        """
        hostname, pid, started, space = text.split(" ")
        return cls(hostname, int(pid), int(started), space)

    def encode(self) -> str:
        """Return one line of text."""
        return f"{self.hostname} {self.pid} {self.started} {self.space}"

    def is_dead(self) -> bool:
        """Return whether the process is known to have ended; False if it cannot be seen from here."""
        return self._is_visible() and start_time(self.pid) != self.started

    def is_alive(self) -> bool:
        """Return whether the process is known to live; False if it ended or cannot be seen from here."""
        return self._is_visible() and start_time(self.pid) == self.started

    def _is_visible(self) -> bool:
        return bool(self.space) and self.space == _pid_namespace()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.hostname}"


@functools.cache
def _own() -> ProcessIdentity:
    pid = os.getpid()
    return ProcessIdentity(
        socket.gethostname().replace(" ", "_"), pid, start_time(pid) or 0, _pid_namespace()
    )


@functools.cache
def _pid_namespace() -> str:
    if not (boot := boot_id()):
        return ""
    try:
        space = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
    try:
        return f"{space}/{os.readlink('/proc/self/ns/time')}"
    except OSError:  # before Linux 5.6
        return space


def _forget() -> None:
    """Forget the parent's identity in a forked child, which may also be in another process id space."""
    _own.cache_clear()
    _pid_namespace.cache_clear()


os.register_at_fork(after_in_child=_forget)


def start_time(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None if it has ended or is a zombie."""
    fields = _status(pid)
    return None if not fields or fields[STATE] in ("Z", "X") else int(fields[START])


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None if the process has ended."""
    fields = _status(pid)
    return int(fields[PARENT]) if fields else None


def _status(pid: int) -> list[str]:
    """Return :func:`stat_fields` of a process; an empty list if there is none."""
    try:
        return stat_fields(f"/proc/{pid}")
    except (FileNotFoundError, ProcessLookupError):
        return []
