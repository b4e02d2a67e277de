"""A recorded job as a workload: the collectives of a flight record, and what ranks did between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchestra.engine.operations import COLLECTIVES, DTYPE_BYTES
from torchestra.engine.recorder.formats.reading import read_traces
from torchestra.engine.recorder.formats.rows import Row, TracedGroup, table_of
from torchestra.errors import InvalidArgumentError
from torchestra.performance.workload import Operation, Pause

_NAMES = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}
"""The public function for a kind that has several: that of one tensor."""


@dataclass(frozen=True)
class RecordedJob:
    """The collectives of one group, in the order in which all its ranks called them.

    Attributes:
        group: its name.
        hosts, ranks_per_host: of the job that was recorded.
        workload: operations, and the pauses between them.
        seconds: from the first collective's beginning to the last one's end, on the slowest rank.
        left_out: how many rows are not in the workload: messages, and what not all ranks ended.
    """

    group: str
    hosts: int
    ranks_per_host: int
    workload: tuple[Operation | Pause, ...]
    seconds: float
    left_out: int


def read_job(paths: Sequence[Path]) -> RecordedJob:
    """Read traces that ``torchestra report`` or ``FlightRecord.save`` wrote: files, or directories of them.

    Raises:
        InvalidArgumentError: there are none, or one is something else.
    """
    return job_of(read_traces(paths))


def job_of(trace: dict[str, Any]) -> RecordedJob:
    """Return the job in a trace: its group of the most operations.

    Raises:
        InvalidArgumentError: no collective in it was ended by all ranks of a group.
    """
    table = table_of(trace)
    found = [
        _group(group, [row for row in table.rows if row.group == group.number]) for group in table.groups
    ]
    best = max(found, key=lambda job: len(job.workload), default=None)
    if best is None or not best.workload:
        raise InvalidArgumentError("the trace has no collective that all ranks of a group have ended")
    return best


def _group(group: TracedGroup, rows: Sequence[Row]) -> RecordedJob:
    by_number: defaultdict[int, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        if not row.is_message and row.state == "done" and row.kind in COLLECTIVES:
            by_number[row.number][row.rank] = row
    ranks = sorted(group.pids)
    whole = [calls for _, calls in sorted(by_number.items()) if sorted(calls) == ranks]
    workload: list[Operation | Pause] = []
    before: dict[int, Row] = {}
    for calls in whole:
        if before:
            workload.append(Pause(tuple(_pause(before[rank], calls[rank]) for rank in ranks)))
        workload.append(_operation(calls, group.size))
        before = calls
    hosts = max(1, len(set(group.hosts.values())))
    seconds = 0.0
    if whole:
        first, last = whole[0].values(), whole[-1].values()
        end = max(row.started_us + row.duration_us for row in last)
        seconds = (end - min(row.started_us for row in first)) * 1e-6
    taken = sum(map(len, whole))
    return RecordedJob(
        group.name, hosts, max(1, len(ranks) // hosts), tuple(workload), seconds, len(rows) - taken
    )


def _pause(before: Row, after: Row) -> float:
    return max(0.0, after.started_us - before.started_us - before.duration_us) * 1e-6


def _operation(calls: dict[int, Row], size: int) -> Operation:
    """Return the operation of one call on all ranks."""
    row = calls[min(calls)]
    dtype = row.dtype if row.dtype in DTYPE_BYTES else "uint8"
    nbytes = max(each.nbytes for each in calls.values())
    if row.kind in ("all_gather", "gather"):
        nbytes //= size  # the record has what the rank got
    root = row.root or 0
    return Operation(_NAMES.get(row.kind, row.kind), nbytes, dtype, row.op or "SUM", root)
