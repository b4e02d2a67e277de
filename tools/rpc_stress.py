"""Call, nested and mutually, for a while, with everything mixed, and check that no call is lost.

    python tools/rpc_stress.py --minutes 10 [--seed N] [--workers 4] [--hosts 2] [--callers 3]

Every worker is a process and calls from several threads: numbers, tensors from nothing to 128 MB, chains of
calls over all workers that wait for each other or do not, hundreds in flight, references that are passed
around and dropped, errors. The workers are on --hosts pretended hosts by turns: the arena within, ZeroMQ
between; with --hosts 1 there is only the arena.

The exit code is 1 if a call was lost, answered wrongly or performed twice, or if a reference was left.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from rich.console import Console
from rich.table import Table
from rpc_stress_operations import stress

import torchestra as dist


def main() -> int:
    """Run the workers and add up what they tell; the exit code."""
    parser = argparse.ArgumentParser(description="Call for a while, and check that no call is lost.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=2, help="that the workers pretend to be on")
    parser.add_argument("--callers", type=int, default=3, help="threads of each worker that call")
    given = parser.parse_args()
    console = Console()
    console.print(
        f"seed {given.seed}: {given.workers} workers on {given.hosts} hosts, {given.minutes:g} minutes"
    )
    seconds = 60 * given.minutes
    told = dist.launch(
        stress,
        given.workers,
        str(given.seed),
        seconds,
        given.callers,
        given.hosts,
        timeout=seconds + 300,
    )
    made = sum((each["made"] for each in told), Counter[str]())
    performed = sum((each["performed"] for each in told), Counter[str]())
    answered = sum(each["answered"] for each in told)
    table = Table("function", "calls made", "performed")
    for name in sorted(made | performed):
        table.add_row(name, f"{made[name]:,}", f"{performed[name]:,}")
    table.add_row("all", f"{made.total():,}", f"{performed.total():,}")
    console.print(table)
    left = {rank: each["left"] for rank, each in enumerate(told) if each["left"]}
    console.print(
        f"answered {answered:,}, lost {made.total() - answered:,};"
        f" {sum(each['bytes'] for each in told) / 1e9:.1f} GB of tensors there and back;"
        f" references left: {left or 'none'}"
    )
    errors = [error for each in told for error in each["errors"]]
    for error in errors:
        console.print(error, style="red", markup=False)
    return 0 if made == performed and answered == made.total() and not (left or errors) else 1


if __name__ == "__main__":
    sys.exit(main())
