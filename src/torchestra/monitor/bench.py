"""``torchestra bench``: time torchestra's operations on this machine.

The comparison with Gloo, MPI and TensorPipe is not part of the package: it is in the ``benchmarks`` folder of
the source repository, and ``make bench`` runs it there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torchestra.errors import DistError, InvalidArgumentError

if TYPE_CHECKING:
    from torchestra.monitor.operation_timing import Cell, Timing

_POWERS = {"": 0, "B": 0, "K": 10, "KB": 10, "M": 20, "MB": 20, "G": 30, "GB": 30}

_EPILOG = """\
A time is that of the slowest rank, the median over batches of calls that follow each other without a barrier.
A size is the bytes that each rank puts in. GB/s are those bytes by the time.

Gloo, MPI, TensorPipe and torch's DistributedDataParallel are compared by the benchmark in the source
repository: `make bench`.
"""
_SIZES = "4B,4KB,64KB,1MB,16MB"
_DTYPES = "float32"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.epilog = _EPILOG
    parser.add_argument("-n", "--nproc", type=int, default=2, metavar="N", help="ranks (%(default)s)")
    parser.add_argument("--threads", action="store_true", help="ranks are threads of one process")
    parser.add_argument("--ops", metavar="OP,…", help="operations (default: all)")
    parser.add_argument(
        "--sizes", default=_SIZES, metavar="SIZE,…", help="bytes that each rank puts in (%(default)s)"
    )
    parser.add_argument("--dtypes", default=_DTYPES, metavar="DTYPE,…", help="data types (%(default)s)")
    parser.add_argument(
        "--symmetric", action="store_true", help="tensors live in the group's memory (torchestra.empty)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.1, metavar="S", help="time for each line (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def main(options: argparse.Namespace) -> int:
    """Time the operations and print a table; return 1 if a rank failed, 2 if an argument is wrong."""
    from torchestra.launcher.api import launch
    from torchestra.monitor.operation_timing import time_operations

    try:
        cells = _cells(options)
        timings = launch(
            time_operations,
            options.nproc,
            cells,
            options.seconds,
            options.symmetric,
            kind="threads" if options.threads else "processes",
        )
    except InvalidArgumentError as error:
        print(f"torchestra bench: {error}", file=sys.stderr)
        return 2
    except DistError as error:
        print(f"torchestra bench: {error}", file=sys.stderr)
        return 1
    rows = list(zip(cells, timings[0], strict=True))
    if options.json:
        print(json.dumps(_as_json(options, rows)))
    else:
        _print_table(options, rows)
    return 0


def _cells(options: argparse.Namespace) -> list[Cell]:
    """Return the lines of the table that the arguments ask for; a barrier has one line, of 0 bytes."""
    from torchestra.engine.operations import DTYPE_NAMES
    from torchestra.monitor.operation_timing import Cell, operations

    names = _names(options.ops) if options.ops else operations()
    dtypes, sizes = _names(options.dtypes), [parse_size(text) for text in _names(options.sizes)]
    _check("operation", names, operations())
    _check("dtype", dtypes, DTYPE_NAMES)
    if not 0 < options.seconds <= 3600:
        raise InvalidArgumentError(f"--seconds must be more than 0 and at most 3600, got {options.seconds}")
    cells = []
    for operation in names:
        if operation == "barrier":
            cells.append(Cell("barrier", "", 0))
            continue
        cells += [Cell(operation, dtype, size) for dtype in dtypes for size in sizes]
    return cells


def parse_size(text: str) -> int:
    """Return a number of bytes: ``4``, ``4B``, ``64KB``, ``1 MB``.

    Raises:
        InvalidArgumentError: the text is not a size, or the size is 0.
    """
    cleaned = text.strip().upper()
    digits = cleaned.rstrip("BKMG ")
    unit = cleaned[len(digits) :].strip()
    if not digits.isdecimal() or unit not in _POWERS or int(digits) == 0:
        raise InvalidArgumentError(f"a size must be like 4, 4B, 64KB or 1MB, got {text!r}")
    return int(digits) << _POWERS[unit]


def size_label(size: int) -> str:
    """Return a size as people write it: ``64 KB``."""
    for unit in ("GB", "MB", "KB"):
        if size >> _POWERS[unit] and size % (1 << _POWERS[unit]) == 0:
            return f"{size >> _POWERS[unit]} {unit}"
    return f"{size} B"


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _check(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise InvalidArgumentError(
            f"unknown {what} {', '.join(unknown) or '(none given)'}; there are {', '.join(sorted(known))}"
        )


def _bandwidth(cell: Cell, timing: Timing) -> float:
    return cell.nbytes / timing.median_us / 1e3


def _as_json(options: argparse.Namespace, rows: list[tuple[Cell, Timing]]) -> dict[str, Any]:
    return {
        "nproc": options.nproc,
        "kind": "threads" if options.threads else "processes",
        "symmetric": options.symmetric,
        "cells": [
            {**asdict(cell), **asdict(timing), "gb_per_s": _bandwidth(cell, timing)} for cell, timing in rows
        ],
    }


def _print_table(options: argparse.Namespace, rows: list[tuple[Cell, Timing]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(header_style="bold", box=None, pad_edge=False)
    for title in ("operation", "dtype", "size", "median µs", "p99 µs", "best µs", "GB/s"):
        table.add_column(title, justify="left" if title in ("operation", "dtype") else "right", no_wrap=True)
    before = None
    for cell, timing in rows:
        if before not in (None, cell.operation):
            table.add_section()
        before = cell.operation
        times = (f"{value:,.2f}" for value in (timing.median_us, timing.p99_us, timing.best_us))
        size, rate = (size_label(cell.nbytes), f"{_bandwidth(cell, timing):.3g}") if cell.nbytes else ("", "")
        table.add_row(cell.operation, cell.dtype, size, *times, rate)
    kind = "threads of one process" if options.threads else "processes"
    console = Console()
    console.print(f"{options.nproc} ranks, {kind}", style="bold", highlight=False)
    console.print(table)
    console.print("the comparison with Gloo and MPI: `make bench` in the source repository", highlight=False)
