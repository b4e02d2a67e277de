"""The parts of a training step by rank: how long each rank takes, and what of the communication is hidden."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from torchestra.engine.recorder.formats.rows import Row, SpanRow
from torchestra.monitor.analysis.waiting import union

BETWEEN_OPERATIONS = "between operations"
BETWEEN_STEPS = "between steps"
FORWARD, BACKWARD = "forward", "backward"
_WAITS = "wait"
_MIN_EXCESS = 0.05


@dataclass(frozen=True)
class Phase:
    """How long the ranks take for a part of their work, in seconds, without waiting for each other.

    Attributes:
        name: ``"forward"``, ``"backward"``, ``"between steps"`` (from the end of backward to the next
            forward), or, where steps are not recorded, ``"between operations"``.
        mean: by rank; ranks of which nothing is known are left out.
    """

    name: str
    mean: dict[int, float]

    def excess(self, rank: int) -> float:
        """Return the seconds that a rank takes longer than the median of the others."""
        others = [seconds for other, seconds in self.mean.items() if other != rank]
        return self.mean[rank] - median(others) if rank in self.mean and others else 0.0

    def slowdown(self, rank: int) -> float:
        """Return the same as a share of the others' median: 0.18 is 18 % slower; 0 if they take no time."""
        others = [seconds for other, seconds in self.mean.items() if other != rank]
        usual = median(others) if others else 0.0
        return self.excess(rank) / usual if usual > 0 else 0.0


@dataclass(frozen=True)
class Overlap:
    """How much of the reduction of gradients went on beside backward, on one rank, in seconds a step.

    Attributes:
        communicating: in which at least one bucket was being reduced.
        exposed: of these, in which the program waited for it.
    """

    rank: int
    steps: int
    communicating: float
    exposed: float

    @property
    def hidden_share(self) -> float:
        """Return the share that was hidden behind backward, from 0 to 1."""
        return 1 - self.exposed / self.communicating if self.communicating > 0 else 0.0


@dataclass(frozen=True)
class BucketTime:
    """A bucket of one step on one rank; times in microseconds, as the rows have them.

    Attributes:
        ready_us: when its gradients were ready.
        started_us, ended_us: of its reduction.
    """

    rank: int
    step: int
    index: int
    nbytes: int
    ready_us: float
    started_us: float
    ended_us: float


def phases_of(rows: Sequence[Row], spans: Sequence[SpanRow]) -> list[Phase]:
    """Return the parts of the ranks' work, from the spans of training steps if there are any.

    The first step that is recorded of a rank is left out where there are more: it is slower than others.
    """
    own: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rank in sorted({span.rank for span in spans}):
        steps = [span for span in spans if span.rank == rank]
        waits = [(row.started_us, row.duration_us, row.waited_us) for row in rows if row.rank == rank]
        first = min((span.step for span in steps), default=0)
        kept = [span for span in steps if span.step > first] or steps
        for span in kept:
            if span.kind in (FORWARD, BACKWARD):
                waited = _waited_within(span, waits)
                own[span.kind][rank].append((span.ended_us - span.started_us - waited) / 1e6)
        ends = {span.step: span.ended_us for span in kept if span.kind == BACKWARD}
        for span in kept:
            if span.kind == FORWARD and span.step - 1 in ends:
                own[BETWEEN_STEPS][rank].append(_between(ends[span.step - 1], span.started_us, waits))
    if not own:
        own[BETWEEN_OPERATIONS] = {rank: _gaps(rows, rank) for rank in sorted({row.rank for row in rows})}
    return [
        Phase(name, {rank: fmean(times) for rank, times in own[name].items() if times})
        for name in (FORWARD, BACKWARD, BETWEEN_STEPS, BETWEEN_OPERATIONS)
        if any(own[name].values())
    ]


def _waited_within(span: SpanRow, waits: Sequence[tuple[float, float, float]]) -> float:
    """Return the microseconds of a span that went by in waiting; a wait is spread over its operation."""
    return _waited(span.started_us, span.ended_us, waits)


def _waited(start: float, end: float, waits: Sequence[tuple[float, float, float]]) -> float:
    total = 0.0
    for began, duration, waited in waits:
        within = min(end, began + duration) - max(start, began)
        if within > 0 and duration > 0:
            total += waited * within / duration
    return min(total, end - start)


def _between(start: float, end: float, waits: Sequence[tuple[float, float, float]]) -> float:
    return max(0.0, end - start - _waited(start, end, waits)) / 1e6


def _gaps(rows: Sequence[Row], rank: int) -> list[float]:
    """Return the seconds between the blocking operations of a rank."""
    busy = union((row.started_us, row.started_us + row.duration_us) for row in rows
                 if row.rank == rank and row.blocking)  # fmt: skip
    return [(after[0] - before[1]) / 1e6 for before, after in pairwise(busy)]


def slowest_phase(phases: Sequence[Phase], rank: int) -> Phase | None:
    """Return the part in which a rank loses most time against the others; None if it loses 5 % nowhere."""
    slow = [phase for phase in phases if phase.slowdown(rank) >= _MIN_EXCESS]
    return max(slow, key=lambda phase: phase.excess(rank), default=None)


def buckets_of(rows: Sequence[Row], spans: Sequence[SpanRow]) -> list[BucketTime]:
    """Return when the buckets of training steps were ready, and reduced, by rank, step and index.

    The reductions are the collectives of the step, in their order, that move as many bytes as the bucket has.
    Where there is none, as with a hook that sends something else, the whole time until the averages were
    there is taken.
    """
    times = []
    for rank in sorted({span.rank for span in spans}):
        collectives = [row for row in rows if row.rank == rank and not row.is_message and row.state == "done"]
        for step in sorted({span.step for span in spans if span.rank == rank}):
            own = [span for span in spans if (span.rank, span.step, span.kind) == (rank, step, "bucket")]
            own.sort(key=lambda span: span.index or 0)
            taken = 0
            for span in own:
                start, end = span.started_us, span.ended_us
                found = next(
                    (number for number, row in enumerate(collectives[taken:], start=taken)
                     if row.nbytes == span.nbytes and span.started_us <= row.started_us <= span.ended_us),
                    None,
                )  # fmt: skip
                if found is not None:
                    row, taken = collectives[found], found + 1
                    start, end = row.started_us, row.started_us + row.duration_us
                times.append(
                    BucketTime(rank, step, span.index or 0, span.nbytes, span.started_us, start, end)
                )
    return times


def overlaps_of(spans: Sequence[SpanRow], buckets: Sequence[BucketTime]) -> list[Overlap]:
    """Return, by rank, how much of the reduction of gradients was hidden behind backward."""
    overlaps = []
    for rank in sorted({bucket.rank for bucket in buckets}):
        waits = {span.step: span for span in spans if span.rank == rank and span.kind == _WAITS}
        steps = sorted({bucket.step for bucket in buckets if bucket.rank == rank} & waits.keys())
        communicating = exposed = 0.0
        for step in steps:
            own = union((bucket.started_us, bucket.ended_us) for bucket in buckets
                        if (bucket.rank, bucket.step) == (rank, step))  # fmt: skip
            wait = waits[step]
            communicating += sum(end - start for start, end in own) / 1e6
            exposed += sum(
                max(0.0, min(end, wait.ended_us) - max(start, wait.started_us)) for start, end in own
            ) / 1e6  # fmt: skip
        if steps:
            overlaps.append(Overlap(rank, len(steps), communicating / len(steps), exposed / len(steps)))
    return overlaps
