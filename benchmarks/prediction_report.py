"""Predicted beside measured, for benchmarks/prediction.py: the error of each time, and tables of them.

What `calibrate` has timed itself is told apart from what was held out: other sizes, other numbers of ranks or
hosts, and training steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.ranks.predicted import STEP, STEPS
from torchestra.monitor.bench import size_label
from torchestra.performance.calibration import Calibration, LinkCalibration

__all__ = ["Result", "kind_of", "print_results"]

_WORST, _WIDTH = 12, 110


@dataclass(frozen=True)
class Result:
    """One measured time and its prediction, in seconds.

    Attributes:
        hosts, ranks_per_host: of the group.
        mbit: the rate of the links; 0 on one host.
        operation: a collective, or ``"DDP step"``.
        nbytes: what each rank puts in; 0 for a barrier and a step.
        again_s: measured a second time, by other processes; 0 if it was not.
    """

    hosts: int
    ranks_per_host: int
    mbit: int
    operation: str
    nbytes: int
    measured_s: float
    predicted_s: float
    again_s: float = 0.0

    @property
    def noise(self) -> float:
        """Return the difference between the two measured times, by the first."""
        return self.again_s / self.measured_s - 1 if self.again_s else 0.0

    @property
    def error(self) -> float:
        """Return the difference by the measured time; negative if the prediction is too short."""
        return self.predicted_s / self.measured_s - 1

    @property
    def layout(self) -> str:
        """Return where it was, for people."""
        if self.hosts == 1:
            return f"1 host x {self.ranks_per_host}"
        return f"{self.hosts} hosts x {self.ranks_per_host}, {self.mbit} Mbit/s"


def kind_of(result: Result, calibration: Calibration, links: Mapping[int, LinkCalibration]) -> str:
    """Return what of a time was held out from the calibration."""
    if result.operation in STEPS:
        step = calibration.step
        ranks = {times.ranks for times in step.times} if step is not None else set()
        is_known = result.hosts == 1 and result.operation == STEP and result.ranks_per_host in ranks
        return "a training step: calibrated" if is_known else "a training step: held out"
    if result.hosts > 2:
        return "operations: other numbers of hosts"
    known = calibration.host.operations if result.hosts == 1 else links[result.mbit].operations
    of_name = [each for each in known if each.name == result.operation]
    of_ranks = any(each.ranks == result.ranks_per_host for each in of_name)
    of_size = any(each.operation_bytes == result.nbytes for each in of_name)
    if of_ranks and of_size:
        return "operations: calibrated"
    if of_ranks:
        return "operations: other sizes"
    return "operations: other numbers of ranks" + ("" if of_size else " and sizes")


def print_results(
    results: Sequence[Result], calibration: Calibration, links: Mapping[int, LinkCalibration]
) -> None:
    """Print the median errors, by layout, operation and what was held out, and the worst predictions."""
    console = Console(width=_WIDTH)
    busy = calibration.conditions.busy_share
    told = "unknown" if busy is None else f"{busy:.0%}"
    console.print(f"share of the cores that other programs used at the start: {told}", highlight=False)
    _print_errors(console, "where", results, [each.layout for each in results])
    _print_errors(console, "what", results, [kind_of(each, calibration, links) for each in results])
    _print_errors(console, "operation", results, [each.operation for each in results])
    worst = Table("where", "operation", "size", "measured µs", "predicted µs", "error", box=None)
    for each in sorted(results, key=lambda result: -abs(result.error))[:_WORST]:
        size = size_label(each.nbytes) if each.nbytes else ""
        times = (f"{seconds * 1e6:,.1f}" for seconds in (each.measured_s, each.predicted_s))
        worst.add_row(each.layout, each.operation, size, *times, f"{each.error:+.0%}")
    console.print("the worst:", worst)
    if results:
        median = statistics.median(abs(each.error) for each in results)
        noise = statistics.median(abs(each.noise) for each in results)
        told = f"median error of all {len(results)}: {median:.1%}; of measuring again: {noise:.1%}"
        console.print(told, style="bold", highlight=False)


def _print_errors(console: Console, title: str, results: Sequence[Result], keys: Sequence[str]) -> None:
    table = Table(
        title, "times", "median error", "within 10 %", "predicted / measured", "measured again", box=None
    )
    for key in dict.fromkeys(keys if title == "where" else sorted(keys)):
        chosen = [each for each, its in zip(results, keys, strict=True) if its == key]
        errors = [abs(each.error) for each in chosen]
        within = sum(error <= 0.1 for error in errors) / len(errors)
        ratio = statistics.median(each.error + 1 for each in chosen)
        table.add_row(
            key,
            str(len(chosen)),
            f"{statistics.median(errors):.1%}",
            f"{within:.0%}",
            f"{ratio:.2f}",
            f"{statistics.median(abs(each.noise) for each in chosen):.1%}",
        )
    console.print(table)
