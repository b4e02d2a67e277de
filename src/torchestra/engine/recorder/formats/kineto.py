"""Flight records in the format of Kineto, torch's profiler, for tools that read its traces, as HTA does.

One file for each rank, ``rank_N.json``. Those tools were made for GPUs: communication is what runs in kernels
whose names begin with NCCL's, on a stream of its own. So each operation is written twice, as the operator
``gloo:all_reduce`` on the thread of the program and as the kernel ``ncclKernel_all_reduce`` on a stream; and
what the rank did between its operations, which the recorder does not know, is one kernel ``compute`` on
another stream. HTA's breakdowns, overlap and stragglers then come out as they would on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchestra.engine.recorder.formats.rows import Row, Table, TracedGroup, rows_by_rank
from torchestra.engine.recorder.trace import replacing

_COMPUTE_STREAM, _COMMUNICATION_STREAM = 7, 20
_Event = dict[str, Any]


def write_kineto(directory: Path, table: Table) -> int:
    """Write a file for each rank of the largest group; return the number of files.

    Of other groups the operations of processes that are ranks of the largest are in it, too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    world, by_rank = rows_by_rank(table)
    if world is None:
        return 0
    sizes = {group.number: group.size for group in table.groups}
    for rank, own in by_rank.items():
        with replacing(directory / f"rank_{rank}.json") as file:
            json.dump(_file(world, rank, own, sizes), file, indent=1)  # HTA looks for `"rank": N`
    return len(by_rank)


def _file(world: TracedGroup, rank: int, rows: Sequence[Row], sizes: dict[int, int]) -> dict[str, Any]:
    events = [*_named(world.pids[rank], rank), *_communication(rows, sizes), *_compute(rows)]
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": world.size},
        "displayTimeUnit": "ms",
        "traceEvents": events,
    }


def _named(pid: int, rank: int) -> Iterator[_Event]:
    for number, name in ((pid, f"rank {rank}"), (0, "streams")):
        yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}


def _communication(rows: Sequence[Row], sizes: dict[int, int]) -> Iterator[_Event]:
    for correlation, row in enumerate(rows, start=1):
        at = {"ph": "X", "ts": row.started_us, "dur": row.duration_us}
        arguments = {
            "External id": correlation,
            "Collective name": row.kind,
            "In msg nelems": row.count or 0,
            "Group size": sizes[row.group],
            "dtype": row.dtype or "",
            "Process Group Name": row.group_name,
            "bytes": row.nbytes,
            "waited_us": row.waited_us,
        }
        host = {"cat": "cpu_op", "name": f"gloo:{row.kind}", "pid": row.pid, "tid": row.pid}
        yield {**at, **host, "args": arguments}
        yield {**at, **_on_stream(f"ncclKernel_{row.kind}", _COMMUNICATION_STREAM, correlation, arguments)}


def _on_stream(name: str, stream: int, correlation: int, arguments: dict[str, Any]) -> _Event:
    own = {"stream": stream, "correlation": correlation, "device": 0}
    return {"cat": "kernel", "name": name, "pid": 0, "tid": stream, "args": {**arguments, **own}}


def _compute(rows: Sequence[Row]) -> Iterator[_Event]:
    ended: float | None = None
    for row in rows:
        if ended is not None and row.started_us > ended:
            at = {"ph": "X", "ts": ended, "dur": row.started_us - ended}
            yield {**at, **_on_stream("compute", _COMPUTE_STREAM, -1, {})}
        if row.blocking:
            ended = max(ended or 0.0, row.started_us + row.duration_us)
