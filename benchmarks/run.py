"""One run of the benchmark, from its options to its report."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.interop import measure_interop
from benchmarks.machine import available_memory, describe_machine
from benchmarks.measuring import (
    STREAMS,
    Watch,
    cell_bytes,
    cells_of,
    measure_cell,
    measure_streams,
)
from benchmarks.options import BenchOptions
from benchmarks.peers import Column, Peer, find_peers
from benchmarks.ranks.shapes import offered
from benchmarks.remote_calls import measure_remote_calls
from benchmarks.report import BenchReport, Cell, ColumnInfo, SideTable
from benchmarks.roofline import FLOOR_FROM_BYTES, floor_us
from benchmarks.startup import measure_startup
from benchmarks.training import measure_training
from benchmarks.worker_processes import PeerError, WorkerProcesses
from torchestra.monitor.bench import size_label
from torchestra.performance.conditions import busy_share

__all__ = ["run_benchmark"]

_POLL_SECONDS = 0.2
_STREAM_SECONDS = 0.25
_MEMORY_SHARE = 0.7


def run_benchmark(options: BenchOptions, watch: Watch | None = None) -> BenchReport:
    """Measure what the options say, and print and write nothing.

    Args:
        options: what to measure.
        watch: called with what is being measured, how many cells are done and how many there are.

    Returns:
        The report. Peers that did not start or broke down are missing from its cells, and named in its notes.

    No process that was started is left running, whatever is raised (KeyboardInterrupt included).
    """
    run = _Run(options, watch or (lambda text, done, total: None))
    start = time.monotonic()
    if "collectives" in options.sections:
        run.collectives()
    if "startup" in options.sections:
        run.startup()
    if "training" in options.sections:
        run.training()
    if "interop" in options.sections:
        run.interop()
    if "rpc" in options.sections:
        run.remote_calls()
    return run.report(time.monotonic() - start)


class _Run:
    """Hold the results so far."""

    def __init__(self, options: BenchOptions, watch: Watch) -> None:
        self._options = options
        self._watch = watch
        self._columns: dict[str, ColumnInfo] = {}
        self._cells: list[Cell] = []
        self._bandwidth: dict[int, dict[str, float]] = {}
        self._disturbance: list[float] = []
        self._tables: list[SideTable] = []
        self._notes: list[str] = []
        self._total = len(cells_of(options)) * len(options.nproc) if "collectives" in options.sections else 0

    def collectives(self) -> None:
        peers, notes = find_peers(self._options, Path.cwd())
        self._notes += notes
        for world in self._options.nproc:
            with contextlib.ExitStack() as stack:
                workers = self._start(peers, world, stack)
                memory = self._start_memory(world, stack)
                self._world(world, workers, memory)

    def startup(self) -> None:
        self._tell("start-up")
        table, notes = measure_startup(self._options)
        self._tables.append(table)
        self._notes += notes

    def training(self) -> None:
        self._tell("training")
        table, notes = measure_training(self._options)
        self._tables.append(table)
        self._notes += notes

    def interop(self) -> None:
        self._tell("interop")
        table, notes = measure_interop(self._options)
        self._tables.append(table)
        self._notes += notes

    def remote_calls(self) -> None:
        self._tell("remote calls")
        table, notes = measure_remote_calls(self._options)
        self._tables.append(table)
        self._notes += notes

    def report(self, seconds: float) -> BenchReport:
        options = self._options
        return BenchReport(
            machine=describe_machine(),
            options={
                "operations": options.operations,
                "sizes": options.sizes,
                "nproc": options.nproc,
                "rounds": options.rounds,
                "seconds": options.seconds,
                "dirtied": options.dirtied,
            },
            columns=tuple(self._columns.values()),
            cells=tuple(self._cells),
            bandwidth=self._bandwidth,
            disturbance=tuple(self._disturbance),
            tables=tuple(self._tables),
            notes=tuple(self._notes),
            seconds=seconds,
        )

    def _start(
        self, peers: list[Peer], world: int, stack: contextlib.ExitStack
    ) -> list[tuple[Column, WorkerProcesses]]:
        turns = []
        for peer in peers:
            self._tell(f"{world} ranks: starting {peer.columns[0].title}")
            try:
                workers = stack.enter_context(WorkerProcesses(peer, world))
            except PeerError as error:
                self._notes.append(str(error))
                continue
            for column in peer.columns:
                info = ColumnInfo(column.key, column.title, peer.kind, workers.description, column.memory)
                self._columns.setdefault(column.key, info)
                turns.append((column, workers))
        return turns

    def _start_memory(self, world: int, stack: contextlib.ExitStack) -> WorkerProcesses | None:
        """Return the processes that find the memory's bandwidth, where a floor is asked for."""
        if max(self._options.sizes) < FLOOR_FROM_BYTES:
            return None
        peer = Peer("memory", "memory", Path(sys.executable), (Column("memory", "memory bandwidth"),))
        try:
            return stack.enter_context(WorkerProcesses(peer, world))
        except PeerError as error:
            self._notes.append(str(error))
            return None

    def _world(
        self, world: int, turns: list[tuple[Column, WorkerProcesses]], memory: WorkerProcesses | None
    ) -> None:
        best: dict[str, float] = {}
        found: list[Cell] = []
        previous = ""
        budget = available_memory()
        for operation, size in cells_of(self._options):
            self._tell(f"{world} ranks: {operation} {size_label(size) if size else ''}", len(found))
            if operation != previous:
                busy = busy_share(_POLL_SECONDS)
                self._disturbance += [] if busy is None else [busy]
                self._stream(memory, best, STREAMS if not best else ("update",))
                previous = operation
            needed = cell_bytes(operation, size, world) * len(turns)
            if budget is not None and needed > _MEMORY_SHARE * budget:
                self._notes.append(
                    f"{operation} {size_label(size)} on {world} ranks: the peers need {needed / 1e9:.1f} GB, "
                    f"{budget / 1e9:.1f} GB are available"
                )
                continue
            timings, errors = measure_cell(turns, operation, size, world, self._options)
            for error in errors:
                self._notes.append(f"{error}; not measured from {operation} {size_label(size)} on")
            gone = [workers for column, workers in turns if _column_missing(column, operation, timings)]
            for workers in set(gone):
                workers.kill()
            turns[:] = [(column, workers) for column, workers in turns if workers not in gone]
            found.append(Cell(world, operation, size, timings))
        if best:
            self._bandwidth[world] = best
        for cell in found:
            floor = floor_us(cell.operation, cell.size, world, best["update"]) if best else None
            self._cells.append(Cell(world, cell.operation, cell.size, cell.timings, floor))

    def _stream(
        self, memory: WorkerProcesses | None, best: dict[str, float], streams: tuple[str, ...]
    ) -> None:
        if memory is None:
            return
        for stream, rate in measure_streams(memory, streams, _STREAM_SECONDS).items():
            best[stream] = max(rate, best.get(stream, 0.0))

    def _tell(self, text: str, more: int = 0) -> None:
        self._watch(text, len(self._cells) + more, self._total)


def _column_missing(column: Column, operation: str, timings: dict[str, Any]) -> bool:
    return offered(operation, column.memory) and column.key not in timings
