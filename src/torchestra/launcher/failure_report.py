"""The report of how a job ended: the failed rank's traceback last, and one line on it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Container, Sequence

from torchestra.launcher.job import Job
from torchestra.launcher.output import colours_wanted
from torchestra.launcher.root_cause import FailedRank, NodeFailure, describe_exit


def conclude(job: Job, received: list[int], other: NodeFailure | None = None) -> int:
    """Report on standard error how a job ended; return its exit code.

    Args:
        job: a job whose ranks have all ended.
        received: the signals that ended the job.
        other: the failure of another node that ended the job.
    """
    report, code = _conclusion(job, received, other)
    sys.stderr.write(report)
    return code


def _conclusion(job: Job, received: list[int], other: NodeFailure | None) -> tuple[str, int]:
    if received:
        name = signal.Signals(received[0]).name
        return f"{tracebacks_report(job)}torchestra: ended by {name}\n", 128 + received[0]
    if other is not None:
        why = f"torchestra: ended because node {other.node} failed: {other.why}\n"
        return tracebacks_report(job) + why, other.code
    if job.cause is not None:
        return _failure_report(job, job.cause), job.cause.shell_code
    return _survivors_report(job) if job.survived else "", 0


def _failure_report(job: Job, cause: FailedRank) -> str:
    """Return the other ranks' tracebacks, that of the cause, and the summary."""
    shown = {cause.rank, *(failed.rank for failed in job.survived if failed.rank in job.failed_ranks)}
    others = tracebacks_report(job, skip=shown)
    trace = cause.failure.traceback if cause.failure is not None else ""
    stopped = [
        job.first_rank + state.rank
        for state in job.ranks
        if state.rank not in shown and state.ended is not None and state.ended.exit_code != 0
    ]
    rest = f"; {ranks_phrase(stopped)} ended with it" if stopped else ""
    summary = f"torchestra: {failure_line(job, cause)}{rest}"
    if colours_wanted(sys.stderr.isatty()):
        summary = f"\x1b[1;31m{summary}\x1b[0m"
    return f"{others}{trace}{summary}\n"


def survived_report(job: Job, failed: FailedRank) -> str:
    """Return the report of a rank that has failed while the others go on."""
    trace = failed.failure.traceback if failed.failure is not None else ""
    left = ranks_phrase([job.first_rank + rank for rank in job.unfinished])
    verb = "goes" if len(job.unfinished) == 1 else "go"
    rest = f"; {left} {verb} on" if job.unfinished else ""
    return f"{trace}torchestra: {failure_line(job, failed)}{rest}\n"


def _survivors_report(job: Job) -> str:
    """Return the last line on a job that ended well although ranks had failed."""
    well = [
        job.first_rank + state.rank
        for state in job.ranks
        if state.rank not in job.failed_ranks and not state.dismissed
    ]
    if not well:
        return "torchestra: no rank is left on this host; those on other hosts go on\n"
    without = (
        f", without {ranks_phrase([job.first_rank + rank for rank in job.failed_ranks])}"
        if job.failed_ranks
        else ""
    )
    return f"torchestra: {ranks_phrase(well)} ended well{without}{job.policy.summary()}\n"


def failure_line(job: Job, failed: FailedRank, host: str = "") -> str:
    """Return a line that says which rank failed, and how."""
    state = job.ranks[failed.rank]
    host = state.host or host
    host = f" on {host}" if host else ""
    pid = state.pid if failed.pid is None else failed.pid
    process = f" (pid {pid}{host})" if pid is not None else ""
    return f"rank {job.first_rank + failed.rank}{process} failed: {describe_exit(failed.exit_code)}"


def remote_failure_line(job: Job, failed: FailedRank, host: str) -> str:
    """Return the line for other hosts, which do not see this host's output: with host and exception."""
    summary = failed.failure.summary.partition("\n")[0] if failed.failure is not None else ""
    return failure_line(job, failed, host) + (f": {summary}" if summary else "")


def tracebacks_report(job: Job, skip: Container[int] = ()) -> str:
    """Return the tracebacks of the ranks that sent one, except ``skip``; equal ones only once."""
    ranks_by_text: dict[str, list[int]] = {}
    for state in job.ranks:
        if state.failure is not None and state.failure.traceback and state.rank not in skip:
            rank = job.first_rank + state.rank
            ranks_by_text.setdefault(state.failure.traceback, []).append(rank)
    single = len(job.ranks) == 1
    lines = [
        line if single else f"[{ranks_phrase(ranks)}] {line}"
        for text, ranks in ranks_by_text.items()
        for line in text.splitlines(keepends=True)
    ]
    return "".join(lines)


def ranks_phrase(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, ``ranks 0, 2, 3`` or, from three in a row on, ``ranks 0-7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
