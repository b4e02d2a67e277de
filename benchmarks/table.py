"""The report as tables: on a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.report import BenchReport, Cell, ColumnInfo, SideTable
from torchestra.monitor.bench import size_label

__all__ = ["format_ratio", "format_seconds", "format_time", "render", "summary_lines", "to_markdown"]

_MIN_WIDTH = 160
_MISSING = "-"
_LISTED_CELLS = 12
Styler = Callable[[BenchReport, Cell, ColumnInfo], str]

OPERATION_TITLES = {"send_recv": "send + recv"}
_LOST = "bold red"
_WON = "green"


def format_time(microseconds: float) -> str:
    """Return microseconds in about three digits: ``0.73``, ``28.4``, ``1122``; from 10 ms on ``11.3 ms``."""
    if microseconds < 9.995:
        return f"{microseconds:.2f}"
    if microseconds < 99.95:
        return f"{microseconds:.1f}"
    if microseconds < 10_000:
        return f"{microseconds:.0f}"
    return f"{microseconds / 1e3:.1f} ms"


def format_ratio(ratio: float | None) -> str:
    """Return a ratio with two digits or so; a dash where there is none."""
    if ratio is None:
        return _MISSING
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"


def format_seconds(value: float | None) -> str:
    """Return a value of a side table; a dash where there is none."""
    return _MISSING if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def render(report: BenchReport, console: Console | None = None) -> None:
    """Print everything that the report says."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=max(_MIN_WIDTH, console.width))
    parts: list[RenderableType] = []
    for world in report.worlds:
        parts += [_heading(f"{world} ranks, float32, µs"), _cells_table(report, world)]
    for side in report.tables:
        parts += [_heading(f"{side.title} ({side.unit})"), _side_table(side)]
    parts += [Text(line) for line in summary_lines(report)]
    parts += [Text(f"left out: {note}", style="yellow") for note in report.notes]
    console.print(Group(*parts))


def to_markdown(report: BenchReport) -> str:
    """Return the tables for a README; the fastest of each row is bold."""
    blocks = []
    for world in report.worlds:
        header, *rows = _rows(report, world, _fastest_style)
        blocks.append(f"## {world} ranks, float32, µs\n\n" + _markdown_table([c.plain for c in header], rows))
    for table in report.tables:
        titles = ["", *(title for _, title in table.columns), *_side_ratio_titles(table)]
        blocks.append(
            f"## {table.title} ({table.unit})\n\n"
            + _markdown_table(titles, [[Text(cell) for cell in row] for row in _side_rows(table)])
        )
    lines = summary_lines(report) + [f"Left out: {note}" for note in report.notes]
    blocks.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(blocks) + "\n"


def summary_lines(report: BenchReport) -> list[str]:
    """Return the means, the lost cells, the memory's bandwidth, and what it ran on, one line each."""
    lines = [
        f"{standing.title}: ahead of the best of Gloo and the MPIs in {standing.ahead} of"
        f" {standing.cells} cells, geometric mean {format_ratio(standing.mpi_mean)} of the best MPI"
        for standing in report.standings()
    ]
    for name, ratio in (("Gloo", report.gloo_ratio), ("best MPI", report.mpi_ratio)):
        mean = report.mean(ratio)
        if mean is not None:
            parts = ", ".join(
                f"{world} ranks {format_ratio(report.mean(ratio, world))}" for world in report.worlds
            )
            lines.append(
                f"{name} / torchestra, geometric mean over all cells: {format_ratio(mean)} ({parts})"
            )
    compared = [cell for cell in report.cells if report.mpi_ratio(cell) is not None]
    if compared:
        lost = report.lost()
        names = ", ".join(f"{_label(cell)} on {cell.world}" for cell in lost)
        # A longer list helps nobody; the table shows them.
        text = f": {names}" if 0 < len(lost) <= _LISTED_CELLS else ""
        lines.append(f"cells lost to the best MPI: {len(lost)} of {len(compared)}{text}")
    for world, rates in report.bandwidth.items():
        text = ", ".join(f"{stream} {rate / 1e9:.1f}" for stream, rate in rates.items())
        lines.append(f"memory bandwidth, {world} processes at once, GB/s read + written: {text}")
    wrong = [
        f"{_label(cell)} on {cell.world} by {peer}"
        for cell in report.cells
        for peer, timing in cell.timings.items()
        if not timing.right
    ]
    if wrong:
        lines.append(f"WRONG RESULTS in {', '.join(wrong)}")
    machine = report.machine
    if machine:
        caches = ", ".join(f"{level} {size}" for level, size in machine["caches"].items())
        lines.append(
            f"{machine['processor']}, {machine['usable_cores']} cores ({caches}), {machine['memory_gb']} GB, "
            f"{machine['system']}, Python {machine['python']}"
        )
    lines += [
        f"{column.title}: {column.description}"
        for column in report.columns
        if column.shown and column.description
    ]
    if report.disturbance:
        worst = max(report.disturbance)
        usual = sorted(report.disturbance)[len(report.disturbance) // 2]
        warning = "; other programs were running, take the numbers with care" if worst > 0.05 else ""
        lines.append(f"disturbance: the machine was {usual:.0%} busy (at worst {worst:.0%}) at rest{warning}")
    if report.options.get("dirtied"):
        lines.append("what a rank puts in was written anew before every call")
    lines.append(
        f"median of the slowest rank (send + recv: half of there and back); took {report.seconds:.0f} s"
    )
    return lines


def _heading(text: str) -> Text:
    """Return a title of its own: that of a table would be broken to the table's width."""
    return Text("\n" + text, style="bold")


def _label(cell: Cell) -> str:
    return cell.operation if cell.operation == "barrier" else f"{cell.operation} {size_label(cell.size)}"


def _cells_table(report: BenchReport, world: int) -> Table:
    header, *rows = _rows(report, world, _colour_style)
    table = Table(header_style="bold", box=SIMPLE_HEAD)
    for position, title in enumerate(header):
        # Two lines keep the ratios' columns narrow; folding shows all digits where the terminal is too small.
        header_text = Text(title.plain.replace(" / ", "\n/ "))
        table.add_column(header_text, justify="left" if position == 0 else "right", overflow="fold")
    previous = ""
    for row in rows:
        if previous and row[0].plain != previous:
            table.add_section()
        previous = row[0].plain
        table.add_row(*row)
    return table


def _rows(report: BenchReport, world: int, style: Styler) -> list[list[Text]]:
    """Return the header and the rows of one world size; ``style`` says how a peer's time is shown."""
    columns = [c for c in report.columns if c.shown and any(c.key in cell.timings for cell in report.cells)]
    keys = {column.key for column in columns}
    mpi, gloo = bool(report.mpi_keys), {"gloo", "torchestra"} <= keys
    against_mpi = mpi and "torchestra" in keys
    floors = any(cell.floor_us is not None for cell in report.cells)
    titles = ["op", "size", *(column.title for column in columns)]
    titles += (
        ["best MPI"] * mpi + ["Gloo / ours"] * gloo + ["best MPI / ours"] * against_mpi + ["floor"] * floors
    )
    rows = [[Text(title) for title in titles]]
    for cell in report.cells:
        if cell.world != world:
            continue
        row = [Text(OPERATION_TITLES.get(cell.operation, cell.operation))]
        row.append(Text(size_label(cell.size) if cell.size else "-"))
        row += [_time_text(report, cell, column, style) for column in columns]
        best = report.best_mpi(cell)
        if mpi:
            row.append(Text(format_time(cell.timings[best].median_us) if best else _MISSING))
        if gloo:
            row.append(_ratio_text(report.gloo_ratio(cell)))
        if against_mpi:
            row.append(_ratio_text(report.mpi_ratio(cell)))
        if floors:
            row.append(Text("" if cell.floor_us is None else format_time(cell.floor_us)))
        rows.append(row)
    return rows


def _time_text(report: BenchReport, cell: Cell, column: ColumnInfo, style: Styler) -> Text:
    timing = cell.timings.get(column.key)
    if timing is None:
        return Text(_MISSING)
    if not timing.right:
        return Text("WRONG", style=_LOST)
    return Text(format_time(timing.median_us), style=style(report, cell, column))


def _colour_style(report: BenchReport, cell: Cell, column: ColumnInfo) -> str:
    """Style our columns by whether the best MPI was faster, and highlight the best MPI."""
    if column.kind == "torchestra":
        ratio = report.mpi_ratio(cell, column.key)
        return "bold" if ratio is None else _LOST if ratio < 1 else _WON
    return "bold" if column.key == report.best_mpi(cell) else ""


def _fastest_style(report: BenchReport, cell: Cell, column: ColumnInfo) -> str:
    shown = {column.key for column in report.columns if column.shown}
    right = {key: timing.median_us for key, timing in cell.timings.items() if timing.right and key in shown}
    return "bold" if column.key == min(right, key=lambda key: right[key]) else ""


def _ratio_text(ratio: float | None) -> Text:
    return Text(format_ratio(ratio), style=_LOST if ratio is not None and ratio < 1 else "")


def _side_rows(table: SideTable) -> list[list[str]]:
    rows = []
    ours = table.columns[0][0] if table.columns else ""
    for row in table.rows:
        mine, own = row.values.get(ours), row.intervals.get(ours)
        values, ratios = [], []
        for key, _ in table.columns:
            value, interval = row.values.get(key), row.intervals.get(key)
            values.append(_with_interval(format_seconds, value, interval))
            if key != ours:
                ratio = value / mine if value is not None and mine else None
                between = (interval[0] / own[1], interval[1] / own[0]) if interval and own else None
                ratios.append(_with_interval(format_ratio, ratio, between))
        rows.append([row.label, *values, *ratios])
    return rows


def _with_interval(
    shown: Callable[[float | None], str], value: float | None, interval: tuple[float, float] | None
) -> str:
    """Return a value, and its interval in brackets."""
    if value is None or interval is None:
        return shown(value)
    return f"{shown(value)} ({shown(interval[0])} to {shown(interval[1])})"


def _side_ratio_titles(table: SideTable) -> list[str]:
    return [f"{title} / ours" for _, title in table.columns[1:]]


def _side_table(table: SideTable) -> Table:
    shown = Table(header_style="bold", box=SIMPLE_HEAD)
    shown.add_column("")
    for title in [*(title for _, title in table.columns), *_side_ratio_titles(table)]:
        shown.add_column(title, justify="right")
    for row in _side_rows(table):
        shown.add_row(*row)
    return shown


def _markdown_table(titles: list[str], rows: list[list[Text]]) -> str:
    lines = ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    lines += ["| " + " | ".join(_markdown_text(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _markdown_text(cell: Text) -> str:
    return f"**{cell.plain}**" if cell.style == "bold" else cell.plain
