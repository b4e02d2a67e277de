"""A job of :func:`~torchestra.launch`: the results of its ranks, or the error that names one."""

from __future__ import annotations

import io
import signal
import sys
import time
from typing import Any

from torchestra.errors import LaunchTimeoutError, RankError
from torchestra.launcher.failure_report import ranks_phrase, tracebacks_report
from torchestra.launcher.job import Job, RankState, StopPlan
from torchestra.launcher.pickling import load_in_caller
from torchestra.launcher.root_cause import FailedRank, describe_exit

_INTERRUPT: StopPlan = ((signal.SIGINT, 2.0), (signal.SIGTERM, 0.5))
_OVERTIME: StopPlan = ((signal.SIGINT, 0.5), (signal.SIGTERM, 0.25))


class RemoteTraceback(Exception):
    """The traceback of a rank as text, shown as the cause of the exception that came from it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class LaunchedJob:
    """A job that calls a function, and its time limit.

    Args:
        job: the job, not yet run.
        timeout: seconds until ranks that have not finished are ended; None for never.
    """

    def __init__(self, job: Job, timeout: float | None) -> None:
        self._job = job
        self._timeout = timeout
        self._overdue: list[int] = []
        if timeout is not None:
            job.loop.call_at(time.monotonic() + timeout, self._end_overdue)

    def run(self) -> None:
        """Run the job; all ranks are gone afterwards, even after an interrupt."""
        job = self._job
        try:
            job.run()
        except KeyboardInterrupt:
            # The interrupt may have cut a step of the job short, so do not wait for ever.
            job.stop(_INTERRUPT)
            job.wait(until=time.monotonic() + sum(grace for _, grace in _INTERRUPT))
            sys.stderr.write(tracebacks_report(job))
            raise

    def results(self) -> list[Any]:
        """Return the ranks' results, in their order.

        Raises:
            LaunchTimeoutError: the time ran out.
            RankError: a rank failed.
        """
        job = self._job
        if self._overdue:
            raise self._timeout_error()
        if job.cause is not None:
            raise _rank_error(job, job.cause) from _exception_of(job.cause)
        return [_result(state) for state in job.ranks]

    def failures(self) -> dict[int, str]:
        """Return the tracebacks of the ranks that raised, by rank."""
        return {
            state.rank: state.failure.traceback
            for state in self._job.ranks
            if state.failure is not None and state.failure.traceback
        }

    def _end_overdue(self) -> None:
        job = self._job
        self._overdue.extend(job.unfinished if job.ranks else range(job.spec.nproc))
        job.stop(_OVERTIME)

    def _timeout_error(self) -> LaunchTimeoutError:
        overdue = self._overdue
        message = (
            f"launch: {ranks_phrase(overdue)} of {self._job.spec.nproc} had not finished after"
            f" {self._timeout:g} s and {'was' if len(overdue) == 1 else 'were'} ended; raise timeout= if"
            " that is not a hang"
        )
        where = tracebacks_report(self._job)
        error = LaunchTimeoutError(message, tuple(overdue), where)
        if where:
            error.__cause__ = RemoteTraceback(where)
        return error


def _rank_error(job: Job, cause: FailedRank) -> RankError:
    returned = job.ranks[cause.rank].result is not None
    if cause.failure is not None:
        what = f"failed: {cause.failure.summary.splitlines()[0]}"
    elif returned:
        what = f"ended badly after the function had returned: {describe_exit(cause.exit_code)}"
    else:
        what = f"ended before the function returned: {describe_exit(cause.exit_code)}"
    trace = cause.failure.traceback if cause.failure is not None else ""
    return RankError(f"rank {cause.rank} of {len(job.ranks)} {what}", cause.rank, cause.exit_code, trace)


def _exception_of(cause: FailedRank) -> BaseException | None:
    """Return the rank's exception, with its traceback as text; or that text alone."""
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
