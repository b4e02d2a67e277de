"""Measure programs on torch.distributed, with torchestra as its backend and with Gloo, side by side."""

from __future__ import annotations

from benchmarks.options import BenchOptions
from benchmarks.report import SideRow, SideTable
from benchmarks.scripts import run_script

__all__ = ["measure_interop"]

_COLUMNS = (("torchestra", 'backend "torchestra"'), ("gloo", 'backend "gloo"'))


def measure_interop(options: BenchOptions) -> tuple[SideTable, list[str]]:
    """Return the microseconds of all_reduce and of training steps with both backends, and what failed.

    Where two backends do not train to the same losses, the step is told as failed.
    """
    notes: list[str] = []
    rows = []
    for world in options.nproc:
        try:
            results = run_script("interop_step.py", world, options.seconds, options.rounds)
        except (OSError, RuntimeError) as error:
            notes.append(f"interop with {world} ranks: {error}")
            continue
        notes += [f"interop with {world} ranks: {text}" for text in results["failures"]]
        rows += [SideRow(f"{world} ranks, {label}", values) for label, values in results["times"].items()]
    title = "Interop: torch.distributed on torchestra's engine, and on Gloo"
    return SideTable("interop", title, "µs", _COLUMNS, tuple(rows)), notes
