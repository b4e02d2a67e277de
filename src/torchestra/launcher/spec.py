"""The messages between launcher, fork server and ranks: plain data.

===================  ======================================================================
launcher to server   :class:`JobSpec`, then per rank a message with its files
                     (control channel, stdin, stdout, stderr); :class:`SignalRanks`;
                     :class:`Replace`, with the files of a rank
server to launcher   :class:`Ready`, :class:`StoreServed`, :class:`Forked`, :class:`Ended`
rank to launcher     on its control channel: :class:`PhaseReached`, :class:`Failure`, :class:`Returned`
===================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Union

from torchestra.system.phases import Phase


@dataclass(frozen=True)
class Script:
    """A Python file (or with ``is_module`` a module's name) that each rank runs as ``__main__``."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


@dataclass(frozen=True)
class MainModule:
    """The caller's ``__main__``, to be imported again by its module name or from its file."""

    name: str | None = None
    file: str | None = None


@dataclass(frozen=True)
class Call:
    """A pickled ``(function, arguments)``; ``main`` is the caller's ``__main__``, which it may refer to."""

    payload: bytes = field(repr=False)
    main: MainModule = field(default_factory=MainModule)


Target = Union[Script, Call]


@dataclass(frozen=True)
class JobSpec:
    """Everything the fork server needs to start the ranks of one job.

    Attributes:
        nproc: how many ranks, all on this host.
        first_rank: the number of the first of them in the whole job.
        first_local_rank: the same among the ranks on this host, if not all of them belong to this spec.
        world_size: how many ranks the whole job has; None if it has only these.
        joins: whether the ranks are to join a job that runs, each in the place of one that is gone.
        preload: modules that the server imports before it forks any rank, and has ready what a rank does
            once; for ranks that others wait for.
        target: what each of them runs.
        environment: the whole environment of a rank, except the four variables that name the rank.
        directory: the working directory of the ranks.
        search_path: their ``sys.path``, or None to keep the server's.
    """

    nproc: int
    target: Target
    environment: Mapping[str, str] = field(repr=False)  # has the job's secret, and perhaps the user's
    directory: str
    search_path: tuple[str, ...] | None = None
    first_rank: int = 0
    first_local_rank: int = 0
    world_size: int | None = None
    joins: bool = False
    preload: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A rank's report of the exception that ends it, sent before the rank tears anything down.

    Attributes:
        time: ``time.monotonic()`` when the exception reached the top.
        exit_code: the code that the rank will exit with; negative for a signal.
        summary: the last line of the traceback, such as ``ValueError: no``.
        traceback: the whole traceback as text, beginning at the user's own code.
        consequence: whether the exception says that another rank is gone, so that rank is the cause.
        exception: the pickled exception, or None if it does not survive pickling.
    """

    time: float
    exit_code: int
    summary: str
    traceback: str
    consequence: bool = False
    exception: bytes | None = None


@dataclass(frozen=True)
class PhaseReached:
    """A rank has reached a phase of its membership, at a ``time.monotonic()``."""

    phase: Phase
    time: float


@dataclass(frozen=True)
class Returned:
    """A :class:`Call` returned; its pickled result is in the file that comes with this message."""


@dataclass(frozen=True)
class SignalRanks:
    """Send a signal to every rank alive, or to one; ``final`` says that it is to end the job.

    SIGKILL, SIGSTOP and SIGCONT go to the process groups, any other signal to the ranks alone: a
    rank itself must end its children gently.
    """

    signum: int
    final: bool = True
    rank: int | None = None


@dataclass(frozen=True)
class Replace:
    """Start a rank again whose process has ended; it is to join the others.

    Attributes:
        variables: those of its environment that have changed since the job began.
    """

    rank: int
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ready:
    """The server has loaded everything and forks ranks at once."""


@dataclass(frozen=True)
class StoreServed:
    """Processes serve the job's store.

    Attributes:
        pids: of each that runs, by replica; one if the store is not replicated.
        restarted: the replica that was killed and has been started again; None when all have been started.
    """

    pids: Mapping[int, int]
    restarted: int | None = None


@dataclass(frozen=True)
class Forked:
    """Ranks exist; ``pids[rank]`` is a rank's process id and the id of its process group."""

    pids: Mapping[int, int]


@dataclass(frozen=True)
class Ended:
    """A rank's process is gone.

    Attributes:
        exit_code: its exit code; minus the signal's number where a signal killed it.
        time: ``time.monotonic()`` when the server noticed it.
    """

    rank: int
    exit_code: int
    time: float
