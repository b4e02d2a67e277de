"""Flight records in Chrome's trace event format, which Perfetto and chrome://tracing show.

One process of the trace is a group, one track a rank: its collectives and blocking messages; background
messages are shown next to it. Times are microseconds of the host's monotonic clock, so records of several
groups of one host fit together; traces of several hosts are aligned by the hosts' times of day. An arrow
leads from the rank that came last to an operation to each that waited for it.

The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from torchestra.engine.recorder.flight_entries import FlightEntry, HostRecord, RankRecord, Span
from torchestra.system.proc import boot_id

Event = dict[str, Any]
SPAN = "span"
"""The category of a part of a training step, which is no operation."""
SAMPLE = "sample"
"""The category of a reading of a rank's process (monitor/process_samples.py)."""


class GroupRecord(Protocol):
    """The record of a group; see :class:`FlightRecord` for the attributes."""

    @property
    def group(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def taken(self) -> float: ...
    @property
    def taken_at(self) -> float: ...
    @property
    def aborted(self) -> str | None: ...
    @property
    def ranks(self) -> tuple[RankRecord, ...]: ...
    @property
    def hosts(self) -> tuple[HostRecord, ...]: ...


def trace_of(records: Sequence[GroupRecord]) -> dict[str, Any]:
    """Return the trace of some groups, ready for ``json.dump``."""
    events: list[Event] = []
    for number, record in enumerate(records, start=1):
        events += _group(number, record)
    trace: dict[str, Any] = {"traceEvents": events, "displayTimeUnit": "ns"}
    if records:
        epoch = (records[0].taken_at - records[0].taken) * 1e6
        trace["otherData"] = {"clock": host_clock(), "epoch_us": epoch}
    return trace


def merged(traces: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return one trace of the events of several, with their groups renumbered."""
    events: list[Event] = []
    groups = 0
    first: dict[str, Any] = {}
    for trace in traces:
        pids: dict[int, int] = {}
        clock = trace.get("otherData", {})
        first = first or clock
        later = clock["epoch_us"] - first["epoch_us"] if clock.get("clock") != first.get("clock") else 0.0
        for event in trace["traceEvents"]:
            if event["pid"] not in pids:
                groups += 1
                pids[event["pid"]] = groups
            moved = {"ts": event["ts"] + later} if later and "ts" in event else {}
            events.append({**event, **moved, "pid": pids[event["pid"]]})
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": first}


def host_clock() -> str:
    """Return an id of this host's monotonic clock."""
    return boot_id() or socket.gethostname()


def write_trace(path: str | os.PathLike[str], trace: dict[str, Any]) -> None:
    """Write a trace, all of it or nothing."""
    with replacing(Path(path)) as file:
        json.dump(trace, file)


@contextlib.contextmanager
def replacing(path: str | Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    """Yield a new file to write to, which takes the place of ``path`` in the end, or is deleted after an
    error.

    In a directory that others may write to as well, such as /tmp, no other user can divert it: its name until
    then is random, and a link that lies at ``path`` is replaced, not followed.

    Raises:
        OSError: it cannot be written; names ``path``.
    """
    new = f"{path}.{secrets.token_hex(8)}.new"
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with open(descriptor, "wb") if binary else open(descriptor, "w", encoding="utf-8") as file:
                yield file
            os.replace(new, path)
        except BaseException:
            Path(new).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _group(pid: int, record: GroupRecord) -> list[Event]:
    whole = len(record.ranks) == record.size
    named = (
        f"group {record.group!r}, "
        + ("" if whole else f"{len(record.ranks)} of its ")
        + f"{record.size} ranks"
    )
    if len(record.hosts) == 1:
        named += f", on host {record.hosts[0].name}"
    whose = {"name": named, "group": record.group, "size": record.size}
    events = [_named("process_name", pid, 0, whose)]
    host_of = {rank: host.name for host in record.hosts for rank in host.ranks}
    for rank in record.ranks:
        on = f" on host {host_of[rank.rank]}" if len(record.hosts) > 1 else ""
        what = f"did not answer{on}" if rank.presence == "unknown" else f"pid {rank.pid}{on}"
        names = {"name": f"rank {rank.rank} ({what})", "pid": rank.pid, "host": host_of.get(rank.rank, "")}
        calls = [list(vars(each).values()) for each in rank.calls]
        events.append(_named("thread_name", pid, rank.rank, {**names, **({"calls": calls} if calls else {})}))
        events.append(_named("thread_sort_index", pid, rank.rank, {"sort_index": rank.rank}))
        events += [_slice(pid, rank, entry, record.taken) for entry in rank.operations]
        for entry in rank.messages:
            if entry.blocking:
                events.append(_slice(pid, rank, entry, record.taken))
            else:
                events += _background(pid, rank, entry, record.taken)
        for number, span in enumerate(rank.spans):
            events += _span(pid, rank, number, span)
    events += _flow_events(pid, record)
    if record.aborted is not None:
        instant = {"ph": "i", "s": "p", "pid": pid, "tid": 0, "ts": record.taken * 1e6}
        events.append({**instant, "name": "the group was aborted", "args": {"why": record.aborted}})
    return events


def _named(what: str, pid: int, tid: int, arguments: dict[str, Any]) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": arguments}


def _arguments(entry: FlightEntry) -> dict[str, Any]:
    every = {
        "number": entry.number,
        "bytes": entry.nbytes,
        "count": entry.count,
        "dtype": entry.dtype,
        "op": entry.op,
        "root": entry.root,
        "peer": entry.peer,
        "tag": entry.tag,
        "waited_us": round(entry.waited * 1e6, 3),
        "waited_for": entry.waited_for,
        "state": entry.state,
    }
    return {name: value for name, value in every.items() if value is not None}


def _slice(pid: int, rank: RankRecord, entry: FlightEntry, taken: float) -> Event:
    ended = taken if entry.ended is None else entry.ended
    return {
        "ph": "X",
        "name": entry.kind if entry.state == "done" else f"{entry.kind} ({entry.state})",
        "cat": "message" if entry.tag is not None else "collective",
        "pid": pid,
        "tid": rank.rank,
        "ts": entry.started * 1e6,
        "dur": max(0.0, ended - entry.started) * 1e6,
        "args": _arguments(entry),
    }


def _background(pid: int, rank: RankRecord, entry: FlightEntry, taken: float) -> list[Event]:
    """Return messages that run concurrently with each other, and with collectives, as "async" events."""
    ended = taken if entry.ended is None else entry.ended
    both = {
        "name": f"{entry.kind} in the background",
        "cat": "message",
        "pid": pid,
        "tid": rank.rank,
        "id": f"{pid}.{rank.rank}.{entry.number}",
    }
    return [
        {**both, "ph": "b", "ts": entry.started * 1e6, "args": _arguments(entry)},
        {**both, "ph": "e", "ts": max(entry.started, ended) * 1e6},
    ]


def _span(pid: int, rank: RankRecord, number: int, span: Span) -> list[Event]:
    """Return a part of a training step, which may overlap with operations and other parts."""
    name = span.kind if span.index is None else f"{span.kind} {span.index}"
    both = {"name": name, "cat": SPAN, "pid": pid, "tid": rank.rank, "id": f"{pid}.{rank.rank}.span.{number}"}
    told = {"kind": span.kind, "step": span.step, "index": span.index, "bytes": span.nbytes}
    return [
        {**both, "ph": "b", "ts": span.started * 1e6, "args": told},
        {**both, "ph": "e", "ts": max(span.started, span.ended) * 1e6},
    ]


def _flow_events(pid: int, record: GroupRecord) -> list[Event]:
    calls: dict[int, list[tuple[int, FlightEntry]]] = {}
    for each in record.ranks:
        for entry in each.operations:
            calls.setdefault(entry.number, []).append((each.rank, entry))
    events: list[Event] = []
    for number, entries in calls.items():
        last, came = max(entries, key=lambda call: call[1].started)
        for rank, entry in entries:
            if entry.waited > 0 and rank != last and (entry.ended is None or entry.ended > came.started):
                both = {"name": "came last", "cat": "arrival", "pid": pid, "ts": came.started * 1e6}
                both["id"] = f"{pid}.{number}.{rank}"
                events.append({**both, "ph": "s", "tid": last})
                events.append({**both, "ph": "f", "bp": "e", "tid": rank})
    return events
