"""Rates of ranks between two samples: operations and bytes per second, and time spent waiting."""

from __future__ import annotations

from dataclasses import dataclass

from torchestra.engine.recorder.flight_entries import RankRecord
from torchestra.engine.recorder.flight_record import FlightRecord

_WORTH_TELLING = 0.01


@dataclass(frozen=True)
class RankRates:
    """The rates of one rank between two samples.

    Attributes:
        operations: collectives and messages begun per second.
        bytes: bytes per second moved by operations that ended.
        waiting: the share of time spent waiting for other ranks, 0 to 1.
        waited_for: the same share by the rank waited for.
        calls_made, calls_executed, calls_sent_bytes: by RPC, per second.
    """

    operations: float
    bytes: float
    waiting: float
    waited_for: tuple[float, ...]
    calls_made: float = 0.0
    calls_executed: float = 0.0
    calls_sent_bytes: float = 0.0

    @property
    def awaited(self) -> int | None:
        """Return the rank that this rank waited for most, if it waited."""
        most = max(range(len(self.waited_for)), key=self.waited_for.__getitem__)
        return most if self.waited_for[most] >= _WORTH_TELLING else None


def rates(before: FlightRecord, after: FlightRecord) -> list[RankRates]:
    """Return the rates of every rank of a group, from two samples of its record."""
    seconds = max(1e-6, after.taken - before.taken)
    return [
        _rates(early, _waits(early, before.taken), late, _waits(late, after.taken), seconds)
        for early, late in zip(before.ranks, after.ranks, strict=True)
    ]


def straggler(of_ranks: list[RankRates]) -> tuple[int, float] | None:
    """Return the rank that the others waited for most, and that share of their time; None if none waited."""
    if len(of_ranks) < 2:
        return None
    shares = [
        sum(each.waited_for[rank] for each in of_ranks) / (len(of_ranks) - 1)
        for rank in range(len(of_ranks[0].waited_for))
    ]
    most = max(range(len(shares)), key=shares.__getitem__)
    return (most, min(1.0, shares[most])) if shares[most] >= _WORTH_TELLING else None


def _rates(
    early: RankRecord, waits_then: list[float], late: RankRecord, waits_now: list[float], seconds: float
) -> RankRates:
    def per_second(then: float, now: float) -> float:
        return max(0.0, now - then) / seconds

    shares = [min(1.0, per_second(then, now)) for then, now in zip(waits_then, waits_now, strict=True)]
    return RankRates(
        operations=per_second(
            early.operations_begun + early.messages_begun, late.operations_begun + late.messages_begun
        ),
        bytes=per_second(
            early.operation_bytes + early.message_bytes, late.operation_bytes + late.message_bytes
        ),
        waiting=min(1.0, sum(shares)),
        waited_for=tuple(shares),
        calls_made=per_second(early.calls_made, late.calls_made),
        calls_executed=per_second(*(sum(each.calls for each in rank.calls) for rank in (early, late))),
        calls_sent_bytes=per_second(early.calls_sent_bytes, late.calls_sent_bytes),
    )


def _waits(rank: RankRecord, now: float) -> list[float]:
    """Return the seconds waited so far for each rank, including a wait that has not ended."""
    waited = list(rank.waited_for)
    if rank.waiting_for is not None and rank.waiting_since is not None:
        waited[rank.waiting_for] += max(0.0, now - rank.waiting_since)
    message = rank.running_message
    if message is not None and message.kind == "recv" and message.peer is not None and not message.waited:
        waited[message.peer] += max(0.0, now - message.started)
    return waited
