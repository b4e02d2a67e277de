"""Measure remote calls between two workers of one host: torchestra's, and torch's over TensorPipe."""

from __future__ import annotations

import statistics

from benchmarks.options import BenchOptions
from benchmarks.report import SideRow, SideTable
from benchmarks.scripts import run_script
from benchmarks.summary import median_interval

__all__ = ["measure_remote_calls"]

_COLUMNS = (("torchestra", "torchestra.rpc"), ("tensorpipe", "torch.distributed.rpc"))
_TURNS_PER_ROUND = 5
_LEAST_CALLS = 3  # of a turn


def measure_remote_calls(options: BenchOptions) -> tuple[SideTable, list[str]]:
    """Return the microseconds per call there and back of each workload, and what failed.

    They are the medians over the turns, with the interval in which the true median lies with 95 %
    probability.
    """
    notes: list[str] = []
    rows = []
    try:
        turns = options.rounds * _TURNS_PER_ROUND
        results = run_script("remote_calls.py", 2, options.seconds, turns, _LEAST_CALLS)
    except (OSError, RuntimeError) as error:
        results = {}
        notes.append(f"remote calls: {error}")
    for workload, times in results.items():
        values = {way: statistics.median(turns) for way, turns in times.items()}
        intervals = {way: median_interval(turns) for way, turns in times.items()}
        rows.append(SideRow(workload, values, intervals))
    title = "Remote calls: there and back, what is sent coming back (or another tensor, where it is negated)"
    return SideTable("rpc", title, "µs", _COLUMNS, tuple(rows)), notes
