"""The options of the benchmark: what to measure, and how long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.ranks.shapes import OPERATIONS
from torchestra.errors import InvalidArgumentError

__all__ = [
    "DEFAULT_SIZES",
    "QUICK_SIZES",
    "SECTIONS",
    "BenchOptions",
    "MpiEnvironment",
]

DEFAULT_SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
QUICK_SIZES = (4, 64 << 10, 1 << 20)
SECTIONS = ("collectives", "startup", "training", "interop", "rpc")


def _checked_size(size: int) -> int:
    if size < 4 or size % 4:
        raise InvalidArgumentError(f"a size must be a positive multiple of 4 bytes (float32), got {size}")
    return size


@dataclass(frozen=True)
class MpiEnvironment:
    """An MPI to measure: a name for the table, and an interpreter that can import mpi4py."""

    name: str
    python: Path


@dataclass(frozen=True)
class BenchOptions:
    """Say what to measure, and how long.

    Attributes:
        operations: names from ``ranks.shapes.OPERATIONS``.
        sizes: bytes per rank, multiples of 4.
        nproc: the world sizes.
        peers: the keys of the peers to measure (``gloo``, ``torchestra``, ``symmetric``, ``persistent``, and
            an MPI's name in lower case without blanks: ``mpich``, ``openmpi``, …); None means all found.
        mpi: MPIs to measure beside those that are found.
        rounds: how often the peers take turns in a cell.
        seconds: how long one turn in a cell lasts (a turn is at least two calls, however long they take).
        sections: which parts of the benchmark to run, from ``SECTIONS``.
        output: the directory for the files; created if needed.
        dirtied: whether a rank's input is written anew before every call.
        loaded: whether another process spins on each core during the training section.
        markdown: whether to write the tables as Markdown too.

    Raises:
        InvalidArgumentError: a name is unknown, a number is out of range, or a list is empty.
    """

    operations: tuple[str, ...] = OPERATIONS
    sizes: tuple[int, ...] = DEFAULT_SIZES
    nproc: tuple[int, ...] = (2, 4)
    peers: tuple[str, ...] | None = None
    mpi: tuple[MpiEnvironment, ...] = ()
    rounds: int = 3
    seconds: float = 0.1
    sections: tuple[str, ...] = SECTIONS
    output: Path = Path("out/bench")
    dirtied: bool = True
    loaded: bool = False
    markdown: bool = False

    def __post_init__(self) -> None:
        _check_names("operation", self.operations, OPERATIONS)
        _check_names("section", self.sections, SECTIONS)
        for name, values in (("sizes", self.sizes), ("nproc", self.nproc)):
            if not values:
                raise InvalidArgumentError(f"{name} must not be empty")
        for size in self.sizes:
            _checked_size(size)
        for world in self.nproc:
            if world < 2:
                raise InvalidArgumentError(f"nproc must be at least 2 (one rank has no peer), got {world}")
        if self.rounds < 1 or not self.seconds > 0:
            raise InvalidArgumentError(
                f"rounds must be at least 1 and seconds above 0, got {self.rounds} and {self.seconds}"
            )

    def wants(self, key: str) -> bool:
        """Return whether the peer of this key is to be measured."""
        return self.peers is None or key in self.peers


def _check_names(what: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    if not given:
        raise InvalidArgumentError(f"no {what} was given; known are {', '.join(known)}")
    for name in given:
        if name not in known:
            raise InvalidArgumentError(f"unknown {what} {name!r}; known are {', '.join(known)}")
