"""``torchestra tune``: measure the best thresholds between algorithms on this machine, and save them."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from torchestra.errors import DistError, InvalidArgumentError

if TYPE_CHECKING:
    from torchestra.engine.kernels.selection import Choices

_MAX_RANKS = 64
_EPILOG = """\
Small tensors take another algorithm than large ones, and large ones go in chunks; from which size on, and how
large, depends on the caches and cores. What is measured here is kept beside the compiled kernels and used by
groups of as many ranks on a host that are made from then on; other groups use the usual thresholds. The
rank that makes a group decides for all of its ranks. Run it while nothing else runs.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "-n", "--nproc", metavar="N,…", help="numbers of ranks (default: 2, 4, … up to the cores)"
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, metavar="S", help="time for each of them (%(default)s)"
    )
    parser.add_argument("--forget", action="store_true", help="go back to the usual thresholds")


def main(options: argparse.Namespace) -> int:
    """Measure, save and print thresholds; return 1 if a rank failed, 2 if an argument is wrong."""
    from torchestra.engine import tuned_thresholds

    if options.forget:
        removed = tuned_thresholds.forget()
        print("\n".join(f"removed {path}" for path in removed) or "nothing was kept")
        return 0
    try:
        sizes = _sizes(options)
        measured = {}
        for size in sizes:
            measured[size] = _measured(size, options.seconds)
            print(f"{size} ranks: {measured[size]}", flush=True)
        print(f"kept in {tuned_thresholds.keep(measured)}")
    except InvalidArgumentError as error:
        print(f"torchestra tune: {error}", file=sys.stderr)
        return 2
    except DistError as error:
        print(f"torchestra tune: {error}", file=sys.stderr)
        return 1
    return 0


def _measured(size: int, seconds: float) -> Choices:
    from torchestra.launcher.api import launch
    from torchestra.monitor.threshold_timing import join_and_measure

    measured: Choices = launch(join_and_measure, size, seconds)[0]
    return measured


def _sizes(options: argparse.Namespace) -> list[int]:
    """Return the numbers of ranks to measure for."""
    if not 0 < options.seconds <= 600:
        raise InvalidArgumentError(f"--seconds must be more than 0 and at most 600, got {options.seconds}")
    if options.nproc is None:
        most = max(4, min(_MAX_RANKS, os.cpu_count() or 1))
        return [1 << power for power in range(1, most.bit_length())]
    texts = [text.strip() for text in options.nproc.split(",")]
    if not all(text.isdecimal() and 2 <= int(text) <= _MAX_RANKS for text in texts):
        raise InvalidArgumentError(f"--nproc must be numbers from 2 to {_MAX_RANKS}, got {options.nproc!r}")
    return sorted({int(text) for text in texts})
