"""The interface between a job and the launch backend that holds its ranks.

There are two launch backends: :mod:`.fork_backend` holds ranks on this host, :mod:`.on_ray` on the nodes of a
Ray cluster.
"""

from __future__ import annotations

import abc
import signal
from typing import BinaryIO, Protocol

from torchestra.errors import DistBackendError
from torchestra.launcher.event_loop import EventLoop
from torchestra.launcher.spec import Ended, Failure, JobSpec, PhaseReached, StoreServed


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

    def store_served(self, served: StoreServed) -> None:
        """Note which processes serve the job's store."""

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """Show a rank's output to standard output (stream 0) or error (1). Empty: it closed the stream."""

    def reached(self, rank: int, reached: PhaseReached) -> None:
        """Note that a rank has reached a phase of its membership."""

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

    It calls ``begun`` once; ``forked``, ``printed``, ``reached``, ``failed`` and ``returned`` as they
    occur; and ``ended`` last for each process of a rank.

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

    def replace(self, rank: int) -> None:
        """Begin to start a rank again whose process has ended; it is to join the others.

        Raises:
            DistBackendError: this backend cannot.
        """
        raise DistBackendError(f"{type(self).__name__} cannot start rank {rank} again")

    @abc.abstractmethod
    def signal(self, signum: signal.Signals, final: bool, rank: int | None = None) -> None:
        """Signal the ranks, or one (see :class:`~torchestra.launcher.spec.SignalRanks`)."""

    @abc.abstractmethod
    def drain(self) -> None:
        """Pass on the output of the ranks before they ended, even if a child of theirs keeps printing."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close everything that this backend opened in this process for the job."""
