"""The flight record of a group on several hosts: each host's part, put together.

Hosts have clocks of their own. The host that asks notes when it asked and when it got the answer; the one
that answers, when it received the question and when it answered. The latter two moments lie between the
former two: so Cristian's algorithm (1989) tells how far apart two clocks are, and how precisely that is
known.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torchestra.engine.multihost.hosts import Hosts
from torchestra.engine.recorder.flight_entries import FlightEntry, HostRecord, RankRecord
from torchestra.engine.recorder.flight_record import FlightRecord

_ENTRY = tuple(FlightEntry.__dataclass_fields__)


class Answer(NamedTuple):
    """The records of another host.

    Attributes:
        record: of its ranks, in times of its own clock.
        offset: seconds to add to these to have them by the clock of the host that asked.
        error: by how much that may be wrong.
    """

    record: FlightRecord
    offset: float
    error: float


def answer(record: FlightRecord, heard_at: float) -> bytes:
    """Write a host's answer to a question that came at ``heard_at``, by its monotonic clock."""
    ranks = [
        {
            **vars(rank),
            "operations": [list(vars(entry).values()) for entry in rank.operations],
            "messages": [list(vars(entry).values()) for entry in rank.messages],
        }
        for rank in record.ranks
    ]
    packed = zlib.compress(json.dumps({**vars(record), "ranks": ranks, "hosts": []}).encode(), 1)
    return f"{heard_at!r} {time.monotonic()!r}\n".encode() + packed


def understand(text: bytes, asked_at: float, received_at: float) -> Answer:
    """Read the output of :func:`answer`; asked and received at these times of this host's clock."""
    times, _, packed = text.partition(b"\n")
    heard_at, answered = map(float, times.split())
    words: dict[str, Any] = json.loads(zlib.decompress(packed))
    ranks = tuple(
        RankRecord(
            **{
                **rank,
                "operations": _entries(rank["operations"]),
                "messages": _entries(rank["messages"]),
                "waited_for": tuple(rank["waited_for"]),
            }
        )
        for rank in words["ranks"]
    )
    earliest, latest = asked_at - heard_at, received_at - answered
    offset, error = (earliest + latest) / 2, abs(latest - earliest) / 2
    return Answer(FlightRecord(**{**words, "ranks": ranks, "hosts": ()}), offset, error)


def _entries(rows: Sequence[Sequence[Any]]) -> tuple[FlightEntry, ...]:
    return tuple(FlightEntry(**dict(zip(_ENTRY, row, strict=True))) for row in rows)


def put_together(own: FlightRecord, host: int, answers: Mapping[int, Answer], hosts: Hosts) -> FlightRecord:
    """Return the record of all ranks, by the clock of one host.

    Args:
        own: of the ranks of that host.
        host: which it is.
        answers: by host, those of others; nothing is known of the missing ones.
    """
    ranks: dict[int, RankRecord] = {rank.rank: rank for rank in own.ranks}
    records = []
    for other, members in enumerate(hosts.members):
        if (answer := answers.get(other)) is not None:
            ranks.update({rank.rank: _shifted(rank, answer.offset) for rank in answer.record.ranks})
            records.append(HostRecord(hosts.names[other], members, True, answer.offset, answer.error))
        else:
            records.append(HostRecord(hosts.names[other], members, other == host))
    all_ranks = (ranks.get(rank) or _unknown(rank, hosts.size) for rank in range(hosts.size))
    return replace(own, size=hosts.size, ranks=tuple(all_ranks), hosts=tuple(records))


def _shifted(rank: RankRecord, offset_s: float) -> RankRecord:
    since = rank.waiting_since
    return replace(
        rank,
        operations=tuple(_later(entry, offset_s) for entry in rank.operations),
        messages=tuple(_later(entry, offset_s) for entry in rank.messages),
        waiting_since=None if since is None else since + offset_s,
    )


def _later(entry: FlightEntry, offset_s: float) -> FlightEntry:
    ended = None if entry.ended is None else entry.ended + offset_s
    return replace(entry, started=entry.started + offset_s, ended=ended)


def _unknown(rank: int, size: int) -> RankRecord:
    return RankRecord(rank, 0, "unknown", (), (), 0, 0, 0, 0, 0.0, 0.0, (0.0,) * size, None, None)
