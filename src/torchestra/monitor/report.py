"""``torchestra report``: what the flight record of a job tells, in sentences, as a page, or for other tools.

The record comes from a running (or hung) job of this host, or from files that a job left: see
TORCHESTRA_RECORD and ``torchestra run --record``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchestra.engine.recorder.flight_record import read_flight_record
from torchestra.engine.recorder.formats.reading import read_traces
from torchestra.engine.recorder.formats.rows import Table, table_of
from torchestra.engine.recorder.formats.writing import FORMATS, write
from torchestra.engine.recorder.trace import host_clock, trace_of
from torchestra.errors import DistError, InvalidArgumentError
from torchestra.monitor.analysis.bandwidth import measure_copies
from torchestra.monitor.analysis.summary import GroupAnalysis, analyse, counted, nothing_to_tell, sentences
from torchestra.monitor.diagnosis import diagnose_groups, diagnoses_in, diagnosis_sentences
from torchestra.monitor.jobs import choose_job
from torchestra.monitor.live.units import printable
from torchestra.monitor.numbers_between import seconds_between
from torchestra.monitor.process_samples import sample
from torchestra.monitor.report_page import write_page

_IN_DIRECTORIES = [name for name, form in FORMATS.items() if not form.suffix]
_SUFFIXES = (".json", *(form.suffix for form in FORMATS.values() if form.suffix))
_PAGE = Path("report.html")
_MAX_COPIES = 8
_COPIES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
_LARGEST_COPY = 1 << 28  # larger ones are as fast, and take memory
_EPILOG = """\
Prints which rank the others wait for, and why, as far as can be seen. --html writes a page that shows it, for
any browser. --out writes what other tools read: FILE.json is in Chrome's trace event format, for
https://ui.perfetto.dev and chrome://tracing; FILE.csv and FILE.parquet are tables with a row for each
operation. With --format the rest is written into a directory, a file for each rank:

{formats}

All hold the last 256 collectives and 256 messages of every rank.

A running job is found by itself, and its processes are looked at for some seconds. What a job left when it
failed or ended lies in the directory that was named to it by the variable TORCHESTRA_RECORD: give that
directory, or files of it, with --from.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.epilog = _EPILOG.format(
        formats="\n".join(f"  {name:13}{FORMATS[name].summary}" for name in _IN_DIRECTORIES)
    )
    parser.add_argument(
        "--html", nargs="?", const=_PAGE, type=Path, metavar="FILE", help=f"write a page (default: {_PAGE})"
    )
    parser.add_argument(
        "--out",
        metavar="PATH",
        type=Path,
        help=f"write a file that ends in {', '.join(_SUFFIXES)}, or a directory for --format",
    )
    parser.add_argument(
        "--format", choices=_IN_DIRECTORIES, help="write a file for each rank, for other tools"
    )
    parser.add_argument(
        "--seconds",
        type=seconds_between(0, 3600),
        default=2.0,
        metavar="S",
        help="how long to look at the processes of a running job (default: 2; 0: not at all)",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--job", type=int, metavar="PID", help="the job that this process is a rank of, or has started"
    )
    source.add_argument(
        "--from",
        dest="kept",
        nargs="+",
        metavar="PATH",
        help="traces, or directories of them, to put together",
    )


def main(options: argparse.Namespace) -> int:
    """Print the sentences and write the files; return 1 if there is no record or a file cannot be written."""
    try:
        _refuse_other_files(options.out, options.format)
        if options.kept is None:
            trace, diagnoses = _live(options.job, options.seconds)
        else:
            trace = read_traces(list(map(Path, options.kept)))
            diagnoses = diagnoses_in(trace)
        for sentence in diagnosis_sentences(diagnoses):
            print(printable(sentence))
        table = table_of(trace)
        analyses = analyse(table)
        copies = _copies(table, analyses)
        for analysis in analyses:
            print(f"group {analysis.group.name!r}, {analysis.group.size} ranks:")
            for sentence in sentences(analysis, copies):
                print(printable(f"  {sentence}"))
        nothing = [] if analyses else nothing_to_tell(table)
        for sentence in nothing:
            print(printable(sentence))
        groups = len({row.group for row in table.rows})
        amount = f"{counted(len(table.rows), 'operation')} in {counted(groups, 'group')}"
        if options.html is not None:
            write_page(options.html, analyses, copies, diagnoses, nothing)
            print(f"{options.html}: {amount}")
        if options.out is not None:
            write(options.out, trace, options.format)
            print(f"{options.out}: {amount}")
    except (DistError, OSError) as error:
        print(f"torchestra report: {error}", file=sys.stderr)
        return 1
    return 0


def _refuse_other_files(path: Path | None, chosen: str | None) -> None:
    if path is None:
        if chosen is not None:
            raise InvalidArgumentError(f"--format {chosen} needs a directory: --out DIRECTORY")
        return
    if chosen is None and path.suffix not in _SUFFIXES:
        raise InvalidArgumentError(
            f"--out must end in {', '.join(_SUFFIXES)}, or be a directory for --format, got {str(path)!r}"
        )
    if chosen is not None and path.suffix in _SUFFIXES:
        raise InvalidArgumentError(f"--format {chosen} writes into a directory, got --out {path}")


def _live(pid: int | None, seconds: float) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the trace of a running job, with readings of its ranks' processes, and its diagnoses."""
    groups = choose_job(pid).groups
    samples = sample(groups, seconds) if seconds > 0 else []
    trace = trace_of([read_flight_record(group.arena) for group in groups])
    trace["traceEvents"] += samples
    return trace, diagnose_groups(groups)


def _copies(table: Table, analyses: Sequence[GroupAnalysis]) -> dict[int, float] | None:
    """Return how fast this machine copies as many bytes as the operations move; None if it was another's."""
    moved = {each.nbytes for analysis in analyses for each in analysis.bandwidths}
    sizes = sorted(nbytes for nbytes in moved if nbytes <= _LARGEST_COPY)
    if not sizes or table.clock != host_clock():
        return None
    chosen = sizes[:: -(-len(sizes) // _MAX_COPIES)]
    return measure_copies(sorted({*chosen, sizes[-1], *_COPIES}))
