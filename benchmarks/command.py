"""``python -m benchmarks``: its arguments, what it prints, and what it writes."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.options import (
    DEFAULT_SIZES,
    QUICK_SIZES,
    SECTIONS,
    BenchOptions,
    MpiEnvironment,
)
from benchmarks.pieces import merged, read_report
from benchmarks.ranks.shapes import OPERATIONS
from benchmarks.report import BenchReport
from benchmarks.run import run_benchmark
from benchmarks.table import render, to_markdown
from torchestra.engine.recorder.trace import replacing
from torchestra.errors import InvalidArgumentError
from torchestra.monitor.bench import parse_size, size_label

__all__ = ["add_arguments", "main", "options_from", "write_report"]

_MISUSE = 2
_QUICK_SECONDS = 0.03
_LOADED_HELP = (
    "train while others spin on each core, with so many turns as 34 s of each model and world size have: with"
    " --sections training less than 4 minutes, on a machine that does nothing else"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    defaults = BenchOptions()
    parser.add_argument(
        "-n",
        "--nproc",
        default=",".join(map(str, defaults.nproc)),
        metavar="N,…",
        help="world sizes (%(default)s)",
    )
    parser.add_argument(
        "--ops", default=",".join(OPERATIONS), metavar="OP,…", help="operations (%(default)s)"
    )
    parser.add_argument(
        "--sizes",
        metavar="SIZE,…",
        help=f"bytes per rank ({','.join(size_label(size).replace(' ', '') for size in DEFAULT_SIZES)})",
    )
    parser.add_argument(
        "--peers",
        metavar="KEY,…",
        help="only these: torchestra, symmetric, persistent, gloo, mpich, openmpi, intelmpi, …",
    )
    parser.add_argument(
        "--mpi",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="an MPI to measure: its name, and an interpreter that has mpi4py (may be given several times)",
    )
    parser.add_argument(
        "--sections", default=",".join(SECTIONS), metavar="NAME,…", help="parts (%(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help=f"turns of each peer in a cell ({defaults.rounds})"
    )
    parser.add_argument("--seconds", type=float, metavar="S", help=f"length of a turn ({defaults.seconds})")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="short turns, one round, three sizes, collectives only: a look, not a measurement",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=defaults.output,
        metavar="DIR",
        help="where to write (%(default)s)",
    )
    parser.add_argument(
        "--unaltered", action="store_true", help="do not write anew, before calls, what a rank puts in"
    )
    parser.add_argument("--loaded", action="store_true", help=_LOADED_HELP)
    parser.add_argument(
        "--add",
        action="store_true",
        help="a piece: add what is measured to the bench.json in DIR, if there is one",
    )
    parser.add_argument("--markdown", action="store_true", help="write the tables as Markdown too")


def options_from(given: argparse.Namespace) -> BenchOptions:
    """Return the options for the arguments.

    Raises:
        InvalidArgumentError: a number, size or name makes no sense.
    """
    defaults = BenchOptions()
    sections = _names(given.sections)
    rounds, seconds, sizes = defaults.rounds, defaults.seconds, defaults.sizes
    if given.quick:
        rounds, seconds, sizes = 1, _QUICK_SECONDS, QUICK_SIZES
        sections = ("collectives",)
    return BenchOptions(
        operations=_names(given.ops),
        sizes=tuple(map(parse_size, _names(given.sizes))) if given.sizes else sizes,
        nproc=tuple(sorted({_number(text) for text in _names(given.nproc)})),
        peers=_names(given.peers) if given.peers else None,
        mpi=tuple(map(_mpi_environment, given.mpi)),
        rounds=rounds if given.rounds is None else given.rounds,
        seconds=seconds if given.seconds is None else given.seconds,
        sections=sections,
        output=given.output,
        markdown=given.markdown,
        dirtied=not given.unaltered,
        loaded=given.loaded,
    )


def main(given: argparse.Namespace) -> int:
    """Run the benchmark; return the exit code: 1 for a wrong result, 2 for wrong arguments."""
    try:
        options = options_from(given)
        data = options.output / "bench.json"
        earlier = read_report(data) if given.add and data.exists() else None
    except InvalidArgumentError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return _MISUSE
    # Like Ctrl-C: started processes are ended on the way out.
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        report = _watched(options)
        report = report if earlier is None else merged(earlier, report)
    except InvalidArgumentError as error:  # of another machine
        print(f"benchmarks: {error}", file=sys.stderr)
        return _MISUSE
    except KeyboardInterrupt:
        print("benchmarks: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    render(report)
    for path in write_report(report, options):
        print(f"wrote {path}")
    return 0 if report.right else 1


def write_report(report: BenchReport, options: BenchOptions) -> list[Path]:
    """Write JSON, the picture if matplotlib is installed, and Markdown if wanted; return the files."""
    options.output.mkdir(parents=True, exist_ok=True)
    data = options.output / "bench.json"
    with replacing(data) as file:
        file.write(json.dumps(report.to_json(), indent=1) + "\n")
    written = [data]
    if report.cells:
        try:
            from benchmarks.picture import draw

            draw(report, options.output / "bench.png")
            written.append(options.output / "bench.png")
        except ImportError:
            print("no picture: matplotlib is not installed", file=sys.stderr)
    if options.markdown:
        markdown = options.output / "bench.md"
        with replacing(markdown) as file:
            file.write(to_markdown(report))
        written.append(markdown)
    return written


def _watched(options: BenchOptions) -> BenchReport:
    """Run with a progress line on the terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Once a second, by the benchmark itself: a thread that redraws would take a core from who is measured.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("starting", total=None)

        def watch(text: str, done: int, total: int) -> None:
            progress.update(task, description=text, completed=done, total=total or None, refresh=True)

        return run_benchmark(options, watch)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _number(text: str) -> int:
    if not text.isdecimal():
        raise InvalidArgumentError(f"nproc must be numbers, got {text!r}")
    return int(text)


def _mpi_environment(text: str) -> MpiEnvironment:
    name, equals, python = text.partition("=")
    if not (name and equals and python):
        raise InvalidArgumentError(f"--mpi must be NAME=PYTHON, got {text!r}")
    return MpiEnvironment(name, Path(python))
