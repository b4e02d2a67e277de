"""The command line: the table of commands, and the function that runs one.

A command is a module with ``add_arguments(parser)`` and ``main(options) -> int``; it is imported only
when the user names it, so that ``torchestra --help`` and ``torchestra run`` do not pay for the others.
To add one, add a line to ``COMMANDS``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """The module that implements a command, and the command's line in the overview."""

    module: str
    summary: str


COMMANDS: dict[str, Command] = {
    "run": Command("torchestra.launcher.command", "start a script on several ranks of this host"),
    "bench": Command("torchestra.monitor.bench", "time torchestra's operations on this machine"),
    "tune": Command("torchestra.monitor.tune", "measure this machine once, so that operations suit it"),
    "calibrate": Command(
        "torchestra.performance.calibrate", "measure this machine, a link and a training step into a file"
    ),
    "simulate": Command("torchestra.performance.command", "predict how long a job takes on many hosts"),
    "top": Command("torchestra.monitor.top", "show what the ranks of a running job do"),
    "report": Command("torchestra.monitor.report", "write what the ranks of a job did last, as a trace"),
    "metrics": Command("torchestra.monitor.metrics", "serve what the jobs of this host do to Prometheus"),
    "doctor": Command("torchestra.monitor.doctor", "show what torchestra finds on this machine"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``torchestra``; return the exit code (2 if the arguments are wrong).

    Args:
        arguments: the arguments after the program's name; by default those of this process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in COMMANDS:
        return _overview(given)
    name, *rest = given
    command = importlib.import_module(COMMANDS[name].module)
    parser = argparse.ArgumentParser(
        f"torchestra {name}",
        description=COMMANDS[name].summary,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    code: int = command.main(parser.parse_args(rest))
    return code


def _overview(given: list[str]) -> int:
    """Print the help or the version, or refuse an unknown command."""
    parser = argparse.ArgumentParser(
        "torchestra",
        description="Distributed PyTorch in plain Python.",
        epilog="torchestra COMMAND --help tells more about a command.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary)
    options = parser.parse_args(given)
    if options.version:
        from importlib.metadata import version

        print(version("torchestra"))
        return 0
    parser.print_help(sys.stderr)
    return 2
