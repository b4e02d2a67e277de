"""Who waited for whom, and where each rank's time went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchestra.engine.recorder.formats.rows import Row, Table

_MIN_SHARE_OF_TIME = 0.02
_MIN_SHARE_OF_WAITING = 0.3


@dataclass(frozen=True)
class TimeUse:
    """Where the time of one rank went, in seconds, from its first operation to its last.

    Attributes:
        moving: in blocking operations, without the waiting.
        waiting: for other ranks, in blocking operations.
        elsewhere: in no operation: the program's own work.
    """

    rank: int
    moving: float
    waiting: float
    elsewhere: float

    @property
    def total(self) -> float:
        """Return the seconds in all."""
        return self.moving + self.waiting + self.elsewhere


@dataclass(frozen=True)
class Waiting:
    """Who waited for whom in the operations of a group.

    Attributes:
        seconds: by the rank that waited, by the rank that it waited for.
        unattributed: seconds of waiting of which the record does not tell for whom, by the rank that waited.
    """

    seconds: tuple[tuple[float, ...], ...]
    unattributed: tuple[float, ...]

    @property
    def total(self) -> float:
        """Return the seconds in all."""
        return sum(map(sum, self.seconds)) + sum(self.unattributed)

    def caused_by(self, rank: int) -> float:
        """Return the seconds that the others waited for a rank."""
        return sum(row[rank] for row in self.seconds)


@dataclass(frozen=True)
class Straggler:
    """The rank that the others waited for most.

    Attributes:
        share_of_waiting: of all waiting, that for this rank, from 0 to 1.
        share_of_time: of the others' time, that which they waited for it.
        seconds: that they waited for it, in all.
    """

    rank: int
    share_of_waiting: float
    share_of_time: float
    seconds: float


def rows_of(table: Table, group: int) -> list[Row]:
    """Return the operations of a group, by number, by their beginning."""
    return [row for row in table.rows if row.group == group]


def waiting_of(rows: Sequence[Row], size: int) -> Waiting:
    """Return who waited for whom.

    The waiting of an operation is put down to the rank that was waited for longest in it, which the ranks
    record. Where they do not (between hosts), it is put down to the rank that came last to the operation, if
    that was after the waiting began.

    Args:
        rows: of one group.
        size: of that group.
    """
    last = _last_to_come(rows)
    seconds = [[0.0] * size for _ in range(size)]
    unattributed = [0.0] * size
    for row in rows:
        awaited = row.peer if row.kind == "recv" else row.waited_for
        if awaited is None and not row.is_message and row.number in last:
            came_last = last[row.number]
            if came_last.rank != row.rank and came_last.started_us > row.started_us:
                awaited = came_last.rank
        if not row.blocking or row.waited_us <= 0:
            continue
        if awaited is None or awaited == row.rank:
            unattributed[row.rank] += row.waited_us / 1e6
        else:
            seconds[row.rank][awaited] += row.waited_us / 1e6
    return Waiting(tuple(map(tuple, seconds)), tuple(unattributed))


def _last_to_come(rows: Iterable[Row]) -> dict[int, Row]:
    """Return, by the number of a collective, the call that began last."""
    last: dict[int, Row] = {}
    for row in rows:
        if not row.is_message and (row.number not in last or row.started_us > last[row.number].started_us):
            last[row.number] = row
    return last


def time_use(rows: Sequence[Row], ranks: Iterable[int]) -> list[TimeUse]:
    """Return where the time of each of these ranks went; 0 of those without an operation.

    Operations of a rank that overlap count once, as the time in which there was one of them.
    """
    uses = []
    for rank in ranks:
        own = [row for row in rows if row.rank == rank and row.blocking]
        busy = sum(end - start for start, end in union([_interval(row) for row in own])) / 1e6
        waited = min(busy, sum(row.waited_us for row in own) / 1e6)
        first = min((row.started_us for row in own), default=0.0)
        last = max((row.started_us + row.duration_us for row in own), default=0.0)
        uses.append(TimeUse(rank, busy - waited, waited, max(0.0, (last - first) / 1e6 - busy)))
    return uses


def _interval(row: Row) -> tuple[float, float]:
    return row.started_us, row.started_us + row.duration_us


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the same points as intervals that do not touch, in order."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def overlap(first: Iterable[tuple[float, float]], second: Iterable[tuple[float, float]]) -> float:
    """Return the length of what lies in both of two sets of intervals."""
    ends = union(first), union(second)
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in ends[0] for c, d in ends[1])


def straggler(waiting: Waiting, uses: Sequence[TimeUse]) -> Straggler | None:
    """Return the rank that the others waited for most, or None if no rank stands out.

    One stands out if the others spend 2 % of their time waiting for it, and 30 % of all waiting is for it; of
    two ranks, if it causes most of it.
    """
    size, total = len(waiting.seconds), waiting.total
    if size < 2 or total <= 0:
        return None
    rank = max(range(size), key=waiting.caused_by)
    seconds = waiting.caused_by(rank)
    others = sum(use.total for use in uses if use.rank != rank)
    share, of_time = seconds / total, seconds / others if others else 0.0
    least = 0.6 if size == 2 else _MIN_SHARE_OF_WAITING
    if share < least or of_time < _MIN_SHARE_OF_TIME:
        return None
    return Straggler(rank, share, of_time, seconds)
