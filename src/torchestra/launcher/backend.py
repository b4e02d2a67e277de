"""The interface between a job and the launch backend that holds its ranks.

There are two launch backends: :mod:`.fork_backend` holds ranks on this host, :mod:`.on_ray` on the nodes of a
Ray cluster.
"""

from __future__ import annotations

import abc
import signal
from typing import BinaryIO, Protocol

from torchestra.launcher.event_loop import EventLoop
from torchestra.launcher.spec import Ended, Failure, JobSpec


class JobListener(Protocol):
    """Receives a launch backend's events of its ranks; a :class:`~torchestra.launcher.job.Job` is one.

    Attributes:
        loop: calls the backend when there is something to read.
    """

    spec: JobSpec
    loop: EventLoop

    def begun(self) -> None:
        """Note that the ranks are being started: from now on they can be signalled."""

    def forked(self, rank: int, pid: int, host: str = "") -> None:
        """Note that a rank has a process; on another host if ``host`` names one."""

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """Show a rank's output to standard output (stream 0) or error (1). Empty: it closed the stream."""

    def failed(self, rank: int, failure: Failure) -> None:
        """Note the exception that ends a rank."""

    def returned(self, rank: int, result: BinaryIO) -> None:
        """Keep the file with the pickled result of a rank's function; the listener now owns it."""

    def ended(self, end: Ended) -> None:
        """Note that a rank's process is gone. Nothing more comes from it but output."""

    def lost(self) -> None:
        """Note that the backend is gone, and the ranks with it."""


class LaunchBackend(abc.ABC):
    """Starts the ranks of a job, and reports their events to a :class:`JobListener`.

    It calls ``begun`` once; ``forked``, ``printed``, ``failed`` and ``returned`` as they occur; and ``ended``
    last for each rank.

    Attributes:
        listener: the job, once the job has started.
    """

    listener: JobListener

    def start(self, listener: JobListener) -> None:
        """Begin to start the ranks, without waiting for them."""
        self.listener = listener
        self._start()

    @abc.abstractmethod
    def _start(self) -> None:
        """Do the backend's own part of :meth:`start`."""

    @abc.abstractmethod
    def signal(self, signum: signal.Signals, final: bool) -> None:
        """Signal the ranks (see :class:`~torchestra.launcher.spec.SignalRanks`)."""

    @abc.abstractmethod
    def drain(self) -> None:
        """Pass on the output of the ranks before they ended, even if a child of theirs keeps printing."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close everything that this backend opened in this process for the job."""
