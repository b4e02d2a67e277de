"""What the launcher says when a job has failed: the failed rank's traceback last, and one line on it."""

from __future__ import annotations

from collections.abc import Sequence

from torchestra.launcher.blame import describe_exit
from torchestra.launcher.job import Job, RankState

__all__ = ["failure_report", "ranks_phrase", "tracebacks_report"]


def failure_report(job: Job, coloured: bool = False) -> str:
    """The end of a failed job, for the screen: other ranks' tracebacks, the cause's, and the summary."""
    cause = job.cause
    assert cause is not None
    others = tracebacks_report(job, skip=cause.rank)
    trace = cause.failure.traceback if cause.failure is not None else ""
    pid = f" (pid {job.pids[cause.rank]})" if job.pids else ""
    stopped = [state.rank for state in job.ranks if state is not job.ranks[cause.rank] and _failed(state)]
    rest = f"; {ranks_phrase(stopped)} ended with it" if stopped else ""
    summary = f"torchestra: rank {cause.rank}{pid} failed: {describe_exit(cause.exit_code)}{rest}"
    if coloured:
        summary = f"\x1b[1;31m{summary}\x1b[0m"
    return f"{others}{trace}{summary}\n"


def tracebacks_report(job: Job, skip: int | None = None) -> str:
    """The tracebacks of the ranks that sent one, ranks with the same text together."""
    ranks_by_text: dict[str, list[int]] = {}
    for state in job.ranks:
        if state.failure is not None and state.failure.traceback and state.rank != skip:
            ranks_by_text.setdefault(state.failure.traceback, []).append(state.rank)
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
