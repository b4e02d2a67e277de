"""Measure what data parallel training adds to a step of a model: torchestra's, and torch's on Gloo."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.options import BenchOptions
from benchmarks.report import SideRow, SideTable
from benchmarks.scripts import run_script
from benchmarks.summary import median_interval

__all__ = ["measure_training", "spinning_processes", "training_steps"]

# A process ends by itself when the benchmark was killed.
_SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""

_COLUMNS = (("torchestra", "torchestra DDP adds"), ("gloo", "torch's DDP on Gloo adds"))
# Where a model's own steps vary more than DDP adds, the difference may not be positive.
_MIN_US = 0.1
# What is looked for is a small difference of large times: many short turns tell more than few long ones.
_TURNS_PER_ROUND = 8
_SHARE_OF_A_TURN = 0.6
_WARM_UP_STEPS = 11  # both libraries make their buckets anew after the first step, and take notes in ten
_LEAST_STEPS = 3  # of a turn
# Beside others a step now and then waits for their time slices, so more turns are needed: as many as 3 models
# and 2 worlds can have in less than four minutes.
_LOADED_TURNS_PER_ROUND = 4
_LOADED_SECONDS_OF_A_MODEL = 34.0


def measure_training(options: BenchOptions) -> tuple[SideTable, list[str]]:
    """Return the microseconds that are added to a step of each model in each world, and what failed.

    They are the median of the differences between turns that came next to each other, with the interval in
    which the true median lies with 95 % probability.
    """
    notes: list[str] = []
    rows = []
    for world in options.nproc:
        try:
            with spinning_processes() if options.loaded else contextlib.nullcontext():
                results = training_steps(
                    world,
                    options.seconds * _SHARE_OF_A_TURN,
                    options.rounds * (_LOADED_TURNS_PER_ROUND if options.loaded else _TURNS_PER_ROUND),
                    _LOADED_SECONDS_OF_A_MODEL if options.loaded else 0.0,
                )
        except (OSError, RuntimeError) as error:
            notes.append(f"training with {world} ranks: {error}")
            continue
        for model, times in results.items():
            alone = times["alone"]
            added, intervals = {}, {}
            for way, _ in _COLUMNS:
                differences = [own - bare for own, bare in zip(times[way], alone, strict=True)]
                added[way] = max(_MIN_US, statistics.median(differences))
                low, high = median_interval(differences)
                intervals[way] = max(_MIN_US, low), max(_MIN_US, high)
            label = f"{world} ranks, {model}: alone {statistics.median(alone) / 1000:.2f} ms"
            rows.append(SideRow(label, added, intervals))
    title = "Training: what data parallelism adds to a forward and a backward"
    name = "training"
    if options.loaded:
        name, title = "training_loaded", f"{title} while another process spins on each core"
    return SideTable(name, title, "µs", _COLUMNS, tuple(rows)), notes


@contextlib.contextmanager
def spinning_processes() -> Iterator[list[int]]:
    """Have a process spin on each core of this one during the block, which gets their ids."""
    spinning: list[subprocess.Popen[bytes]] = []
    try:
        for core in sorted(os.sched_getaffinity(0)):
            spinning.append(subprocess.Popen([sys.executable, "-c", _SPIN, str(core)]))
        yield [process.pid for process in spinning]
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def training_steps(
    world: int, seconds: float, turns: int, model_seconds: float = 0.0
) -> dict[str, dict[str, list[float]]]:
    """Return the microseconds of a step in each turn, by model and way (``alone``, ``torchestra``, ``gloo``).

    Args:
        world: how many ranks.
        seconds: how long one turn of a way lasts, roughly.
        turns: how often the ways take turns, at least.
        model_seconds: how long they do for each model, at least.

    Raises:
        RuntimeError: a rank failed, or they took more than five minutes.
    """
    results: dict[str, dict[str, list[float]]] = run_script(
        "training_step.py", world, seconds, turns, model_seconds, _WARM_UP_STEPS, _LEAST_STEPS
    )
    return results
