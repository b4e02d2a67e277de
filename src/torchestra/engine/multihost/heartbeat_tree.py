"""Which hosts ping each other: a tree of two levels, so that each pings few.

Hosts are in *rows*, one after the other, each about as long as there are rows; few hosts are one row. The
*coordinator* of a row is its first host whose leader has not gone. It pings the other hosts of its row,
which ping it. The *root* is the coordinator of the first row that has one. It also pings the coordinators of
the other rows, which ping it, and all hosts of rows that have none. The invariants:

* somebody pings each host that is not alone, as long as one leader is there;
* where all know the same leaders, a cut of the network in two parts lies between two hosts of which one pings
  the other. So each half of a network that falls apart learns of that.

Membership updates need two pings to get up to the root, and two to get down. What a leader knows may be old:
then it pings a host that need not be pinged, or two take themselves for coordinators, until they have heard
the news.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

MIN_HOSTS = 64
"""Fewer hosts are one row, whose coordinator pings all others."""


def rows_of(hosts: int) -> list[range]:
    """Return so many hosts in rows; the last one may be shorter."""
    length = hosts if hosts < MIN_HOSTS else math.isqrt(hosts)
    return [range(first, min(first + length, hosts)) for first in range(0, hosts, length)]


def pinged_by(host: int, rows: Sequence[range], has_leader: Callable[[int], bool]) -> list[int]:
    """Return the hosts that a host pings whose leader is there.

    Args:
        rows: from :func:`rows_of`.
        has_leader: returns whether the leader of a host is there, as far as this one knows.
    """
    coordinators = [next((each for each in row if each == host or has_leader(each)), None) for row in rows]
    own = next(index for index, row in enumerate(rows) if host in row)
    if coordinators[own] != host:
        coordinator = coordinators[own]
        assert coordinator is not None
        return [coordinator]
    others = [each for each in rows[own] if each != host]
    root = next(each for each in coordinators if each is not None)
    if root != host:
        return [*others, root]
    for row, coordinator in zip(rows, coordinators, strict=True):
        if row != rows[own]:
            others += row if coordinator is None else [coordinator]
    return others
