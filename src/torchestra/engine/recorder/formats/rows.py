"""The operations in a trace (trace.py) as rows of a table, of which the formats of other tools are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchestra.engine.recorder.trace import SAMPLE, SPAN

_BACKGROUND = " in the background"


@dataclass(frozen=True)
class Row:
    """One collective or message of one rank. Ranks are in the group's numbering, times in microseconds.

    Attributes:
        group: the number of its group in the trace; two groups can have one name.
        group_name: of that group.
        rank, pid: who called it: its number in the group and its process (0 if it is not known).
        number, kind, op, dtype, root, count, nbytes, peer, tag, blocking, state, waited_for: as for
            :class:`FlightEntry`.
        started_us: by the monotonic clock of the (first) host.
        duration_us: until it ended; until the record was taken, if it was running.
        waited_us: of these.
    """

    group: int
    group_name: str
    rank: int
    pid: int
    number: int
    kind: str
    op: str | None
    dtype: str | None
    root: int | None
    count: int | None
    nbytes: int
    peer: int | None
    tag: int | None
    blocking: bool
    state: str
    started_us: float
    duration_us: float
    waited_us: float
    waited_for: int | None

    @property
    def is_message(self) -> bool:
        """Return whether it is a send or a receive."""
        return self.tag is not None


@dataclass(frozen=True)
class SpanRow:
    """A part of a training step of one rank; times in microseconds, as in :class:`Row`.

    Attributes:
        group, rank: whose.
        kind, step, index, nbytes: as for :class:`Span`.
    """

    group: int
    rank: int
    kind: str
    step: int
    index: int | None
    nbytes: int
    started_us: float
    ended_us: float


@dataclass(frozen=True)
class SampleRow:
    """A reading of a rank's process. Numbers are totals since the process began, unless said otherwise.

    Attributes:
        group, rank: whose.
        at_us: when, as in :class:`Row`.
        cpu_s: that its main thread ran on a core.
        runnable_s: that its main thread could have run, and no core was free.
        minor_faults, major_faults: of pages, without and with a read from a disk.
        read_bytes: from disks.
        swapped_bytes: that lie in swap space now.
        mhz: the present frequency of the core that its main thread ran on last; None if it is not known.
        threads: of the process now, that can run.
        site: the line of the program, now; None if it was not told.
    """

    group: int
    rank: int
    at_us: float
    cpu_s: float
    runnable_s: float
    minor_faults: int
    major_faults: int
    read_bytes: int
    swapped_bytes: int
    mhz: float | None
    threads: int
    site: str | None


@dataclass(frozen=True)
class CallRow:
    """The calls of one function that one worker has made and another has executed.

    Attributes:
        group, callee: who has executed them.
        caller, function, calls, seconds: as for :class:`ExecutedCalls`.
    """

    group: int
    callee: int
    caller: int
    function: str
    calls: int
    seconds: float


class TracedGroup(NamedTuple):
    """A group in a trace.

    Attributes:
        number: in the trace.
        name, size: as the record has them.
        pids: by the ranks that the record covers, their processes.
        hosts: by the same ranks, the name of their host; "" where the group has one host.
    """

    number: int
    name: str
    size: int
    pids: Mapping[int, int]
    hosts: Mapping[int, str]


class Table(NamedTuple):
    """All that a trace tells: its groups, its operations by their beginning, and its clock.

    ``epoch_us`` is what to add to times to have them since 1970; ``clock`` names the host's boot.
    """

    groups: tuple[TracedGroup, ...]
    rows: tuple[Row, ...]
    epoch_us: float
    spans: tuple[SpanRow, ...] = ()
    samples: tuple[SampleRow, ...] = ()
    calls: tuple[CallRow, ...] = ()
    clock: str = ""


def table_of(trace: Mapping[str, Any]) -> Table:
    """Return what is in a trace, as ``json.load`` gives it."""
    names: dict[int, Mapping[str, Any]] = {}
    threads: dict[int, dict[int, Mapping[str, Any]]] = {}
    ends: dict[tuple[int, str], float] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "process_name":
            names[event["pid"]] = event["args"]
        elif event["ph"] == "M" and event["name"] == "thread_name":
            threads.setdefault(event["pid"], {})[event["tid"]] = event["args"]
        elif event["ph"] == "e":
            ends[event["pid"], event["id"]] = event["ts"]
    groups = {pid: _group(pid, said, threads.get(pid, {})) for pid, said in names.items()}
    rows: list[Row] = []
    spans: list[SpanRow] = []
    samples: list[SampleRow] = []
    for event in trace["traceEvents"]:
        if event.get("cat") == SAMPLE:
            samples.append(_sample(event))
        elif event["ph"] in "Xb":
            if event.get("cat") == SPAN:
                spans.append(_span(event, ends))
            else:
                rows.append(_row(groups[event["pid"]], event, ends))
    rows.sort(key=lambda row: (row.started_us, row.rank))
    spans.sort(key=lambda span: (span.started_us, span.rank))
    samples.sort(key=lambda sample: sample.at_us)
    told = trace.get("otherData", {})
    epoch_us, clock = told.get("epoch_us", 0.0), told.get("clock", "")
    calls = [
        CallRow(pid, rank, *each)
        for pid, ranks in threads.items()
        for rank, args in ranks.items()
        for each in args.get("calls", ())
    ]
    return Table(
        tuple(groups.values()), tuple(rows), epoch_us, tuple(spans), tuple(samples), tuple(calls), clock
    )


def global_ranks(table: Table, group: TracedGroup) -> tuple[int, ...]:
    """Return, by rank in a group, the rank in the largest group that is the same process; -1: none is.

    Nothing if that is not known, as of ranks that are threads of one process.
    """
    world = max(table.groups, key=lambda each: each.size)
    ranks = {pid: rank for rank, pid in world.pids.items()}
    if group is world or len(ranks) < len(world.pids):
        return ()
    return tuple(ranks.get(group.pids.get(rank, 0), -1) for rank in range(group.size))


def rows_by_rank(table: Table) -> tuple[TracedGroup | None, dict[int, list[Row]]]:
    """Return the largest group (None: there is no group), and by its ranks all operations of their processes.

    Of ranks that are threads of one process only the operations in that group are told: those in others could
    be any rank's.
    """
    world = max(table.groups, key=lambda group: group.size, default=None)
    if world is None:
        return None, {}
    shared = len(set(world.pids.values())) < len(world.pids)
    return world, {
        rank: [
            row
            for row in table.rows
            if (row.group == world.number and row.rank == rank)
            or (row.group != world.number and not shared and row.pid == pid)
        ]
        for rank, pid in world.pids.items()
    }


def _span(event: Mapping[str, Any], ends: Mapping[tuple[int, str], float]) -> SpanRow:
    said = event["args"]
    return SpanRow(
        group=event["pid"],
        rank=event["tid"],
        kind=said["kind"],
        step=said["step"],
        index=said["index"],
        nbytes=said["bytes"],
        started_us=event["ts"],
        ended_us=ends[event["pid"], event["id"]],
    )


def _sample(event: Mapping[str, Any]) -> SampleRow:
    return SampleRow(group=event["pid"], rank=event["tid"], at_us=event["ts"], **event["args"])


def _group(number: int, said: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]]) -> TracedGroup:
    size = said.get("size", max(ranks, default=-1) + 1)
    pids = {rank: args.get("pid", 0) for rank, args in sorted(ranks.items())}
    hosts = {rank: args.get("host", "") for rank, args in sorted(ranks.items())}
    return TracedGroup(number, said.get("group", said["name"]), size, pids, hosts)


def _row(group: TracedGroup, event: Mapping[str, Any], ends: Mapping[tuple[int, str], float]) -> Row:
    said, rank = event["args"], event["tid"]
    blocking = event["ph"] == "X"
    duration = event["dur"] if blocking else ends[event["pid"], event["id"]] - event["ts"]
    return Row(
        group=group.number,
        group_name=group.name,
        rank=rank,
        pid=group.pids.get(rank, 0),
        number=said["number"],
        kind=event["name"].removesuffix(_BACKGROUND).partition(" (")[0],
        op=said.get("op"),
        dtype=said.get("dtype"),
        root=said.get("root"),
        count=said.get("count"),
        nbytes=said["bytes"],
        peer=said.get("peer"),
        tag=said.get("tag"),
        blocking=blocking,
        state=said["state"],
        started_us=event["ts"],
        duration_us=duration,
        waited_us=said["waited_us"],
        waited_for=said.get("waited_for"),
    )
