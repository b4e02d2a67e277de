""":func:`launch`: run a function on several ranks and get what each returned."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from torchestra.errors import InvalidArgumentError, LaunchTimeoutError, RankError
from torchestra.launcher.blame import Fault, describe_exit
from torchestra.launcher.cores import usable_cores
from torchestra.launcher.job import Job, RankState, StopPlan
from torchestra.launcher.output import open_devices
from torchestra.launcher.pickling import dump_call, load_in_caller
from torchestra.launcher.report import ranks_phrase, tracebacks_report
from torchestra.launcher.spec import JobSpec
from torchestra.launcher.surroundings import MeetingPoint, with_threads_per_rank
from torchestra.launcher.warm import WarmServer
from torchestra.types import Timeout, timeout_seconds

__all__ = ["RemoteTraceback", "launch"]

T = TypeVar("T")

_INTERRUPT: StopPlan = ((signal.SIGINT, 2.0), (signal.SIGTERM, 0.5))
_OVERTIME: StopPlan = ((signal.SIGINT, 0.5), (signal.SIGTERM, 0.25))


class RemoteTraceback(Exception):
    """The traceback of a rank as text, shown as the cause of the exception that came from it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


def launch(
    fn: Callable[..., T],
    nproc: int | Literal["auto"],
    *args: Any,
    kind: Literal["processes", "threads"] = "processes",
    timeout: Timeout | None = None,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Call ``fn(*args)`` on each of ``nproc`` ranks of this host; the results in the order of the ranks.

    Inside, :func:`torchestra.init_process_group` needs no arguments. Lines that ranks print appear on
    this process's ``sys.stdout`` and ``sys.stderr``, prefixed by rank.

    As processes, ranks are forked from a server that has loaded torch once; it is started by the first
    call and serves the later ones until this process ends. Arguments, results and exceptions are
    pickled: tensors travel by value. ``if __name__ == "__main__":`` must guard the call in a script.

    Args:
        fn: what every rank calls. It is sent by reference where it can be imported, else by value.
        nproc: how many ranks; ``"auto"`` is one per usable core.
        args: its arguments, the same for all ranks.
        kind: ``"processes"``, or ``"threads"`` of this process, which share its memory and its GIL.
        timeout: seconds (or a timedelta) until the ranks that have not finished are ended; default never.
        env: environment variables of the ranks, beside and before this process's. Processes only.

    Raises:
        RankError: ``fn`` raised on a rank, or a rank ended without returning; the others were ended
            within a second. Its cause is the exception of the rank, where that can be pickled.
        LaunchTimeoutError: ``timeout`` ran out; names the ranks, and where each of them was.
        InvalidArgumentError: an argument is out of range or cannot be pickled; nothing was started.
    """
    ranks = usable_cores() if nproc == "auto" else nproc
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise InvalidArgumentError(f"launch: nproc must be a positive int or 'auto', got {nproc!r}")
    seconds = None if timeout is None else timeout_seconds(timeout)
    if kind == "processes":
        return _launch_processes(fn, ranks, args, seconds, env or {})
    if kind == "threads":
        if env is not None:
            raise InvalidArgumentError("launch: ranks that are threads share one environment; leave env out")
        from torchestra.launcher.threads import launch_threads

        return launch_threads(fn, ranks, args, seconds)
    raise InvalidArgumentError(f"launch: kind must be 'processes' or 'threads', got {kind!r}")


def _launch_processes(
    fn: Callable[..., T], nproc: int, args: tuple[Any, ...], timeout: float | None, env: Mapping[str, str]
) -> list[T]:
    target = dump_call(fn, args)
    meeting = MeetingPoint()
    spec = JobSpec(
        nproc=nproc,
        target=target,
        environment=meeting.environment({**os.environ, **env}, nproc),
        directory=os.getcwd(),
        search_path=tuple(sys.path),
    )
    server = _servers.take(nproc)
    job = Job(server, spec, meeting, open_devices(sys.stdout, sys.stderr))
    overdue: list[int] = []
    if timeout is not None:
        job.call_at(time.monotonic() + timeout, lambda: _end_overdue(job, nproc, overdue))
    with contextlib.closing(job):
        try:
            _run(job)
        except BaseException:
            server.close()
            raise
        _servers.give_back(server)
        if overdue:
            raise _timeout_error(job, overdue, nproc, timeout)
        if job.cause is not None:
            raise _rank_error(job, job.cause) from _exception_of(job.cause)
        return [_result(state) for state in job.ranks]


def _run(job: Job) -> None:
    try:
        job.run()
    except KeyboardInterrupt:
        # The interrupt may have cut a step of the job short, so it is not waited for without an end.
        job.stop(_INTERRUPT)
        job.wait(until=time.monotonic() + sum(grace for _, grace in _INTERRUPT))
        sys.stderr.write(tracebacks_report(job))
        raise


def _end_overdue(job: Job, nproc: int, overdue: list[int]) -> None:
    overdue.extend(job.unfinished if job.ranks else range(nproc))
    job.stop(_OVERTIME)


def _timeout_error(job: Job, overdue: list[int], nproc: int, timeout: float | None) -> LaunchTimeoutError:
    message = (
        f"launch: {ranks_phrase(overdue)} of {nproc} had not finished after {timeout:g} s and"
        f" {'was' if len(overdue) == 1 else 'were'} ended; raise timeout= if that is not a hang"
    )
    where = tracebacks_report(job)
    error = LaunchTimeoutError(message, tuple(overdue), where)
    if where:
        error.__cause__ = RemoteTraceback(where)
    return error


def _rank_error(job: Job, cause: Fault) -> RankError:
    returned = job.ranks[cause.rank].result is not None
    if cause.failure is not None:
        what = f"failed: {cause.failure.summary.splitlines()[0]}"
    elif returned:
        what = f"ended badly after the function had returned: {describe_exit(cause.exit_code)}"
    else:
        what = f"ended before the function returned: {describe_exit(cause.exit_code)}"
    trace = cause.failure.traceback if cause.failure is not None else ""
    return RankError(f"rank {cause.rank} of {len(job.ranks)} {what}", cause.rank, cause.exit_code, trace)


def _exception_of(cause: Fault) -> BaseException | None:
    """What the rank raised, with its traceback as text; or that text alone."""
    if cause.failure is None or not cause.failure.traceback:
        return None
    text = RemoteTraceback(cause.failure.traceback)
    if cause.failure.exception is None:
        return text
    try:
        error = load_in_caller(io.BytesIO(cause.failure.exception))
    except Exception:
        return text
    assert isinstance(error, BaseException)
    error.__cause__ = text
    return error


def _result(state: RankState) -> Any:
    assert state.result is not None
    state.result.seek(0)
    return load_in_caller(state.result)


class _Servers:
    """The fork servers of this process that have no job: one, unless launches ran side by side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[WarmServer] = []
        self._hooked = False

    def take(self, nproc: int) -> WarmServer:
        """A server of the caller's own: one that is warm already, or one just started."""
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
        return WarmServer.spawned(with_threads_per_rank(os.environ, nproc))

    def give_back(self, server: WarmServer) -> None:
        """Keep a server for the next launch; end it if it never got warm."""
        if not server.warm:
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
