"""``torchestra report``: the flight record of a job as a trace file, or as a page that shows it.

The record comes from a running (or hung) job of this host, or from files that a job left: see
TORCHESTRA_RECORD and ``torchestra run --record``.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from torchestra.engine.recorder.flight_record import read_flight_record
from torchestra.engine.recorder.trace import merged, replacing, trace_of, write_trace
from torchestra.errors import InvalidArgumentError
from torchestra.monitor.jobs import choose_job

_PLACEHOLDER = "/*TRACE*/null"
_EPILOG = """\
FILE.json is in Chrome's trace event format, for https://ui.perfetto.dev and chrome://tracing; FILE.html is a
page that shows the same by itself. Both hold the last 256 collectives and 256 messages of every rank.

A running job is found by itself. What a job left when it failed or ended lies in the directory that was named
to it by the variable TORCHESTRA_RECORD: give that directory, or files of it, with --from.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "--out", required=True, metavar="FILE", type=_out, help="what to write: FILE.json or FILE.html"
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
    """Write the file; return 1 if there is nothing to write or it cannot be written."""
    try:
        trace = _live(options.job) if options.kept is None else merged(_kept(options.kept))
        write = write_page if options.out.suffix == ".html" else write_trace
        write(options.out, trace)
    except (InvalidArgumentError, OSError) as error:
        print(f"torchestra report: {error}", file=sys.stderr)
        return 1
    tracks = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["ph"] == "X"}
    groups = {pid for pid, _ in tracks}
    slices = sum(event["ph"] in "Xb" for event in trace["traceEvents"])
    print(f"{options.out}: {slices} operations of {len(tracks)} ranks in {len(groups)} groups")
    return 0


def write_page(path: str | Path, trace: dict[str, Any]) -> None:
    """Write a self-contained page that shows a trace: one file, which loads nothing else."""
    template = resources.files("torchestra.monitor").joinpath("viewer.html").read_text(encoding="utf-8")
    # No text in a script element may end the element.
    data = json.dumps(trace, separators=(",", ":")).replace("<", "\\u003c")
    with replacing(path) as file:
        file.write(template.replace(_PLACEHOLDER, data))


def _out(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".json", ".html"):
        raise argparse.ArgumentTypeError(f"must end in .json or .html, got {text!r}")
    return path


def _live(pid: int | None) -> dict[str, Any]:
    return trace_of([read_flight_record(group.arena) for group in choose_job(pid).groups])


def _kept(paths: list[str]) -> list[dict[str, Any]]:
    """Return the traces in files and directories."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise InvalidArgumentError(f"there are no traces (*.json) in {', '.join(paths)}")
    return [_loaded(file) for file in files]


def _loaded(path: Path) -> dict[str, Any]:
    """Return a trace that this package has written (others have events of many more kinds)."""
    try:
        trace: dict[str, Any] = json.loads(path.read_bytes())
        events = trace["traceEvents"]
        if isinstance(events, list) and all({"ph", "pid", "tid", "name"} <= event.keys() for event in events):
            return trace
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise InvalidArgumentError(f"{path} is not a trace that torchestra has written")
