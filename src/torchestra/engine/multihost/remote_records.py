"""The flight record of a group on several hosts: each host's part, put together.

Hosts have clocks of their own. The host that asks notes when it asked and when it got the answer; the one
that answers, when it received the question and when it answered. The latter two moments lie between the
former two: so Cristian's algorithm (1989) tells how far apart two clocks are, and how precisely that is
known.

An answer has two parts, each compressed: the records, and after them what the host tells of the ranks'
programs. Versions of torchestra that know the first part only ignore the second, and send none.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from torchestra.engine.diagnosis.facts import from_json, to_json
from torchestra.engine.failure.program_samples import ProgramSample
from torchestra.engine.hosts import Hosts
from torchestra.engine.recorder.flight_entries import (
    ExecutedCalls,
    FlightEntry,
    HostRecord,
    RankRecord,
    Span,
    Tally,
)
from torchestra.engine.recorder.flight_record import FlightRecord
from torchestra.store.unreadable import unpacked, unpacked_first

_MAX_BYTES = 1 << 28  # of a host's records: 256 MB
_ENTRY = tuple(FlightEntry.__dataclass_fields__)


class Answer(NamedTuple):
    """The records of another host.

    Attributes:
        record: of its ranks, in times of its own clock.
        offset: seconds to add to these to have them by the clock of the host that asked.
        error: by how much that may be wrong.
        programs: of each rank in the record; none at all if the host does not tell.
    """

    record: FlightRecord
    offset: float
    error: float
    programs: tuple[ProgramSample, ...] = ()


@dataclass(frozen=True)
class _Programs:
    """The second part of an answer."""

    programs: tuple[ProgramSample, ...]


def answer(record: FlightRecord, heard_at: float, programs: Sequence[ProgramSample] = ()) -> bytes:
    """Write a host's answer to a question that came at ``heard_at``, by its monotonic clock."""
    ranks = [
        {
            **vars(rank),
            "operations": [list(vars(entry).values()) for entry in rank.operations],
            "messages": [list(vars(entry).values()) for entry in rank.messages],
            "tallies": [list(vars(tally).values()) for tally in rank.tallies],
            "spans": [list(vars(span).values()) for span in rank.spans],
            "calls": [list(vars(calls).values()) for calls in rank.calls],
        }
        for rank in record.ranks
    ]
    packed = zlib.compress(json.dumps({**vars(record), "ranks": ranks, "hosts": []}).encode(), 1)
    if programs:
        packed += zlib.compress(to_json(_Programs(tuple(programs))).encode(errors="replace"), 1)
    return f"{heard_at!r} {time.monotonic()!r}\n".encode() + packed


def understand(text: bytes, asked_at: float, received_at: float) -> Answer:
    """Read the output of :func:`answer`; asked and received at these times of this host's clock.

    Raises:
        One of UNREADABLE: it is something else.
    """
    times, _, packed = text.partition(b"\n")
    heard_at, answered = map(float, times.split())
    if not (math.isfinite(heard_at) and math.isfinite(answered)):
        raise ValueError("invalid times")
    records, packed_programs = unpacked_first(packed, _MAX_BYTES)
    words: dict[str, Any] = json.loads(records)
    ranks = tuple(
        _checked(
            RankRecord(
                **{
                    **rank,
                    "operations": _entries(rank["operations"]),
                    "messages": _entries(rank["messages"]),
                    "waited_for": tuple(rank["waited_for"]),
                    "tallies": tuple(_checked(Tally(*tally)) for tally in rank["tallies"]),
                    "spans": tuple(_checked(Span(*span)) for span in rank["spans"]),
                    "calls": tuple(_checked(ExecutedCalls(*calls)) for calls in rank["calls"]),
                }
            )
        )
        for rank in words["ranks"]
    )
    earliest, latest = asked_at - heard_at, received_at - answered
    offset, error = (earliest + latest) / 2, abs(latest - earliest) / 2
    record = _checked(FlightRecord(**{**words, "ranks": ranks, "hosts": ()}))
    return Answer(record, offset, error, _programs(packed_programs, len(ranks)))


def _programs(packed: bytes, count: int) -> tuple[ProgramSample, ...]:
    """Return what a host tells of the programs of its ``count`` ranks; nothing if it tells nothing."""
    if not packed:
        return ()
    told = from_json(_Programs, unpacked(packed, _MAX_BYTES)).programs
    if len(told) != count:
        raise ValueError(f"{len(told)} programs of {count} ranks")
    return told


def _entries(rows: Sequence[Sequence[Any]]) -> tuple[FlightEntry, ...]:
    return tuple(_checked(FlightEntry(**dict(zip(_ENTRY, row, strict=True)))) for row in rows)


_Record = TypeVar("_Record", ExecutedCalls, FlightEntry, Span, Tally, RankRecord, FlightRecord)


def _checked(record: _Record) -> _Record:
    """Return a record if its values are of the types that they should have. TypeError: they are not."""
    for name, types in _TYPES[type(record)].items():
        if not isinstance(getattr(record, name), types):
            raise TypeError(f"{name} is {getattr(record, name)!r:.100}")
    return record


def _types_of(cls: type) -> dict[str, tuple[type, ...]]:
    """Return the types that each attribute may have; a whole number is a number of seconds, too."""
    found = {}
    for name, hint in get_type_hints(cls).items():
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        types = [str if get_origin(each) is Literal else get_origin(each) or each for each in options]
        found[name] = (*types, int) if float in types else tuple(types)
    return found


_TYPES = {cls: _types_of(cls) for cls in (ExecutedCalls, FlightEntry, Span, Tally, RankRecord, FlightRecord)}


def merge_records(own: FlightRecord, host: int, answers: Mapping[int, Answer], hosts: Hosts) -> FlightRecord:
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
            told = (rank for rank in answer.record.ranks if rank.rank in members)
            ranks.update({rank.rank: _shifted(rank, answer.offset) for rank in told})
            records.append(HostRecord(hosts.names[other], members, True, answer.offset, answer.error))
        else:
            records.append(HostRecord(hosts.names[other], members, other == host))
    all_ranks = (ranks.get(rank) or _unknown(rank, hosts.size) for rank in range(hosts.size))
    return replace(own, size=hosts.size, ranks=tuple(all_ranks), hosts=tuple(records))


def on_this_clock(answer: Answer, host: str, members: Sequence[int]) -> FlightRecord:
    """Return the record of another host alone, by the clock of the host that asked."""
    ranks = tuple(_shifted(rank, answer.offset) for rank in answer.record.ranks if rank.rank in members)
    where = HostRecord(host, tuple(members), True, answer.offset, answer.error)
    return replace(answer.record, ranks=ranks, hosts=(where,), taken=answer.record.taken + answer.offset)


def _shifted(rank: RankRecord, offset_s: float) -> RankRecord:
    since = rank.waiting_since
    return replace(
        rank,
        operations=tuple(_later(entry, offset_s) for entry in rank.operations),
        messages=tuple(_later(entry, offset_s) for entry in rank.messages),
        waiting_since=None if since is None else since + offset_s,
        spans=tuple(
            replace(span, started=span.started + offset_s, ended=span.ended + offset_s) for span in rank.spans
        ),
    )


def _later(entry: FlightEntry, offset_s: float) -> FlightEntry:
    ended = None if entry.ended is None else entry.ended + offset_s
    return replace(entry, started=entry.started + offset_s, ended=ended)


def _unknown(rank: int, size: int) -> RankRecord:
    return RankRecord(rank, 0, "unknown", (), (), 0, 0, 0, 0, 0.0, 0.0, (0.0,) * size, None, None)
