"""The interface between a job and what holds its ranks.

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
    """Hears from a launch backend what its ranks do; a :class:`~torchestra.launcher.job.Job` is one.

    Attributes:
        loop: calls the backend when there is something to read.
    """

    spec: JobSpec
    loop: EventLoop

    def begun(self) -> None:
        """Note that the ranks are being started: from now on they can be signalled."""

    def forked(self, rank: int, pid: int, host: str = "") -> None:
        """Note that a rank has a process; on another ``host`` than this, if one is named."""

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """Show what a rank wrote to its standard output (stream 0) or error (1). Empty: it closed it."""

    def failed(self, rank: int, failure: Failure) -> None:
        """Note the exception that ends a rank."""

    def returned(self, rank: int, result: BinaryIO) -> None:
        """Keep the file with the pickled result of a rank's function; it is the listener's from now on."""

    def ended(self, end: Ended) -> None:
        """Note that a rank's process is gone. Nothing more comes from it but output."""

    def lost(self) -> None:
        """Note that the backend is gone, and the ranks with it."""


class LaunchBackend(abc.ABC):
    """Starts the ranks of a job, and tells a :class:`JobListener` what they do.

    It calls ``begun`` once; ``forked``, ``printed``, ``failed`` and ``returned`` as they come; ``ended`` of
    each rank, last.

    Attributes:
        listener: the job, once it has started.
    """

    listener: JobListener

    def start(self, listener: JobListener) -> None:
        """Begin to start the ranks; does not wait for them."""
        self.listener = listener
        self._start()

    @abc.abstractmethod
    def _start(self) -> None:
        """Do what is particular of :meth:`start`."""

    @abc.abstractmethod
    def signal(self, signum: signal.Signals, final: bool) -> None:
        """Signal the ranks (see :class:`~torchestra.launcher.spec.SignalRanks`)."""

    @abc.abstractmethod
    def drain(self) -> None:
        """Pass on what the ranks printed before they ended, though a child of theirs may print on."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close what this backend opened in this process for the job."""
