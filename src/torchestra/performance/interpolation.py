"""Numbers that were measured at some sizes and numbers of ranks, and what is taken between these."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

from torchestra.errors import InvalidArgumentError


@dataclass(frozen=True)
class Rate:
    """The speed of each of ``ranks`` ranks of a host that do the same at once.

    An operation goes through tensors of a rank and through buffers that ranks share. What it goes through
    each time comes from the level of the caches that all of it fits into.

    Attributes:
        ranks: how many. They share memory's bandwidth and the caches; beyond the cores they take turns, and
            the time for which others have the core does not count.
        working_set_bytes: the memory that a rank goes through each time: its tensors and its buffer.
        bytes_per_s: of one rank: for a copy, bytes copied; for a reduction, bytes read from all sources.
    """

    ranks: int
    working_set_bytes: int
    bytes_per_s: float

    def __post_init__(self) -> None:
        check_numbers(self, positive=("ranks", "working_set_bytes", "bytes_per_s"))


@dataclass(frozen=True)
class SwitchTime:
    """The time of a switch between ranks that wait for each other, more than there are cores.

    Attributes:
        ranks: how many are on the host.
        switch_s: what one switch takes for small operations of them to take what was measured. It has more
            than the system's switch in it: switches to ranks that have to wait on, and caches that others
            have used.
    """

    ranks: int
    switch_s: float

    def __post_init__(self) -> None:
        check_numbers(self, positive=("ranks",))


@dataclass(frozen=True)
class Slowdown:
    """By how much longer something takes in an operation of several ranks than by itself.

    Attributes:
        ranks: how many are on the host.
        operation_bytes: what each rank puts into the operation.
        factor: how many times as long.
    """

    ranks: int
    operation_bytes: int
    factor: float

    def __post_init__(self) -> None:
        check_numbers(self, positive=("ranks", "operation_bytes", "factor"))


@dataclass(frozen=True)
class OperationFactor:
    """By how much longer an operation takes as a whole than the parts that are known of it.

    Attributes:
        name: of the operation.
        ranks: how many were on each host.
        operation_bytes: what each rank put in; 0 for a barrier.
        factor: how many times as long.
    """

    name: str
    ranks: int
    operation_bytes: int
    factor: float

    def __post_init__(self) -> None:
        check_numbers(self, positive=("ranks", "factor"))


def rate_at(rates: tuple[Rate, ...], working_set_bytes: int, ranks: int) -> float:
    """Return the rate for a working set and a number of ranks, between those that were measured.

    The time by byte is interpolated over the logarithm of the working set, then over the number of ranks;
    beyond the ends of the table its ends are taken.
    """
    points = [(each.ranks, each.working_set_bytes, 1 / each.bytes_per_s) for each in rates]
    return 1 / _interpolated(points, working_set_bytes, ranks)


def slowdown_at(slowdowns: tuple[Slowdown, ...], operation_bytes: int, ranks: int) -> float:
    """Return the factor for an operation and a number of ranks, interpolated likewise; 1 if none is known."""
    points = [(each.ranks, each.operation_bytes, each.factor) for each in slowdowns]
    return _interpolated(points, operation_bytes, ranks) if points else 1.0


def factor_at(factors: Iterable[OperationFactor], name: str, operation_bytes: int, ranks: int) -> float:
    """Return the factor of an operation, interpolated likewise, but over the logarithms of all numbers.

    1 if none is known of operations of that name.
    """
    points = [
        (each.ranks, each.operation_bytes, math.log(each.factor)) for each in factors if each.name == name
    ]
    return math.exp(_interpolated(points, operation_bytes, ranks, math.log)) if points else 1.0


_Point = tuple[int, int, float]
"""A number of ranks, bytes, and what was measured."""


def _interpolated(
    points: Sequence[_Point], nbytes: int, ranks: int, scale: Callable[[float], float] = float
) -> float:
    by_ranks = []
    for known in sorted({number for number, _, _ in points}):
        of_ranks = sorted((_log(size), value) for number, size, value in points if number == known)
        by_ranks.append((scale(known), interpolated(of_ranks, _log(nbytes))))
    return interpolated(by_ranks, scale(ranks))


def _log(nbytes: int) -> float:
    return math.log(max(1, nbytes))


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value between points in ascending order, linearly; beyond their ends these hold."""
    above = min(bisect_left(points, (at,)), len(points) - 1)
    high, high_value = points[above]
    if at >= high or above == 0:
        return high_value
    low, low_value = points[above - 1]
    return low_value + (at - low) / (high - low) * (high_value - low_value)


def check_numbers(record: object, positive: tuple[str, ...] = ()) -> None:
    """Refuse numbers of a record that are negative, infinite or NaN, or 0 where that makes no sense."""
    for each in fields(record):  # type: ignore[arg-type]
        value = getattr(record, each.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not is_fit(value) or (each.name in positive and value == 0):
            rule = "> 0" if each.name in positive else ">= 0"
            raise InvalidArgumentError(
                f"{type(record).__name__}.{each.name} must be a finite number {rule}, got {value}"
            )


def is_fit(value: float) -> bool:
    """Return whether a number can be a measured one: finite, and not negative."""
    return math.isfinite(value) and value >= 0
