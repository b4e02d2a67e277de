"""Measure what the flight recorder, and its tallies for metrics, cost an operation.

    python -m benchmarks.recorder_costs [turns]     (default: 400)

Compiled loops record collectives of one rank as its operations do: with tallies, and without them. They are
measured by turns, so that a noisy machine is noisy for both. Printed are the least ns of each, the median of
what tallies take more in the same turn, and for comparison a whole all_reduce of 4 bytes on one rank.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.engine.native.atomics import kernel, load, store, store_release
from torchestra.engine.recorder.clock import now
from torchestra.engine.recorder.recorder import close_entry, open_entry
from torchestra.world.init import default_group

RECORD, OPERATIONS_AT, ENTRIES, ENTRY_BYTES = at.RECORD, at.OPERATIONS_AT, at.ENTRIES, at.ENTRY_BYTES
TOTAL_BYTES, MOVED_BYTES, ENDED = at.TOTAL_BYTES, at.MOVED_BYTES, at.ENDED
NUMBER = 10_000


@kernel
def record_with_tallies(context, first, number):
    """Record ``number`` operations of 4 bytes, the first of which has the number ``first``."""
    for sequence in range(first, first + number):
        open_entry(context, sequence, 1, 1, 4)
        close_entry(context, sequence)
    return 0


@kernel
def close_without_tally(context, sequence):
    """Do what close_entry() does, but for the tally."""
    record = load(context + RECORD)
    entry = record + OPERATIONS_AT + (sequence & (ENTRIES - 1)) * ENTRY_BYTES
    store(record + TOTAL_BYTES, load(record + TOTAL_BYTES) + load(entry + MOVED_BYTES))
    store_release(entry + ENDED, now(context))


@kernel
def record_without_tallies(context, first, number):
    """Record operations without tallies."""
    for sequence in range(first, first + number):
        open_entry(context, sequence, 1, 1, 4)
        close_without_tally(context, sequence)
    return 0


def measure(turns: int) -> dict[str, list[float]]:
    """Return by way the ns of an operation in each turn."""
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore())
    engine: Any = default_group().communicator.engine
    context, tensor = engine.context.address, torch.ones(1)

    def calls() -> None:
        for _ in range(NUMBER):
            dist.all_reduce(tensor)

    ways: dict[str, Callable[[], object]] = {
        "with tallies": lambda: record_with_tallies(context, 1, NUMBER),
        "without tallies": lambda: record_without_tallies(context, 1, NUMBER),
        "all_reduce of 4 B": calls,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for turn in range(turns):
        for name, way in list(ways.items())[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            way()
            found[name].append((time.perf_counter() - began) / NUMBER * 1e9)
    dist.destroy_process_group()
    return found


def main(arguments: list[str]) -> None:
    """Measure and print."""
    found = measure(int(arguments[0]) if arguments else 400)
    for name, times in found.items():
        print(f"{name:18}{min(times):8.1f} ns at least, {statistics.median(times):8.1f} ns in the median")
    more = [a - b for a, b in zip(found["with tallies"], found["without tallies"], strict=True)]
    print(f"tallies, by pairs {statistics.median(more):8.1f} ns in the median")


if __name__ == "__main__":
    main(sys.argv[1:])
