"""The collectives of one world size: cells, and within a cell the turns of the peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.options import BenchOptions
from benchmarks.peers import Column
from benchmarks.ranks.shapes import ITEM_BYTES, offered, shape
from benchmarks.summary import Timing, percentile, plan_batches, slowest, summarise
from benchmarks.worker_processes import PeerError, WorkerProcesses
from torchestra.monitor.bench import size_label

__all__ = ["STREAMS", "Watch", "cell_bytes", "cells_of", "measure_cell", "measure_streams"]

STREAMS = ("update", "read", "write", "copy")
"""How the memory is streamed through: in place (read and written), read, written, copied."""

Watch = Callable[[str, int, int], None]
"""Told what is being measured, how many cells are done, and how many there are."""

_ANSWER_SECONDS = 120.0
_SINGLES = 1_000
_STREAM_BYTES = 256 << 20
# Bytes moved per byte of buffer: a copy reads one half and writes the other.
_STREAM_MOVES = {"update": 2, "read": 1, "write": 1, "copy": 1}


def cells_of(options: BenchOptions) -> list[tuple[str, int]]:
    """Return the operations and sizes to measure at one world size; a barrier has size 0."""
    return [
        (operation, size)
        for operation in options.operations
        for size in ((0,) if operation == "barrier" else options.sizes)
    ]


def cell_bytes(operation: str, size: int, world: int) -> int:
    """Return the memory that the ranks of one peer need for a cell, all together."""
    buffers = shape(operation, size, world)
    return (buffers.given + buffers.received) * ITEM_BYTES * world


def measure_cell(
    turns: list[tuple[Column, WorkerProcesses]], operation: str, size: int, world: int, options: BenchOptions
) -> tuple[dict[str, Timing], list[PeerError]]:
    """Measure one cell on all peers, turn by turn; return the timings by column, and peers' errors.

    A peer that breaks down loses its columns in this cell; the others go on.
    """
    errors: list[PeerError] = []
    broken: set[WorkerProcesses] = set()
    cell_runs = [
        _CellRun(column, workers, f"{operation} {size_label(size)}".removesuffix(" 0 B"), options.dirtied)
        for column, workers in turns
        if offered(operation, column.memory)
    ]

    def in_turn(action: Callable[[_CellRun], None], first: int = 0) -> None:
        for cell_run in cell_runs[first:] + cell_runs[:first]:
            if cell_run.workers in broken:
                continue
            try:
                action(cell_run)
            except PeerError as error:
                broken.add(cell_run.workers)
                errors.append(error)

    in_turn(lambda cell_run: cell_run.prepare(operation, size, options.seconds))
    for number in range(options.rounds):
        in_turn(lambda cell_run: cell_run.time(), number % max(1, len(cell_runs)))
    in_turn(lambda cell_run: cell_run.check())
    timings = {c.column.key: c.timing() for c in cell_runs if c.workers not in broken}
    return timings, errors


class _CellRun:
    """One column in one cell: its plan and its samples so far, slowest rank, in nanoseconds."""

    def __init__(self, column: Column, workers: WorkerProcesses, label: str, dirtied: bool) -> None:
        self.column = column
        self.workers = workers
        self._label = label
        self._dirtied = dirtied
        self._batch = 1
        self._batches = 1
        self._means: list[float] = []
        self._singles: list[float] = []
        self._right = False

    def prepare(self, operation: str, size: int, seconds: float) -> None:
        """Make the buffers, warm up, and find out how many calls fill a turn."""
        self._ask("prepare", operation=operation, size=size, memory=self.column.memory)
        estimate = percentile(self._time(1, 2, warmup=1), 0.5)
        # The first calls of a short operation tell little: they are cold, and each reads the clock.
        while estimate * self._batch < 50_000:
            self._batch = max(self._batch * 4, min(self._batch * 64, int(100_000 / max(estimate, 1))))
            estimate = percentile(self._time(self._batch, 5, warmup=1), 0.5)
        self._batch, self._batches = plan_batches(estimate, seconds)

    def time(self) -> None:
        """Take one turn."""
        means = self._time(self._batch, self._batches, warmup=1)
        self._means += means
        if self._batch > 1:
            self._singles += self._time(1, min(_SINGLES, self._batch * self._batches), warmup=2)
        else:
            self._singles += means

    def check(self) -> None:
        """Let the ranks compare a result, and let go of the buffers."""
        self._right = all(answer["right"] for answer in self._ask("check"))
        self._ask("release")

    def timing(self) -> Timing:
        """Return the numbers of this cell."""
        return summarise(self._means, self._singles, self._batch, self._right)

    def _time(self, batch: int, batches: int, warmup: int) -> list[float]:
        answers = self._ask("time", batch=batch, batches=batches, warmup=warmup, dirty=self._dirtied)
        return slowest([answer["means"] for answer in answers])

    def _ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        command = {"do": do, "slot": self.column.key, "operation": self._label, **arguments}
        return self.workers.ask(command, _ANSWER_SECONDS)


def measure_streams(workers: WorkerProcesses, streams: tuple[str, ...], seconds: float) -> dict[str, float]:
    """Return what all processes stream at once through memory, per kind of stream, in bytes per second.

    The mean counts here, not the median: with more processes than cores each one waits part of the time.
    """
    rates = {}
    for stream in streams:
        command = {
            "do": "prepare",
            "slot": "",
            "operation": stream,
            "size": _STREAM_BYTES,
            "memory": "private",
        }
        workers.ask(command, _ANSWER_SECONDS)
        timing = {"do": "time", "slot": "", "operation": stream, "warmup": 0}
        once = min(workers.ask({**timing, "batch": 1, "batches": 2}, _ANSWER_SECONDS)[0]["means"])
        batch = max(2, round(seconds * 1e9 / once))
        answers = workers.ask({**timing, "batch": batch, "batches": 1}, _ANSWER_SECONDS)
        moved = _STREAM_BYTES * _STREAM_MOVES[stream]
        rates[stream] = sum(moved / answer["means"][0] * 1e9 for answer in answers)
    return rates
