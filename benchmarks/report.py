"""Results as plain data, and their JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.summary import Timing, geometric_mean

__all__ = ["BenchReport", "Cell", "ColumnInfo", "SideRow", "SideTable", "Standing"]

OURS = "torchestra"
GLOO = "gloo"


@dataclass(frozen=True)
class ColumnInfo:
    """A column of the table.

    Attributes:
        key: what the cells call it.
        title: what the reader calls it.
        kind: ``torchestra``, ``gloo`` or ``mpi``.
        description: what its ranks said they are, with version.
        memory: ``private``, ``symmetric``, or ``persistent`` for persistent operations.
    """

    key: str
    title: str
    kind: str
    description: str
    memory: str = "private"

    @property
    def shown(self) -> bool:
        """Return whether the table has it; persistent operations of an MPI would make it too wide."""
        return self.kind != "mpi" or self.memory != "persistent"


@dataclass(frozen=True)
class Cell:
    """One operation, size and world size: every peer's timing, by column key.

    Attributes:
        size: bytes that a rank puts in; 0 for a barrier.
        floor_us: what memory bandwidth allows at best, microseconds; None where it says nothing.
    """

    world: int
    operation: str
    size: int
    timings: Mapping[str, Timing]
    floor_us: float | None = None

    def ratio(self, slower: str, faster: str) -> float | None:
        """Return how many times as long ``slower`` took; None where one of the two is missing or wrong."""
        one, other = self.timings.get(slower), self.timings.get(faster)
        if one is None or other is None or not (one.right and other.right):
            return None
        return one.median_us / other.median_us


@dataclass(frozen=True)
class SideRow:
    """A row of a side table.

    Attributes:
        label: of what.
        values: by column, None or missing where there is none.
        intervals: by column, the 95 % confidence interval, where known.
    """

    label: str
    values: Mapping[str, float | None]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class SideTable:
    """A table beside the collectives: start-up, a training step, remote calls.

    Attributes:
        name: its key in the JSON.
        title: its heading.
        unit: of all values; smaller is better.
        columns: keys and titles, ours first; ratios are the others' values divided by ours.
        rows: the values.
    """

    name: str
    title: str
    unit: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[SideRow, ...]


@dataclass(frozen=True)
class Standing:
    """In how many cells one kind of torchestra's operations is faster than the best of all others.

    Attributes:
        title: the column.
        ahead: cells in which it is.
        cells: cells that were compared.
        mpi_mean: geometric mean of the best MPI's time divided by its own; None without MPIs.
    """

    title: str
    ahead: int
    cells: int
    mpi_mean: float | None


@dataclass(frozen=True)
class BenchReport:
    """All that one run of the benchmark found.

    Attributes:
        machine: see ``machine.describe_machine``.
        options: how it was run.
        columns: who was measured, in the order of the table.
        cells: the collectives.
        bandwidth: per world size, the best rate of each kind of stream, bytes per second of all processes.
        disturbance: how busy the machine was (0 to 1) while the benchmark rested, one value per look.
        tables: the other sections.
        notes: what was left out, and why.
        seconds: how long it all took.
    """

    machine: Mapping[str, Any]
    options: Mapping[str, Any]
    columns: tuple[ColumnInfo, ...] = ()
    cells: tuple[Cell, ...] = ()
    bandwidth: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    disturbance: tuple[float, ...] = ()
    tables: tuple[SideTable, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Return whether every result that was checked was right."""
        return all(timing.right for cell in self.cells for timing in cell.timings.values())

    @property
    def worlds(self) -> tuple[int, ...]:
        """The world sizes, ascending."""
        return tuple(sorted({cell.world for cell in self.cells}))

    @property
    def mpi_keys(self) -> tuple[str, ...]:
        """The columns of the MPIs' ordinary operations."""
        return tuple(column.key for column in self.columns if column.kind == "mpi" and column.shown)

    def best_mpi(self, cell: Cell) -> str | None:
        """Return the key of the MPI that was fastest in a cell."""
        there = [key for key in self.mpi_keys if key in cell.timings and cell.timings[key].right]
        return min(there, key=lambda key: cell.timings[key].median_us, default=None)

    def gloo_ratio(self, cell: Cell) -> float | None:
        """Return Gloo's time divided by torchestra's."""
        return cell.ratio(GLOO, OURS)

    def mpi_ratio(self, cell: Cell, ours: str = OURS) -> float | None:
        """Return the best MPI's time divided by torchestra's: below 1 the cell is lost."""
        best = self.best_mpi(cell)
        return None if best is None else cell.ratio(best, ours)

    def mean(self, ratio: Callable[[Cell], float | None], world: int | None = None) -> float | None:
        """Return the geometric mean of a ratio over the cells (of one world size) that have it."""
        chosen = (cell for cell in self.cells if world in (None, cell.world))
        return geometric_mean(value for cell in chosen if (value := ratio(cell)) is not None)

    def lost(self) -> tuple[Cell, ...]:
        """Return the cells in which the best MPI was faster than torchestra on ordinary tensors."""
        return tuple(cell for cell in self.cells if (ratio := self.mpi_ratio(cell)) is not None and ratio < 1)

    def standings(self) -> list[Standing]:
        """Return how torchestra's kinds of operations stand to all others."""
        ours = [column for column in self.columns if column.kind == OURS]
        return [found for column in ours if (found := self._standing(column)) is not None]

    def _standing(self, ours: ColumnInfo) -> Standing | None:
        """Compare persistent operations with all of an MPI's, others with its ordinary ones."""
        kinds = ("private", ours.memory)
        mpis = [c.key for c in self.columns if c.kind == "mpi" and c.memory in kinds]
        others = [c.key for c in self.columns if c.kind == GLOO] + mpis
        ahead, ratios, mpi_ratios = 0, [], []
        for cell in self.cells:
            own = cell.timings.get(ours.key)
            against = [ratio for key in others if (ratio := cell.ratio(key, ours.key)) is not None]
            if own is not None and (against or not own.right):
                ratios.append(min(against, default=0.0))
                ahead += own.right and ratios[-1] > 1
                found = [ratio for key in mpis if (ratio := cell.ratio(key, ours.key)) is not None]
                mpi_ratios += [min(found)] if found else []
        return Standing(ours.title, ahead, len(ratios), geometric_mean(mpi_ratios)) if ratios else None

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values, for ``json.dump``."""
        return {
            "machine": dict(self.machine),
            "options": dict(self.options),
            "seconds": round(self.seconds, 1),
            "disturbance": [round(value, 4) for value in self.disturbance],
            "notes": list(self.notes),
            "columns": [asdict(column) for column in self.columns],
            "bandwidth_bytes_per_second": {
                str(world): {stream: round(rate) for stream, rate in rates.items()}
                for world, rates in self.bandwidth.items()
            },
            "gloo_over_torchestra": {
                "all": self.mean(self.gloo_ratio),
                **{str(world): self.mean(self.gloo_ratio, world) for world in self.worlds},
            },
            "best_mpi_over_torchestra": {
                "all": self.mean(self.mpi_ratio),
                **{str(world): self.mean(self.mpi_ratio, world) for world in self.worlds},
            },
            "standings": [asdict(standing) for standing in self.standings()],
            "cells": [self._cell_json(cell) for cell in self.cells],
            "tables": [asdict(table) for table in self.tables],
        }

    def _cell_json(self, cell: Cell) -> dict[str, Any]:
        return {
            "world": cell.world,
            "operation": cell.operation,
            "size": cell.size,
            "floor_us": cell.floor_us,
            "best_mpi": self.best_mpi(cell),
            "gloo_over_torchestra": self.gloo_ratio(cell),
            "best_mpi_over_torchestra": self.mpi_ratio(cell),
            "best_mpi_over_symmetric": self.mpi_ratio(cell, "symmetric"),
            "peers": {key: asdict(timing) for key, timing in cell.timings.items()},
        }
