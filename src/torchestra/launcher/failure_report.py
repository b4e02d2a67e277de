"""What the launcher says when a job has failed: the failed rank's traceback last, and one line on it."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torchestra.launcher.job import Job, RankState
from torchestra.launcher.root_cause import FailedRank, describe_exit

__all__ = [
    "failure_abroad",
    "failure_line",
    "failure_report",
    "ranks_phrase",
    "survived_report",
    "survivors_report",
    "tracebacks_report",
]


def failure_report(job: Job, coloured: bool = False) -> str:
    """The end of a failed job, for the screen: other ranks' tracebacks, the cause's, and the summary."""
    cause = job.cause
    assert cause is not None
    told = {cause.rank, *(failed.rank for failed in job.survived)}
    others = tracebacks_report(job, skip=told)
    trace = cause.failure.traceback if cause.failure is not None else ""
    stopped = [
        job.first_rank + state.rank for state in job.ranks if state.rank not in told and _failed(state)
    ]
    rest = f"; {ranks_phrase(stopped)} ended with it" if stopped else ""
    summary = f"torchestra: {failure_line(job, cause)}{rest}"
    if coloured:
        summary = f"\x1b[1;31m{summary}\x1b[0m"
    return f"{others}{trace}{summary}\n"


def survived_report(job: Job, failed: FailedRank) -> str:
    """What to say at once of a rank that has failed while the others go on."""
    trace = failed.failure.traceback if failed.failure is not None else ""
    left = ranks_phrase([job.first_rank + rank for rank in job.unfinished])
    verb = "goes" if len(job.unfinished) == 1 else "go"
    rest = f"; {left} {verb} on" if job.unfinished else ""
    return f"{trace}torchestra: {failure_line(job, failed)}{rest}\n"


def survivors_report(job: Job) -> str:
    """The last word of a job that ended well though ranks had failed."""
    lost = [job.first_rank + failed.rank for failed in job.survived]
    numbers = [job.first_rank + state.rank for state in job.ranks]
    well = [number for number in numbers if number not in lost]
    if not well:
        return "torchestra: no rank is left on this host; those on other hosts go on\n"
    return f"torchestra: {ranks_phrase(well)} ended well, without {ranks_phrase(sorted(lost))}\n"


def failure_line(job: Job, failed: FailedRank, host: str = "") -> str:
    """Which rank failed, and how."""
    state = job.ranks[failed.rank]
    host = state.host or host
    host = f" on {host}" if host else ""
    process = f" (pid {state.pid}{host})" if state.pid is not None else ""
    return f"rank {job.first_rank + failed.rank}{process} failed: {describe_exit(failed.exit_code)}"


def failure_abroad(job: Job, failed: FailedRank, host: str) -> str:
    """The same for other hosts, where what this one prints is not seen: where, and with what exception."""
    summary = failed.failure.summary.partition("\n")[0] if failed.failure is not None else ""
    return failure_line(job, failed, host) + (f": {summary}" if summary else "")


def tracebacks_report(job: Job, skip: Container[int] = ()) -> str:
    """The tracebacks of the ranks that sent one, but for some; ranks with the same text together."""
    ranks_by_text: dict[str, list[int]] = {}
    for state in job.ranks:
        if state.failure is not None and state.failure.traceback and state.rank not in skip:
            number = job.first_rank + state.rank
            ranks_by_text.setdefault(state.failure.traceback, []).append(number)
    single = len(job.ranks) == 1
    lines = [
        line if single else f"[{ranks_phrase(ranks)}] {line}"
        for text, ranks in ranks_by_text.items()
        for line in text.splitlines(keepends=True)
    ]
    return "".join(lines)


def ranks_phrase(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2, 3`` or, from three in a row on, ``ranks 0-7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def _failed(state: RankState) -> bool:
    return state.ended is not None and state.ended.exit_code != 0
