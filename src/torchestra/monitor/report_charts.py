"""The charts of a report, drawn by bokeh from an analysis; only positions and colours are computed here."""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bokeh.models import (
    ColumnDataSource,
    CustomJSTickFormatter,
    FactorRange,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    Range1d,
)
from bokeh.palettes import Category10, YlOrRd9
from bokeh.plotting import figure

from torchestra.engine.recorder.formats.rows import Row, SpanRow
from torchestra.monitor.analysis.calls import CallEdge
from torchestra.monitor.analysis.summary import GroupAnalysis, seconds, size

_KINDS = {
    "all_reduce": "#4e79a7",
    "broadcast": "#59a14f",
    "all_gather": "#edc948",
    "reduce_scatter": "#f28e2b",
    "all_to_all": "#b07aa1",
    "barrier": "#9c755f",
    "reduce": "#76b7b2",
    "gather": "#ff9da7",
    "scatter": "#d37295",
    "send": "#499894",
    "recv": "#86bcb6",
}
_OTHER_KIND = "#888888"
_SPANS = {"forward": "#b6d7a8", "backward": "#a9c4e4", "wait": "#e8a0a0"}
_WAITING, _MOVING, _ELSEWHERE, _HIDDEN = "#d9534f", "#4e79a7", "#d5d5d5", "#8fbc8f"
_MAX_LINES, _MAX_FUNCTIONS = 10, 5
_SHOWN = 16
_ROW_PX, _HEAD_PX = 34, 90
_TOOLS = "xpan,xwheel_zoom,xbox_zoom,reset,save"


class Chart(NamedTuple):
    """A figure, and what stands above it."""

    title: str
    caption: str
    figure: Any


def charts(analysis: GroupAnalysis, copies: Mapping[int, float] | None) -> Iterator[Chart]:
    """Return the charts of a group, in the page's order; those for which there is nothing are left out."""
    if analysis.rows:
        yield from _operation_charts(analysis, copies)
    if analysis.calls:
        yield Chart(
            "RPC calls",
            "An arrow leads from the worker that called to the one that executed; the broader, the more time"
            " that took. Beside it stands the number of calls; point there for the functions.",
            _call_graph(analysis),
        )


def _operation_charts(analysis: GroupAnalysis, copies: Mapping[int, float] | None) -> Iterator[Chart]:
    timeline = _timeline(analysis)
    yield Chart(
        "Timeline",
        "Each rank's operations; red: waiting for another rank. Below them the parts of training steps, where"
        " DistributedDataParallel records them. It opens at the last operations: drag to move, turn the wheel"
        " to see all of them.",
        timeline,
    )
    if analysis.waiting.total > 0:
        yield Chart(
            "Who waited for whom",
            "Seconds that the rank on the left waited for the rank below.",
            _waiting_matrix(analysis),
        )
    yield Chart(
        "Where the time went",
        "Of each rank, from its first recorded operation to its last.",
        _time_use(analysis),
    )
    if analysis.phases:
        yield Chart(
            "The ranks' own work",
            "Mean milliseconds of each part, without waiting for other ranks.",
            _phases(analysis),
        )
    if analysis.group.size <= _MAX_LINES:
        yield Chart(
            "Who came late",
            "How much later than the first rank each rank came to a collective.",
            _lateness(analysis),
        )
    if analysis.bandwidths:
        caption = "Bytes a second by size, waiting left out."
        if copies:
            caption += (
                " The line is how fast one core of this machine copies, measured now, again and again: what"
                " fits into its caches comes from there."
            )
        yield Chart("Bandwidth", caption, _bandwidth(analysis, copies or {}))
    if analysis.overlaps:
        yield Chart(
            "Communication behind compute",
            "Of a training step, the time in which gradients were reduced while backward went on, and while"
            " the program only waited for it.",
            _overlap(analysis),
        )
    if analysis.buckets:
        yield Chart(
            "Buckets of the last step",
            "From when the gradients of a bucket were ready (light) to its reduction (dark).",
            _buckets(analysis),
        )


def _figure(height: int, **options: Any) -> Any:
    options = {"tools": _TOOLS, "active_drag": "xpan", "active_scroll": None, **options}
    drawn = figure(height=height, sizing_mode="stretch_width", **options)
    drawn.toolbar.logo = None
    drawn.toolbar.autohide = True
    drawn.grid.grid_line_color = "#eeeeee"
    drawn.outline_line_color = None
    return drawn


def _rank_axis(drawn: Any, ranks: list[int]) -> None:
    drawn.yaxis.ticker = FixedTicker(ticks=[-rank for rank in ranks])
    drawn.yaxis.formatter = CustomJSTickFormatter(code="return 'rank ' + (-tick)")
    drawn.ygrid.grid_line_color = None


def _rows_figure(analysis: GroupAnalysis, rows: int, **options: Any) -> Any:
    ranks = sorted(analysis.group.pids)
    drawn = _figure(_HEAD_PX + _ROW_PX * rows, **options)
    drawn.y_range.start, drawn.y_range.end = -max(ranks) - 0.6, -min(ranks) + 0.6
    _rank_axis(drawn, ranks)
    return drawn


def _began(analysis: GroupAnalysis) -> float:
    """Return when the group's record begins, in microseconds: 0 of the charts."""
    return min(row.started_us for row in analysis.rows)


def _timeline(analysis: GroupAnalysis) -> Any:
    began = _began(analysis)
    drawn = _rows_figure(
        analysis, analysis.group.size, x_axis_label="milliseconds", active_scroll="xwheel_zoom"
    )
    for kind in sorted({row.kind for row in analysis.rows}):
        own = [row for row in analysis.rows if row.kind == kind]
        source = ColumnDataSource(_bars(own, began))
        bars = drawn.quad(left="left", right="right", top="top", bottom="bottom", source=source,
                          color=_KINDS.get(kind, _OTHER_KIND), line_width=0.5, legend_label=kind)  # fmt: skip
        drawn.quad(left="left", right="waited", top="top", bottom="bottom", source=source, color=_WAITING,
                   line_alpha=0, legend_label="waiting")  # fmt: skip
        told = [("", "@what"), ("took", "@took"), ("waited", "@waiting"), ("state", "@state")]
        drawn.add_tools(HoverTool(renderers=[bars], tooltips=told))
    spans = [span for span in analysis.table.spans if span.group == analysis.group.number]
    for kind, colour in _SPANS.items():
        own_spans = [span for span in spans if span.kind == kind]
        if own_spans:
            source = ColumnDataSource(_span_bars(own_spans, began))
            bars = drawn.quad(left="left", right="right", top="top", bottom="bottom", source=source,
                              color=colour, line_color="#ffffff", legend_label=f"({kind})")  # fmt: skip
            drawn.add_tools(HoverTool(renderers=[bars], tooltips=[("", "@what"), ("took", "@took")]))
    drawn.add_layout(drawn.legend[0], "above")
    drawn.legend.orientation = "horizontal"
    drawn.legend.border_line_color = None
    _open_at_the_end(drawn, analysis, began)
    return drawn


def _open_at_the_end(drawn: Any, analysis: GroupAnalysis, began: float) -> None:
    """Show only the last operations at first; all of them are too many to be seen one by one."""
    ends = sorted(row.started_us + row.duration_us for row in analysis.rows)
    shown = [end for end in ends if end < ends[-1]][-_SHOWN * analysis.group.size :]
    if shown:
        drawn.x_range.start, drawn.x_range.end = (shown[0] - began) / 1e3, (ends[-1] - began) / 1e3


def _bars(rows: list[Row], began: float) -> dict[str, list[Any]]:
    left = [(row.started_us - began) / 1e3 for row in rows]
    return {
        "left": left,
        "right": [start + row.duration_us / 1e3 for start, row in zip(left, rows, strict=True)],
        "waited": [
            start + min(row.waited_us, row.duration_us) / 1e3 for start, row in zip(left, rows, strict=True)
        ],
        "top": [-row.rank + (0.4 if row.blocking else 0.12) for row in rows],
        "bottom": [-row.rank + 0.05 for row in rows],
        "what": [_described(row) for row in rows],
        "took": [seconds(row.duration_us / 1e6) for row in rows],
        "waiting": [_waited(row) for row in rows],
        "state": [row.state for row in rows],
    }


def _described(row: Row) -> str:
    name = f"{row.kind} {'tag ' if row.is_message else ''}{row.tag if row.is_message else row.number}"
    peer = f", {'to' if row.kind == 'send' else 'from'} rank {row.peer}" if row.peer is not None else ""
    return f"rank {row.rank}: {name}{peer}, {size(row.nbytes)}{f' of {row.dtype}' if row.dtype else ''}"


def _waited(row: Row) -> str:
    if row.waited_us <= 0:
        return "no"
    told = seconds(row.waited_us / 1e6)
    return told if row.waited_for is None else f"{told}, most for rank {row.waited_for}"


def _span_bars(spans: list[SpanRow], began: float) -> dict[str, list[Any]]:
    return {
        "left": [(span.started_us - began) / 1e3 for span in spans],
        "right": [(span.ended_us - began) / 1e3 for span in spans],
        "top": [-span.rank - (0.05 if span.kind != "wait" else 0.25) for span in spans],
        "bottom": [-span.rank - 0.4 for span in spans],
        "what": [f"rank {span.rank}: {span.kind} of step {span.step}" for span in spans],
        "took": [seconds((span.ended_us - span.started_us) / 1e6) for span in spans],
    }


def _waiting_matrix(analysis: GroupAnalysis) -> Any:
    matrix = analysis.waiting.seconds
    ranks = [str(rank) for rank in range(len(matrix))]
    cells = [(waiter, awaited) for waiter in range(len(matrix)) for awaited in range(len(matrix))]
    found = [matrix[waiter][awaited] for waiter, awaited in cells]
    source = ColumnDataSource({
        "waiter": [str(waiter) for waiter, _ in cells],
        "awaited": [str(awaited) for _, awaited in cells],
        "seconds": found,
        "told": [seconds(each) if each > 0 else "" for each in found],
        "colour": ["#ffffff" if each > max(found) * 0.6 else "#333333" for each in found],
    })  # fmt: skip
    side = max(220, 60 + 36 * len(ranks))
    drawn = figure(x_range=FactorRange(factors=ranks), y_range=FactorRange(factors=ranks[::-1]),
                   width=min(1100, 2 * side), height=side,
                   tools="hover,save", tooltips="rank @waiter waited @told for rank @awaited",
                   x_axis_label="for rank", y_axis_label="rank")  # fmt: skip
    drawn.toolbar.logo = None
    drawn.toolbar.autohide = True
    drawn.grid.grid_line_color = None
    colours = LinearColorMapper(palette=["#ffffff", *YlOrRd9[::-1]], low=0, high=max(found) or 1)
    drawn.rect("awaited", "waiter", 1, 1, source=source, line_color="#ffffff",
               fill_color={"field": "seconds", "transform": colours})  # fmt: skip
    if len(ranks) <= 2 * _MAX_LINES:
        drawn.text("awaited", "waiter", "told", source=source, text_align="center", text_baseline="middle",
                   text_font_size="12px", text_color="colour")  # fmt: skip
    return drawn


def _stacked(
    drawn: Any, ranks: list[int], parts: Mapping[str, tuple[str, list[float]]], unit_s: float = 1.0
) -> None:
    """Draw a bar for each rank; by the names of its parts their colours and lengths, in this unit."""
    left = [0.0] * len(ranks)
    for name, (colour, lengths) in parts.items():
        right = [start + length for start, length in zip(left, lengths, strict=True)]
        told = [seconds(length * unit_s) for length in lengths]
        source = ColumnDataSource(
            {"y": [-rank for rank in ranks], "left": left, "right": right, "told": told}
        )
        bars = drawn.hbar(y="y", left="left", right="right", height=0.7, color=colour, source=source,
                          legend_label=name)  # fmt: skip
        drawn.add_tools(HoverTool(renderers=[bars], tooltips=f"{name}: @told"))
        left = right
    drawn.x_range.start = 0
    drawn.add_layout(drawn.legend[0], "above")
    drawn.legend.orientation = "horizontal"
    drawn.legend.border_line_color = None


def _time_use(analysis: GroupAnalysis) -> Any:
    uses = analysis.uses
    drawn = _rows_figure(analysis, len(uses), x_axis_label="seconds")
    parts = {
        "waiting for other ranks": (_WAITING, [use.waiting for use in uses]),
        "in operations": (_MOVING, [use.moving for use in uses]),
        "in no operation": (_ELSEWHERE, [use.elsewhere for use in uses]),
    }
    _stacked(drawn, [use.rank for use in uses], parts)
    return drawn


def _phases(analysis: GroupAnalysis) -> Any:
    ranks = sorted({rank for phase in analysis.phases for rank in phase.mean})
    colours = (*_SPANS.values(), _OTHER_KIND)
    drawn = _rows_figure(analysis, len(ranks), x_axis_label="milliseconds")
    parts = {
        phase.name: (colour, [phase.mean.get(rank, 0.0) * 1e3 for rank in ranks])
        for phase, colour in zip(analysis.phases, colours, strict=False)
    }
    _stacked(drawn, ranks, parts, 1e-3)
    return drawn


def _lateness(analysis: GroupAnalysis) -> Any:
    first: dict[int, float] = {}
    calls = [row for row in analysis.rows if not row.is_message]
    for row in calls:
        first[row.number] = min(first.get(row.number, row.started_us), row.started_us)
    drawn = _figure(280, x_axis_label="number of the collective", y_axis_label="milliseconds late")
    for rank in sorted(analysis.group.pids):
        own = [row for row in calls if row.rank == rank]
        late = [(row.started_us - first[row.number]) / 1e3 for row in own]
        drawn.scatter([row.number for row in own], late, size=5, color=Category10[10][rank % 10],
                      legend_label=f"rank {rank}", alpha=0.8)  # fmt: skip
    drawn.add_layout(drawn.legend[0], "right")
    drawn.legend.border_line_color = None
    drawn.legend.click_policy = "hide"
    return drawn


def _bandwidth(analysis: GroupAnalysis, copies: Mapping[int, float]) -> Any:
    drawn = _figure(320, x_axis_type="log", y_axis_type="log", x_axis_label="bytes",
                    y_axis_label="bytes a second")  # fmt: skip
    formatter = CustomJSTickFormatter(code=_BYTES_CODE)
    drawn.xaxis.formatter = drawn.yaxis.formatter = formatter
    if copies:
        drawn.line(list(copies), list(copies.values()), color="#555555", line_dash="dashed", line_width=2,
                   legend_label="copy by one core")  # fmt: skip
    for kind in sorted({each.kind for each in analysis.bandwidths}):
        own = [each for each in analysis.bandwidths if each.kind == kind]
        source = ColumnDataSource({
            "x": [each.nbytes for each in own],
            "y": [each.bytes_per_s for each in own],
            "told": [
                f"{kind} of {size(each.nbytes)}: {size(each.bytes_per_s)} a second in {each.calls} calls;"
                f" {size(each.whole_bytes_per_s)} a second with the waiting"
                for each in own
            ],
        })  # fmt: skip
        dots = drawn.scatter("x", "y", source=source, size=10, color=_KINDS.get(kind, _OTHER_KIND),
                             legend_label=kind)  # fmt: skip
        drawn.add_tools(HoverTool(renderers=[dots], tooltips="@told"))
    drawn.add_layout(drawn.legend[0], "right")
    drawn.legend.border_line_color = None
    return drawn


_BYTES_CODE = """
const units = ['', 'K', 'M', 'G', 'T'];
let unit = 0, left = tick;
while (left >= 1000 && unit < 4) { left /= 1000; unit += 1; }
return parseFloat(left.toPrecision(3)) + ' ' + units[unit] + 'B';
"""


def _overlap(analysis: GroupAnalysis) -> Any:
    overlaps = analysis.overlaps
    drawn = _rows_figure(analysis, len(overlaps), x_axis_label="milliseconds of a step")
    hidden = [max(0.0, each.communicating - each.exposed) * 1e3 for each in overlaps]
    parts = {
        "behind backward": (_HIDDEN, hidden),
        "only waited for": (_WAITING, [each.exposed * 1e3 for each in overlaps]),
    }
    _stacked(drawn, [each.rank for each in overlaps], parts, 1e-3)
    return drawn


def _buckets(analysis: GroupAnalysis) -> Any:
    steps = [
        {bucket.step for bucket in analysis.buckets if bucket.rank == rank} for rank in analysis.group.pids
    ]
    common = set.intersection(*filter(None, steps))
    last = max(common or {bucket.step for bucket in analysis.buckets})
    own = [bucket for bucket in analysis.buckets if bucket.step == last]
    began = min(bucket.ready_us for bucket in own)
    count = max(bucket.index for bucket in own) + 1
    drawn = _rows_figure(analysis, analysis.group.size * max(1, count // 4), x_axis_label="milliseconds",
                         active_scroll="xwheel_zoom")  # fmt: skip
    height = 0.8 / count
    tops = [-bucket.rank + 0.4 - bucket.index * height for bucket in own]
    source = ColumnDataSource({
        "ready": [(bucket.ready_us - began) / 1e3 for bucket in own],
        "left": [(bucket.started_us - began) / 1e3 for bucket in own],
        "right": [(bucket.ended_us - began) / 1e3 for bucket in own],
        "top": tops,
        "bottom": [top - height * 0.85 for top in tops],
        "told": [
            f"rank {bucket.rank}, step {bucket.step}, bucket {bucket.index}: {size(bucket.nbytes)}, reduced"
            f" in {seconds((bucket.ended_us - bucket.started_us) / 1e6)}"
            for bucket in own
        ],
    })  # fmt: skip
    drawn.quad(left="ready", right="left", top="top", bottom="bottom", source=source, color="#c9d8e8")
    bars = drawn.quad(left="left", right="right", top="top", bottom="bottom", source=source, color=_MOVING)
    drawn.add_tools(HoverTool(renderers=[bars], tooltips="@told"))
    return drawn


def _call_graph(analysis: GroupAnalysis) -> Any:
    """Draw the workers on a circle, and an arrow from each to those that it calls."""
    count, side = analysis.group.size, 420
    drawn = figure(width=side + 120, height=side, tools="pan,wheel_zoom,reset,save", match_aspect=True,
                   x_range=Range1d(start=-1.5, end=1.5), y_range=Range1d(start=-1.2, end=1.2))  # fmt: skip
    drawn.toolbar.logo = None
    drawn.toolbar.autohide = True
    drawn.axis.visible = drawn.grid.visible = False
    drawn.outline_line_color = None
    positions = [cmath.rect(1, math.tau * (0.25 - rank / count)) for rank in range(count)]
    edges = [edge for edge in analysis.calls if 0 <= edge.caller < count and edge.caller != edge.callee]
    most = max((edge.seconds for edge in edges), default=0.0) or 1.0
    source = ColumnDataSource(_arrows(edges, positions, most))
    drawn.segment("x0", "y0", "x1", "y1", source=source, line_width="width", line_color=_MOVING)
    drawn.scatter("x1", "y1", source=source, marker="triangle", angle="angle", size="head", color=_MOVING)
    dots = drawn.scatter("x", "y", source=source, size=12, color="#ffffff", line_color=_MOVING)
    drawn.text("x", "y", "calls", source=source, text_font_size="12px", x_offset=10, text_baseline="middle")
    drawn.add_tools(HoverTool(renderers=[dots], tooltips="@what"))
    xs, ys = [position.real for position in positions], [position.imag for position in positions]
    drawn.scatter(xs, ys, size=34, color=_ELSEWHERE, line_color="#888888")
    drawn.text(xs, ys, [str(rank) for rank in range(count)], text_align="center", text_baseline="middle")
    return drawn


def _arrows(edges: list[CallEdge], positions: list[complex], most: float) -> dict[str, list[Any]]:
    """Return the columns of the arrows; each lies a little to the right of the one that leads back."""
    ways = [positions[edge.callee] - positions[edge.caller] for edge in edges]
    units = [way / abs(way) for way in ways]
    starts = [positions[edge.caller] + unit * (0.14 - 0.05j) for edge, unit in zip(edges, units, strict=True)]
    ends = [positions[edge.callee] - unit * (0.17 + 0.05j) for edge, unit in zip(edges, units, strict=True)]
    widths = [1 + 6 * edge.seconds / most for edge in edges]
    return {
        "x0": [start.real for start in starts],
        "y0": [start.imag for start in starts],
        "x1": [end.real for end in ends],
        "y1": [end.imag for end in ends],
        "x": [(start.real + end.real) / 2 for start, end in zip(starts, ends, strict=True)],
        "y": [(start.imag + end.imag) / 2 for start, end in zip(starts, ends, strict=True)],
        "width": widths,
        "head": [8 + 2 * width for width in widths],
        "angle": [cmath.phase(unit) - math.pi / 2 for unit in units],
        "calls": [f"{edge.calls:,}" for edge in edges],
        "what": [
            f"rank {edge.caller} called rank {edge.callee}: "
            + "; ".join(
                f"{name}: {calls:,} calls, {seconds(took)}" for name, calls, took in edge.functions[:5]
            )
            for edge in edges
        ],
    }
