"""Many hosts in rows and columns, so that each exchanges with few others.

Where every host exchanges with every other, the number of messages that each sends grows with the number of
hosts, while they get shorter. In a grid of R rows and C columns a host exchanges first with the others of its
row and then with those of its column: R + C - 2 messages instead of R * C - 1. What is to reach all hosts
does, since each row has a host in each column.

The bytes stay the same: a reduction over the row leaves a host 1/C of the whole, which then is reduced over
the column, and gathered back by the same ways (two-dimensional reduce-scatter and all-gather; Chan and
others, "Collective communication: theory, practice, and experience", 2007).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_HOSTS = 64
"""From so many hosts on a grid is used. By prediction it is slower for large tensors up to some 30 hosts, and
takes half the time on 64 (docs/scaling.md)."""

_MAX_SKEW = 16
"""A grid that is longer than wide by more than this saves too little."""


@dataclass(frozen=True)
class Grid:
    """Hosts in rows, one after the other.

    Attributes:
        rows, columns: how many there are.
    """

    rows: int
    columns: int

    def row(self, host: int) -> list[int]:
        """Return the hosts in the row of a host, itself included, in ascending order."""
        first = host // self.columns * self.columns
        return list(range(first, first + self.columns))

    def column(self, host: int) -> list[int]:
        """Return the hosts in the column of a host, itself included, in ascending order."""
        return list(range(host % self.columns, self.rows * self.columns, self.columns))


def grid_of(hosts: int) -> Grid | None:
    """Return the squarest grid of so many hosts; None of few, and of a number without such factors."""
    if hosts < MIN_HOSTS:
        return None
    rows = next(rows for rows in range(math.isqrt(hosts), 0, -1) if hosts % rows == 0)
    columns = hosts // rows
    return Grid(rows, columns) if columns <= _MAX_SKEW * rows else None
