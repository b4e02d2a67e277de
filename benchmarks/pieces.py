"""A benchmark in pieces: what was measured before, and what has been added to it since."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import BenchReport, Cell, ColumnInfo, SideRow, SideTable
from benchmarks.summary import Timing
from torchestra.errors import InvalidArgumentError

__all__ = ["merged", "read_report"]

_ALIKE = ("processor", "usable_cores")


def read_report(path: Path) -> BenchReport:
    """Return the report whose JSON is in a file.

    Raises:
        InvalidArgumentError: there is no such file, or something else in it.
    """
    try:
        data = json.loads(path.read_text())
        return BenchReport(
            machine=data["machine"],
            options=data["options"],
            columns=tuple(ColumnInfo(**column) for column in data["columns"]),
            cells=tuple(map(_cell, data["cells"])),
            bandwidth={int(world): rates for world, rates in data["bandwidth_bytes_per_second"].items()},
            disturbance=tuple(data["disturbance"]),
            tables=tuple(map(_table, data["tables"])),
            notes=tuple(data["notes"]),
            seconds=data["seconds"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(f"{path} has no report of this benchmark: {error!r}") from error


def merged(before: BenchReport, added: BenchReport) -> BenchReport:
    """Return one report of two pieces; of a cell or table that both have, the later one counts.

    Raises:
        InvalidArgumentError: they are not of one machine, or not measured alike.
    """
    for what, one, other in (
        *((name, before.machine.get(name), added.machine.get(name)) for name in _ALIKE),
        ("dirtied", before.options.get("dirtied"), added.options.get("dirtied")),
    ):
        if one != other:
            raise InvalidArgumentError(f"pieces must be measured alike: {what} was {one!r}, is {other!r}")
    cells = {(cell.world, cell.operation, cell.size): cell for cell in (*before.cells, *added.cells)}
    columns = {column.key: column for column in (*before.columns, *added.columns)}
    tables = {table.name: table for table in (*before.tables, *added.tables)}
    return replace(
        added,
        columns=tuple(columns.values()),
        cells=tuple(sorted(cells.values(), key=lambda cell: cell.world)),
        bandwidth={
            world: _best(before.bandwidth.get(world, {}), added.bandwidth.get(world, {}))
            for world in sorted({*before.bandwidth, *added.bandwidth})
        },
        disturbance=before.disturbance + added.disturbance,
        tables=tuple(tables.values()),
        notes=tuple(dict.fromkeys((*before.notes, *added.notes))),
        seconds=before.seconds + added.seconds,
    )


def _best(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {stream: max(one.get(stream, 0.0), other.get(stream, 0.0)) for stream in {**one, **other}}


def _cell(data: Mapping[str, Any]) -> Cell:
    timings = {key: Timing(**timing) for key, timing in data["peers"].items()}
    return Cell(data["world"], data["operation"], data["size"], timings, data["floor_us"])


def _table(data: Mapping[str, Any]) -> SideTable:
    rows = tuple(
        SideRow(row["label"], row["values"], {key: tuple(ends) for key, ends in row["intervals"].items()})
        for row in data["rows"]
    )
    columns = tuple((key, title) for key, title in data["columns"])
    return SideTable(data["name"], data["title"], data["unit"], columns, rows)
