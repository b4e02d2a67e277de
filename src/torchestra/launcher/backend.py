"""What a job and those who hold its ranks expect of each other.

There are two backends: :mod:`.forks` holds ranks on this host, :mod:`.on_ray` on the nodes of a Ray cluster.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO, Protocol

from torchestra.launcher.spec import Ended, Failure, JobSpec

if TYPE_CHECKING:
    from torchestra.launcher.job import Job

__all__ = ["JobListener", "LaunchBackend"]


class LaunchBackend(Protocol):
    """Where the ranks of a job are, and how they are reached.

    It has its :class:`JobListener` watch what brings news of them, and passes these on: ``begun`` once;
    ``forked``, ``printed``, ``failed`` and ``returned`` as they come; ``ended`` of each rank, last.
    """

    def start(self, job: Job) -> None:
        """Begin to start the ranks of ``job``; does not wait for them."""

    def signal(self, signum: signal.Signals, final: bool) -> None:
        """Signal the ranks (see :class:`~torchestra.launcher.spec.SignalRanks`)."""

    def drain(self) -> None:
        """Pass on what the ranks printed before they ended, though a child of theirs may print on."""

    def close(self) -> None:
        """Close what this backend opened in this process for the job."""


class JobListener(Protocol):
    """What a backend needs of the job that it works for; a :class:`Job` is one."""

    spec: JobSpec

    def watch(self, file: int | socket.socket, when_readable: Callable[[], object]) -> None:
        """Call a function whenever ``file`` can be read."""

    def unwatch(self, file: int | socket.socket) -> None:
        """Undo :meth:`watch`."""

    def begun(self) -> None:
        """The ranks are asked for: from now on they can be signalled."""

    def forked(self, rank: int, pid: int, host: str = "") -> None:
        """A rank has a process; on another ``host`` than this, if one is named."""

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """A rank wrote to its standard output (stream 0) or error (1). Empty: it closed the stream."""

    def failed(self, rank: int, failure: Failure) -> None:
        """A rank said what ends it."""

    def returned(self, rank: int, result: BinaryIO) -> None:
        """A rank's function returned; its pickled result is in the file, which is the job's from now on."""

    def ended(self, end: Ended) -> None:
        """A rank's process is gone, and nothing more will come of it but output."""

    def lost(self) -> None:
        """The backend is gone, and the ranks with it."""
