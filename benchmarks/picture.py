"""The report as a picture: per operation a panel of time over size, a line per peer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import BenchReport, Cell, ColumnInfo
from benchmarks.table import OPERATION_TITLES, format_ratio, format_time
from torchestra.engine.recorder.trace import replacing
from torchestra.monitor.bench import size_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_PANELS_PER_ROW = 4
_PANEL_INCHES = (4.1, 3.1)
_OURS = {
    "torchestra": ("#d6006c", "-"),
    "symmetric": ("#d6006c", (0, (2, 1.2))),
    "persistent": ("#d6006c", (0, (5, 1.5))),
}
_MPI_COLOURS = ("#1f6fb4", "#2a9d74", "#e08a1e", "#7a5bb5", "#5f7d1f")
_GLOO_COLOUR = "#6b6b6b"
_FLOOR_COLOUR = "#111111"
_INK = "#333333"


def draw(report: BenchReport, path: Path) -> None:
    """Draw the collectives of all world sizes into one PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    worlds = report.worlds
    operations = list(dict.fromkeys(cell.operation for cell in report.cells))
    # One panel more than there are operations: for the legend.
    columns = min(_PANELS_PER_ROW, len(operations) + 1)
    rows = -(-(len(operations) + 1) // columns)
    width, height = _PANEL_INCHES
    figure = Figure(
        figsize=(width * columns + 0.6, (height * rows + 0.9) * len(worlds)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(worlds), 1, squeeze=False, hspace=0.04)
    for part, world in zip(parts[:, 0], worlds, strict=True):
        means = (report.mean(report.gloo_ratio, world), report.mean(report.mpi_ratio, world))
        text = [
            f"{name} / torchestra {format_ratio(m)}"
            for name, m in zip(("Gloo", "best MPI"), means, strict=True)
            if m
        ]
        heading = f"{world} ranks" + (f"   (geometric means: {', '.join(text)})" if text else "")
        part.suptitle(heading, fontsize=15, fontweight="bold", color=_INK)
        panels = part.subplots(rows, columns, squeeze=False).flatten()
        for panel, operation in zip(panels, operations, strict=False):
            cells = [cell for cell in report.cells if (cell.world, cell.operation) == (world, operation)]
            _draw_panel(panel, report, operation, cells)
        _draw_legend(panels[len(operations)], report)
        for panel in panels[len(operations) + 1 :]:
            panel.axis("off")
    with replacing(path, binary=True) as file:
        figure.savefig(file, dpi=110, format="png")


def _style(report: BenchReport, column: ColumnInfo) -> dict[str, Any]:
    if column.kind == "torchestra":
        colour, dashes = _OURS[column.key]
        return {
            "color": colour,
            "linestyle": dashes,
            "linewidth": 2.6,
            "marker": "o",
            "markersize": 5,
            "zorder": 5,
        }
    colour = _GLOO_COLOUR
    if column.kind == "mpi":
        colour = _MPI_COLOURS[report.mpi_keys.index(column.key) % len(_MPI_COLOURS)]
    return {"color": colour, "linewidth": 1.6, "marker": "o", "markersize": 3.5, "zorder": 3}


def _draw_panel(panel: Axes, report: BenchReport, operation: str, cells: list[Cell]) -> None:
    panel.set_title(OPERATION_TITLES.get(operation, operation), fontsize=12, loc="left", color=_INK)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    panel.tick_params(labelsize=8.5, colors=_INK)
    if operation == "barrier":
        _draw_dots(panel, report, cells)
    else:
        _draw_lines(panel, report, cells)


def _draw_lines(panel: Axes, report: BenchReport, cells: list[Cell]) -> None:
    for column in filter(lambda column: column.shown, report.columns):
        there = [cell for cell in cells if column.key in cell.timings]
        times = [cell.timings[column.key].median_us for cell in there]
        if times:
            panel.plot([cell.size for cell in there], times, **_style(report, column))
    floors = [(cell.size, cell.floor_us) for cell in cells if cell.floor_us is not None]
    if floors:
        panel.plot(*zip(*floors, strict=True), color=_FLOOR_COLOUR, linestyle=":", linewidth=2, zorder=4)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    sizes = [cell.size for cell in cells]
    panel.set_xticks(sizes, [size_label(size) for size in sizes], rotation=30)
    panel.minorticks_off()
    low, high = panel.get_ylim()
    decades = [10.0**power for power in range(-2, 8) if low <= 10.0**power <= high]
    panel.set_yticks(decades, [_time_label(value) for value in decades])
    panel.grid(True, color="#e4e4e4", linewidth=0.8)
    panel.set_axisbelow(True)


def _draw_dots(panel: Axes, report: BenchReport, cells: list[Cell]) -> None:
    timings = cells[0].timings if cells else {}
    columns = [column for column in report.columns if column.shown and column.key in timings]
    for place, column in enumerate(columns):
        value = timings[column.key].median_us
        panel.plot(value, place, marker="o", markersize=9, color=_style(report, column)["color"])
        text = format_time(value)
        panel.annotate(
            text if text.endswith("ms") else f"{text} µs",
            (value, place),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    panel.set_xscale("log")
    low, high = panel.get_xlim()
    panel.set_xlim(low / 1.5, high * 8)
    panel.margins(y=0.2)
    panel.set_xticks([])
    panel.minorticks_off()
    panel.set_yticks(range(len(columns)), [column.title for column in columns])
    panel.invert_yaxis()
    panel.spines["bottom"].set_visible(False)


def _draw_legend(panel: Axes, report: BenchReport) -> None:
    panel.axis("off")
    for column in filter(lambda column: column.shown, report.columns):
        title = f"{column.title} (tensors from dist.empty)" if column.key == "symmetric" else column.title
        panel.plot([], [], label=title, **_style(report, column))
    if any(cell.floor_us is not None for cell in report.cells):
        panel.plot([], [], label="floor: memory bandwidth", color=_FLOOR_COLOUR, linestyle=":", linewidth=2)
    panel.legend(loc="center left", frameon=False, fontsize=10.5)
    panel.text(
        0.0,
        0.02,
        "median of the slowest rank over bytes per rank",
        fontsize=9,
        color=_INK,
        transform=panel.transAxes,
    )


def _time_label(microseconds: float) -> str:
    if microseconds < 1e3:
        return f"{microseconds:g} µs"
    return f"{microseconds / 1e3:g} ms" if microseconds < 1e6 else f"{microseconds / 1e6:g} s"
