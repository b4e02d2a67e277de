"""All that a report tells of a group, and the sentences that it begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from torchestra.engine.recorder.formats.rows import Row, Table, TracedGroup, global_ranks
from torchestra.errors import named_globally
from torchestra.monitor.analysis.bandwidth import Bandwidth, bandwidths_of
from torchestra.monitor.analysis.calls import CallEdge, call_edges
from torchestra.monitor.analysis.causes import Readings, causes, readings_of, shortage
from torchestra.monitor.analysis.phases import (
    BETWEEN_OPERATIONS,
    BETWEEN_STEPS,
    BucketTime,
    Overlap,
    Phase,
    buckets_of,
    overlaps_of,
    phases_of,
    slowest_phase,
)
from torchestra.monitor.analysis.waiting import (
    Straggler,
    TimeUse,
    Waiting,
    rows_of,
    straggler,
    time_use,
    waiting_of,
)

_HARDLY = 0.02
_STUCK_US = 1e6


@dataclass(frozen=True)
class GroupAnalysis:
    """What the operations of a group tell; the parts are those of the modules here.

    Attributes:
        table: that it was made of.
        straggler: None if no rank stands out.
        causes: why that rank is slow, in sentences.
    """

    table: Table
    group: TracedGroup
    rows: Sequence[Row]
    waiting: Waiting
    uses: Sequence[TimeUse]
    straggler: Straggler | None
    phases: Sequence[Phase]
    buckets: Sequence[BucketTime]
    overlaps: Sequence[Overlap]
    bandwidths: Sequence[Bandwidth]
    readings: Sequence[Readings]
    causes: Sequence[str]
    calls: Sequence[CallEdge]


def analyse(table: Table) -> list[GroupAnalysis]:
    """Return the analysis of each group of several ranks that has operations or calls, the busiest first."""
    found = [_analysis(table, group) for group in table.groups if group.size > 1]
    found = [each for each in found if each.rows or each.calls]
    return sorted(found, key=lambda each: -sum(use.total for use in each.uses))


def nothing_to_tell(table: Table) -> list[str]:
    """Return, where :func:`analyse` finds no group, why no group has anything to tell, in sentences."""
    if not table.groups:
        return ["There is no group in the record."]
    return [
        f"group {group.name!r}, {counted(group.size, 'rank')}: "
        + (
            "there is no other rank to wait for."
            if group.size == 1
            else "no rank has called an operation yet."
        )
        for group in table.groups
    ]


def counted(number: int, noun: str) -> str:
    """Return a number of things in words: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _analysis(table: Table, group: TracedGroup) -> GroupAnalysis:
    rows = rows_of(table, group.number)
    calls = call_edges([call for call in table.calls if call.group == group.number])
    if calls and all(row.number == 1 for row in rows):
        rows = []  # there is nothing but the barrier at which the workers met
    spans = [span for span in table.spans if span.group == group.number]
    waiting = waiting_of(rows, group.size)
    uses = time_use(rows, sorted(group.pids))
    last = straggler(waiting, uses)
    readings = readings_of([sample for sample in table.samples if sample.group == group.number], rows)
    buckets = buckets_of(rows, spans)
    return GroupAnalysis(
        table=table,
        group=group,
        rows=rows,
        waiting=waiting,
        uses=uses,
        straggler=last,
        phases=phases_of(rows, spans),
        buckets=buckets,
        overlaps=overlaps_of(spans, buckets),
        bandwidths=bandwidths_of(rows),
        readings=readings,
        causes=causes(readings, last.rank) if last is not None else [],
        calls=calls,
    )


def sentences(analysis: GroupAnalysis, copies: Mapping[int, float] | None = None) -> list[str]:
    """Return what is worth knowing of a group, the most important first.

    Args:
        copies: by size, how many bytes one core of the machine copies a second; None: it is not known.
    """
    told = _calls(analysis)
    if not analysis.rows:
        return told + shortage(analysis.readings)
    told = _stuck(analysis) + _who(analysis) + list(analysis.causes) + told
    total = sum(use.total for use in analysis.uses)
    waited = analysis.waiting.total / total if total else 0.0
    if analysis.straggler is None:
        told.append(
            "The ranks hardly wait for each other."
            if waited < _HARDLY
            else f"The ranks wait for each other {waited:.0%} of their time; no rank causes most of it."
        )
    else:
        told.append(f"In all, the ranks wait for each other {waited:.0%} of their time.")
    told += shortage(analysis.readings)
    told += _overlap(analysis)
    told += _bandwidth(analysis, copies)
    return told


def _named(analysis: GroupAnalysis, *ranks: int) -> str:
    return named_globally(ranks, global_ranks(analysis.table, analysis.group))


def _calls(analysis: GroupAnalysis) -> list[str]:
    """Return between which workers RPC calls took most time, and for which function."""
    if not analysis.calls:
        return []
    edge = analysis.calls[0]
    name, calls, took = edge.functions[0]
    caller = _named(analysis, edge.caller) if edge.caller >= 0 else "several ranks"
    return [
        f"Of calls by RPC, {_named(analysis, edge.callee)} spent most time on those of {caller}:"
        f" {seconds(edge.seconds)} in {edge.calls:,} calls; {name} took {seconds(took)} in {calls:,} of them."
    ]


def _who(analysis: GroupAnalysis) -> list[str]:
    last = analysis.straggler
    if last is None:
        return []
    phase = slowest_phase(analysis.phases, last.rank)
    share = f"{last.share_of_waiting:.0%} of all waiting is for it ({seconds(last.seconds)} in all)"
    if phase is None:
        return [f"The others wait most for {_named(analysis, last.rank)}: {share}."]
    where = {BETWEEN_OPERATIONS: "between operations", BETWEEN_STEPS: "between its steps"}
    name = where.get(phase.name, f"in {phase.name}")
    usual = median(own for rank, own in phase.mean.items() if rank != last.rank)
    compared = f"{seconds(phase.mean[last.rank])} against {seconds(usual)}"
    who = _named(analysis, last.rank).capitalize()
    return [f"{who} is {slower(phase.slowdown(last.rank))} {name} ({compared}); {share}."]


def slower(share: float) -> str:
    """Return how much slower something is, in words; 0.18 is 18 % slower."""
    return f"{share:.0%} slower" if share < 1 else f"{share + 1:.1f} times as slow as the others"


def _stuck(analysis: GroupAnalysis) -> list[str]:
    """Return which ranks have been in a collective for a second or more, and which have not come to it."""
    running = [
        row
        for row in analysis.rows
        if row.state == "running" and not row.is_message and row.duration_us > _STUCK_US
    ]
    if not running:
        return []
    number = min(row.number for row in running)
    inside = [row for row in running if row.number == number]
    came = {row.rank for row in analysis.rows if not row.is_message and row.number >= number}
    missing = sorted(set(analysis.group.pids) - came)
    if not missing:
        return []
    longest = max(row.duration_us for row in inside) / 1e6
    came_first = _named(analysis, *sorted(row.rank for row in inside)).capitalize()
    return [
        f"{came_first} {'has' if len(inside) == 1 else 'have'} been in {inside[0].kind} (number {number}) for"
        f" {seconds(longest)}; {_named(analysis, *missing)} had not come."
    ]


def _overlap(analysis: GroupAnalysis) -> list[str]:
    overlaps = [each for each in analysis.overlaps if each.communicating > 0]
    if not overlaps:
        return []
    hidden = fmean(each.hidden_share for each in overlaps)
    exposed = fmean(each.exposed for each in overlaps)
    return [
        f"Of the reduction of gradients, {hidden:.0%} is hidden behind backward; for {seconds(exposed)} a"
        " step the program only waits for it (and for ranks that come late to it)."
    ]


def _bandwidth(analysis: GroupAnalysis, copies: Mapping[int, float] | None) -> list[str]:
    """Return the bandwidth of the operations that moved most bytes."""
    if not analysis.bandwidths:
        return []
    most = max(analysis.bandwidths, key=lambda each: each.nbytes * each.calls)
    told = f"{most.kind} of {size(most.nbytes)} moves {size(most.bytes_per_s)} a second, waiting left out"
    if copies and most.nbytes in copies:
        told += f"; one core of this machine copies {size(copies[most.nbytes])} a second"
    return [f"{told}."]


def seconds(duration: float) -> str:
    """Return a duration in the unit that suits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if duration * factor >= 1:
            return f"{duration * factor:.3g} {unit}"
    return f"{duration * 1e6:.2g} µs"


def size(nbytes: float) -> str:
    """Return a number of bytes in the unit that suits it."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
