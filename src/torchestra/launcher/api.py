""":func:`launch`: run a function on several ranks and get the result of each."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from torchestra.arguments.annotations import checked
from torchestra.errors import InvalidArgumentError, shown
from torchestra.launcher.cores import usable_cores
from torchestra.launcher.fork_backend import ForkBackend
from torchestra.launcher.fork_server_client import ForkServerClient
from torchestra.launcher.job import SETTLE_S, Job, StopPlan
from torchestra.launcher.launched_job import LaunchedJob, RemoteTraceback
from torchestra.launcher.on_ray.options import RayOptions
from torchestra.launcher.output import OutputSink, open_sinks
from torchestra.launcher.pickling import dump_call
from torchestra.launcher.port_reservation import PortReservation, with_threads_per_rank
from torchestra.launcher.spec import JobSpec
from torchestra.types import Timeout, timeout_seconds

__all__ = ["RemoteTraceback", "launch", "launched", "started"]

T = TypeVar("T")

_MAX_RANKS = 1 << 16
_AT_THE_END: StopPlan = ((signal.SIGTERM, 0.4),)


@checked
def launch(
    fn: Callable[..., T],
    nproc: int | Literal["auto"],
    *args: Any,
    kind: Literal["processes", "threads"] = "processes",
    timeout: Timeout | None = None,
    env: Mapping[str, str] | None = None,
    on: Literal["ray"] | RayOptions | None = None,
) -> list[T]:
    """Call ``fn(*args)`` on each of ``nproc`` ranks, by default on this host; return the results by rank.

    Inside, :func:`torchestra.init_process_group` needs no arguments. The lines that ranks print appear on
    this process's ``sys.stdout`` and ``sys.stderr``, prefixed by rank.

    Ranks that are processes are forked from a server that has loaded torch once; the first call starts it,
    and later calls use it until this process ends. Arguments, results and exceptions are pickled: tensors
    are sent by value. ``if __name__ == "__main__":`` must guard the call in a script.

    With ``on="ray"`` (or :class:`RayOptions`) the ranks are on the nodes of a Ray cluster, each a child of an
    actor of its own, in a placement group that is removed at the end. Functions and classes of the caller's
    ``__main__`` are sent by value, and modules must be importable there. The environment is that of the
    nodes, with this process's ``TORCHESTRA_*`` variables and ``env``; the working directory is that of Ray's
    workers. It needs ``torchestra[ray]``.

    Args:
        fn: the function to call. It is sent by reference where it can be imported, else by value.
        nproc: how many ranks; ``"auto"`` is one per usable core, on Ray as many as the cluster can hold.
        args: the arguments of ``fn``, the same for all ranks.
        kind: ``"processes"``, or ``"threads"`` of this process, which share its memory and its GIL.
        timeout: seconds (or a timedelta) until the ranks that have not finished are ended; default never. On
            Ray it counts from the placement of the ranks.
        env: environment variables of the ranks, added to this process's or overriding them. Processes only.
        on: ``"ray"`` or :class:`RayOptions`; by default this host.

    Raises:
        RankError: ``fn`` raised on a rank, or a rank ended without returning; the others were ended
            within a second. The cause is the exception of the rank, where that can be pickled.
        LaunchTimeoutError: ``timeout`` ran out; the message names the ranks and where each was. Or the
            Ray cluster had no place for them in time; the message says what was requested and what it has.
        InvalidArgumentError: an argument is out of range or cannot be pickled; nothing was started.
        NotReadyError: Ray is not installed.
        DistError: the Ray cluster cannot be reached, or an actor cannot be started there.
    """
    _check_arguments(nproc, env or {})
    timeout_s = None if timeout is None else timeout_seconds(timeout, "launch")
    if on is not None:
        return _launch_elsewhere(fn, nproc, args, kind, timeout_s, env or {}, on)
    ranks = usable_cores() if nproc == "auto" else nproc
    if kind == "processes":
        with launched(fn, ranks, args, timeout_s, env or {}) as job:
            return job.results()
    if kind == "threads":
        if env is not None:
            raise InvalidArgumentError("launch: ranks that are threads share one environment; leave env out")
        from torchestra.launcher.threads import launch_threads

        return launch_threads(fn, ranks, args, timeout_s)
    raise InvalidArgumentError(f"launch: kind must be 'processes' or 'threads', got {kind!r}")


def _check_arguments(nproc: int | Literal["auto"], env: Mapping[str, str]) -> None:
    if nproc != "auto" and not 1 <= nproc <= _MAX_RANKS:
        raise InvalidArgumentError(
            f"launch: nproc must be a positive int or 'auto', got {shown(nproc)}, where {_MAX_RANKS} is the"
            " most"
        )
    for variable, value in env.items():
        if not variable or "=" in variable or not _is_plain(variable) or not _is_plain(value):
            raise InvalidArgumentError(
                f"launch: `env` must have names and values of environment variables, got"
                f" {shown(variable)}: {shown(value)}"
            )


def _is_plain(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _launch_elsewhere(
    fn: Callable[..., T],
    nproc: int | Literal["auto"],
    args: tuple[Any, ...],
    kind: str,
    timeout: float | None,
    env: Mapping[str, str],
    on: object,
) -> list[T]:
    options = RayOptions() if on == "ray" else on
    if not isinstance(options, RayOptions):
        raise InvalidArgumentError(f"launch: on must be 'ray', RayOptions or None, got {on!r}")
    if kind != "processes":
        raise InvalidArgumentError(f"launch: ranks on Ray are processes, got kind={kind!r}")
    from torchestra.launcher.on_ray.command import launch_on_ray

    return launch_on_ray(fn, nproc, args, timeout, env, options)


@contextlib.contextmanager
def launched(
    fn: Callable[..., Any],
    nproc: int,
    args: tuple[Any, ...],
    timeout: float | None,
    env: Mapping[str, str],
    settle_s: float = SETTLE_S,
) -> Iterator[LaunchedJob]:
    """Launch ranks as processes; yield the job, all of whose ranks have ended.

    Args:
        settle_s: how many seconds the others may go on after a rank has failed, to fail as well or to end.
    """
    spec, ports = _described(fn, nproc, args, env)
    server = _servers.take(nproc)
    job = Job(ForkBackend(server, ports), spec, open_sinks(sys.stdout, sys.stderr), settle_s=settle_s)
    outcome = LaunchedJob(job, timeout)
    with contextlib.closing(job):
        try:
            outcome.run()
        except BaseException:
            server.close()
            raise
        _servers.give_back(server)
        yield outcome


@contextlib.contextmanager
def started(
    fn: Callable[..., Any],
    nproc: int,
    args: tuple[Any, ...],
    env: Mapping[str, str],
    sinks: tuple[OutputSink, OutputSink],
) -> Iterator[Job]:
    """Start ranks as processes; yield their job, which the caller drives. They are ended when the block ends.

    The job survives the death of ranks as long as one is left.

    Args:
        sinks: the sinks of their standard output and standard error.
    """
    spec, ports = _described(fn, nproc, args, env)
    server = _servers.take(nproc)
    job = Job(ForkBackend(server, ports), spec, sinks, max_failures=nproc - 1)
    with contextlib.closing(job):
        try:
            job.start()
            yield job
            job.stop(_AT_THE_END)
            job.wait()
        except BaseException:
            server.close()
            raise
        _servers.give_back(server)


def _described(
    fn: Callable[..., Any], nproc: int, args: tuple[Any, ...], env: Mapping[str, str]
) -> tuple[JobSpec, PortReservation]:
    target = dump_call(fn, args)
    ports = PortReservation()
    spec = JobSpec(
        nproc=nproc,
        target=target,
        environment=ports.environment({**os.environ, **env}, nproc),
        directory=os.getcwd(),
        search_path=tuple(sys.path),
    )
    return spec, ports


class _Servers:
    """The fork servers of this process that have no job: one, unless launches ran concurrently."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[ForkServerClient] = []
        self._hooked = False

    def take(self, nproc: int) -> ForkServerClient:
        """Return a server for the caller alone: one that is ready, or a new one."""
        with self._lock:
            while self._idle:
                server = self._idle.pop()
                if server.alive():
                    return server
                server.close()
            if not self._hooked:
                self._hooked = True
                atexit.register(self.close)
                os.register_at_fork(after_in_child=self._forget)
        return ForkServerClient.spawned(with_threads_per_rank(os.environ, nproc))

    def give_back(self, server: ForkServerClient) -> None:
        """Keep a server for the next launch; end it if it was never ready."""
        if not server.ready:
            server.close()
            return
        with self._lock:
            self._idle.append(server)

    def close(self) -> None:
        """End the idle servers, and wait until they are gone."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        while self._idle:
            self._idle.pop().forget()


_servers = _Servers()
