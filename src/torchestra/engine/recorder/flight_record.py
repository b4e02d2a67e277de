"""The flight record for readers: the rings in an arena (recorder.py), decoded.

This only reads, never trusts what it reads, and needs no torch: an arena is read by its ranks and, mapped
read-only, by ``torchestra top`` and ``torchestra report``.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchestra.arguments.annotations import checked
from torchestra.engine import layout as at
from torchestra.engine import operations
from torchestra.engine.recorder import recorder
from torchestra.engine.recorder.clock import COUNTER, NANOSECONDS, Moment, TickScale
from torchestra.engine.recorder.flight_entries import (
    SPAN_KINDS,
    ExecutedCalls,
    FlightEntry,
    HostRecord,
    Presence,
    RankRecord,
    Span,
    State,
    Tally,
)
from torchestra.engine.recorder.formats.writing import FORMATS, write
from torchestra.engine.recorder.trace import trace_of
from torchestra.errors import InvalidArgumentError, shown

_MAX_RANKS = 1 << 20  # of a group; an arena that says more is damaged
_OTHER = at.TALLIED_KINDS - 1  # kinds from here on are counted together
_PRESENCE: dict[int, Presence] = {at.PRESENT: "present", at.LEFT: "left"}
# Kernels have no annotations: they take words, here addresses.
_read_ring: Any = recorder.read_ring
_read_wait: Any = recorder.read_wait


class Readable(Protocol):
    """An arena, mapped here."""

    layout: at.Layout
    address: int

    def load_word(self, offset: int) -> int:
        """Return the word at a byte offset before the slots."""

    def text(self, offset: int, length: int) -> str:
        """Return ``length`` bytes as text."""


@dataclass(frozen=True)
class FlightRecord:
    """The last collectives and messages of all ranks of a group.

    Where the group has several hosts, it covers all of them: see ``hosts``.

    Attributes:
        group: its name.
        size: how many ranks it has.
        taken: when this was read, by ``time.monotonic()``, as all times in it.
        taken_at: the same moment by ``time.time()``.
        aborted: why the group cannot be used any more, or None.
        ranks: by rank.
        hosts: those that the group has, if it has several.
    """

    group: str
    size: int
    taken: float
    taken_at: float
    aborted: str | None
    ranks: tuple[RankRecord, ...]
    hosts: tuple[HostRecord, ...] = ()

    @checked
    def save(self, path: str | os.PathLike[str], format: str | None = None) -> None:  # noqa: A002
        """Write this into a file, or a directory with a file for each rank.

        Args:
            path: of the file or directory, which is made if there is none.
            format: ``"trace"``, Chrome's trace event format, for https://ui.perfetto.dev; ``"csv"`` or
                ``"parquet"``, a table with a row for each operation; or for a directory ``"pytorch"``, what
                torch.distributed.flight_recorder's analyser reads, ``"pytorch-json"``, ``"kineto"``,
                torch.profiler's format, or ``"chakra"``, execution traces. Default: a table if ``path`` ends
                so, or else ``"trace"``.

        Raises:
            OSError: the file cannot be written; as raised by open() for this path.
            InvalidArgumentError: no file can have that name, or there is no such format.
            DistError: ``"parquet"`` without polars, or ``"chakra"`` without protobuf, which write it.
        """
        if format not in (None, "trace", *FORMATS):
            raise InvalidArgumentError(
                f"FlightRecord.save: `format` must be one of {', '.join(['trace', *FORMATS])}, got"
                f" {shown(format)}"
            )
        try:
            write(Path(path), trace_of([self]), format)
        except OSError as error:
            why = f"FlightRecord.save: the record cannot be written: {error.strerror}"
            raise OSError(error.errno, why, os.fspath(path)) from error
        except ValueError as error:  # a NUL, or what UTF-8 cannot hold
            raise InvalidArgumentError(
                f"FlightRecord.save: `path` must be the name of a file, got {shown(path)}"
            ) from error


def read_flight_record(arena: Readable, last: int = at.ENTRIES) -> FlightRecord:
    """Return the current record of all ranks; of each at most the ``last`` entries of either kind."""
    scale = tick_scale(arena)
    group_ranks, size = _numbering(arena)
    host = _host_name(arena)
    return FlightRecord(
        group=group_name(arena),
        size=size,
        taken=scale.now,
        taken_at=time.time(),
        aborted=_why_aborted(arena),
        ranks=tuple(read_rank(arena, local_rank, scale, last) for local_rank in range(arena.layout.size)),
        hosts=(HostRecord(host, tuple(group_ranks)),) if host is not None else (),
    )


def _numbering(arena: Readable) -> tuple[Sequence[int], int]:
    """Return, by local rank, the rank in the group; and the size of the group."""
    size = arena.layout.size
    whole = arena.load_word(at.HEADER_GROUP_SIZE)
    if not size <= whole <= _MAX_RANKS:
        return range(size), size
    blocks = [arena.layout.control + local_rank * at.CONTROL_BYTES for local_rank in range(size)]
    return [min(max(0, arena.load_word(block + at.GROUP_RANK)), whole - 1) for block in blocks], whole


def _host_name(arena: Readable) -> str | None:
    """Return this host's name in the group, if that has several."""
    if not arena.layout.size <= arena.load_word(at.HEADER_GROUP_SIZE) <= _MAX_RANKS:
        return None
    length = arena.load_word(at.HEADER_HOST_LENGTH)
    return arena.text(at.HEADER_HOST, min(max(0, length), at.HEADER_HOST_BYTES))


def group_name(arena: Readable) -> str:
    """Return the name of the group that meets in the arena."""
    length = arena.load_word(at.HEADER_NAME_LENGTH)
    return arena.text(at.HEADER_NAME, min(max(0, length), at.HEADER_NAME_BYTES))


def is_being_left(arena: Readable) -> bool:
    """Return whether a rank has left the group, as all do that destroy it."""
    return any(_presence(arena, rank) == "left" for rank in range(arena.layout.size))


def _presence(arena: Readable, rank: int) -> Presence:
    state = arena.load_word(arena.layout.control + rank * at.CONTROL_BYTES + at.STATE)
    return _PRESENCE.get(state, "absent")


def _why_aborted(arena: Readable) -> str | None:
    if arena.load_word(at.HEADER_ABORT) == 0:
        return None
    length = min(max(0, arena.load_word(at.HEADER_ABORT_LENGTH)), at.HEADER_ABORT_TEXT_BYTES)
    try:
        text = json.loads(arena.text(at.HEADER_ABORT_TEXT, length))
        return f"{text['why']}{text['report']}"
    except (ValueError, TypeError, KeyError):
        return "it was not said why"


def waits_for_other_hosts(arena: Readable, rank: int) -> bool:
    """Return whether a local rank has done its part on this host and waits for other hosts."""
    record = arena.layout.records + rank * arena.layout.record_bytes
    wait = _wait(arena, record)
    return wait is not None and wait[1] < 0


def _wait(arena: Readable, record: int) -> tuple[int, int] | None:
    """Return since when a rank waits, in ticks, and for which local rank; None if it does not wait."""
    words = np.zeros(2, dtype=np.int64)
    if not _read_wait(arena.address + record, words.ctypes.data):
        return None
    since, peer = words.tolist()
    return since, peer


def tick_scale(arena: Readable) -> TickScale:
    """Return the scale that turns the ticks in an arena into seconds, up to now."""
    clock = arena.load_word(at.HEADER_CLOCK)
    early = Moment(arena.load_word(at.HEADER_TICKS), arena.load_word(at.HEADER_NANOSECONDS))
    return TickScale(early, Moment.now(COUNTER if clock == COUNTER else NANOSECONDS))


def read_rank(arena: Readable, rank: int, scale: TickScale, last: int = at.ENTRIES) -> RankRecord:
    """Return the record of one local rank; at most the ``last`` entries of either kind."""
    control = arena.layout.control + rank * at.CONTROL_BYTES
    record = arena.layout.records + rank * arena.layout.record_bytes
    here = arena.layout.size
    group_ranks, size = _numbering(arena)
    crosses = _host_name(arena) is not None
    operations_ = _ring(arena, record + (at.MULTIHOST_AT if crosses else at.OPERATIONS_AT))
    messages = [(row, group_ranks) for row in _ring(arena, record + at.MESSAGES_AT)]
    if crosses:
        remote = _ring(arena, record + at.REMOTE_MESSAGES_AT)
        messages = sorted([*messages, *((row, range(size)) for row in remote)], key=_stamp)
    wait = _wait(arena, record)
    blamed = [0] * size
    for local_rank, group_rank in enumerate(group_ranks):
        words = (
            arena.load_word(record + at.WAITED_FOR_AT + index * 8)
            for index in (local_rank, here + local_rank)
        )
        blamed[group_rank] = sum(words)
    if crosses and operations_ and operations_[-1][at.ENDED // 8] == 0:
        waited = arena.load_word(record + at.TOTAL_WAITED) - arena.load_word(record + at.MULTIHOST_WAITED)
        operations_[-1][at.WAITED // 8] = max(0, waited)
    return RankRecord(
        rank=group_ranks[rank],
        pid=arena.load_word(control + at.PROCESS),
        presence=_presence(arena, rank),
        operations=tuple(_operation(row, scale, group_ranks) for row in operations_[-last:]),
        messages=tuple(_message(row, scale, ranks) for row, ranks in messages[-last:]),
        operations_begun=operations_[-1][at.STAMP // 8] if operations_ else 0,
        messages_begun=arena.load_word(record + at.MESSAGES_OPENED),
        operation_bytes=arena.load_word(record + (at.MULTIHOST_BYTES if crosses else at.TOTAL_BYTES)),
        message_bytes=arena.load_word(record + at.MESSAGES_BYTES)
        + arena.load_word(record + at.REMOTE_MESSAGES_BYTES),
        operations_waited=scale.duration(arena.load_word(record + at.TOTAL_WAITED)),
        messages_waited=scale.duration(
            arena.load_word(record + at.MESSAGES_WAITED) + arena.load_word(record + at.REMOTE_MESSAGES_WAITED)
        ),
        waited_for=tuple(map(scale.duration, blamed)),
        waiting_for=None if wait is None else _rank(wait[1], group_ranks),
        waiting_since=None if wait is None else scale.time(wait[0]),
        tallies=tuple(_tallies(arena, record, crosses, scale)),
        spans=tuple(_spans(_ring(arena, record + at.SPANS_AT)[-last:])),
        calls=tuple(_calls(arena, record + at.CALLS_AT)),
        queued=arena.load_word(record + at.QUEUED),
        calls_in_flight=arena.load_word(record + at.CALLS_IN_FLIGHT),
        references_owned=arena.load_word(record + at.REFERENCES_OWNED),
        references_used=arena.load_word(record + at.REFERENCES_USED),
        calls_made=arena.load_word(record + at.CALLS_MADE),
        calls_sent_bytes=arena.load_word(record + at.CALLS_SENT_BYTES),
    )


def _tallies(arena: Readable, record: int, crosses: bool, scale: TickScale) -> Iterator[Tally]:
    here, over_hosts = (_tally_table(arena, record + at_) for at_ in (at.TALLIES_AT, at.MULTIHOST_TALLIES_AT))
    bounds = (*at.SIZE_CLASS_BOUNDS, None)
    for code in range(at.TALLIED_KINDS):
        message = code & ~at.REMOTE_KINDS in (at.SENT, at.RECEIVED)
        remote = message and code >= at.REMOTE_KINDS
        kind = operations.kind_name(code - at.REMOTE_KINDS if remote else code)
        tallies = over_hosts[code] if crosses and not message else here[code]
        for bound, (calls, moved, ticks, waited) in zip(bounds, tallies.tolist(), strict=False):
            if calls:
                seconds = scale.duration(ticks), scale.duration(waited)
                yield Tally(kind if code < _OTHER else "other", bound, calls, moved, *seconds, remote)


def _tally_table(arena: Readable, offset: int) -> npt.NDArray[np.int64]:
    """Return a table of tallies: by kind and size class, its words."""
    words = ctypes.c_int64 * (at.TALLIED_KINDS * at.SIZE_CLASSES * at.TALLY_BYTES // 8)
    table = np.ctypeslib.as_array(words.from_address(arena.address + offset))
    return table.reshape(at.TALLIED_KINDS, at.SIZE_CLASSES, at.TALLY_BYTES // 8).copy()


def _ring(arena: Readable, offset: int) -> list[list[int]]:
    """Return the entries of a ring that are in use, oldest first, each as its words."""
    words: npt.NDArray[np.int64] = np.zeros((at.ENTRIES, at.ENTRY_BYTES // 8), dtype=np.int64)
    _read_ring(arena.address + offset, words.ctypes.data)
    used: list[list[int]] = words[words[:, at.STAMP // 8] > 0].tolist()
    return sorted(used)


def _stamp(message: tuple[list[int], Sequence[int]]) -> int:
    return message[0][at.STAMP // 8]


def _rank(local_rank: int, group_ranks: Sequence[int]) -> int | None:
    return group_ranks[local_rank] if 0 <= local_rank < len(group_ranks) else None


def _operation(row: list[int], scale: TickScale, group_ranks: Sequence[int]) -> FlightEntry:
    what, amount = row[at.WHAT // 8], row[at.AMOUNT // 8]
    return FlightEntry(
        number=row[at.STAMP // 8],
        kind=operations.kind_name(what),
        op=operations.op_name(what),
        dtype=operations.dtype_name(what),
        root=operations.root_of(what),
        count=amount if 0 <= amount < operations.UNEVEN else None,
        peer=None,
        tag=None,
        blocking=True,
        waited_for=_rank(row[at.AWAITED // 8] - 1, group_ranks),
        **_times(row, scale),
    )


def _message(row: list[int], scale: TickScale, group_ranks: Sequence[int]) -> FlightEntry:
    what = row[at.WHAT // 8]
    return FlightEntry(
        number=row[at.STAMP // 8],
        kind=operations.kind_name(what),
        op=None,
        dtype=operations.dtype_name(what),
        root=None,
        count=None,
        peer=_rank(row[at.OTHER // 8] - 1, group_ranks),
        tag=row[at.TAG // 8],
        blocking=not what & at.BACKGROUND,
        waited_for=None,
        **_times(row, scale),
    )


def _calls(arena: Readable, table: int) -> Iterator[ExecutedCalls]:
    """Return the calls of each caller and function once: names that are cut off can be the same."""
    found: dict[tuple[int, str], tuple[int, float]] = {}
    for entry in range(table, table + at.CALL_ENTRIES * at.CALL_BYTES, at.CALL_BYTES):
        if (count := arena.load_word(entry + at.CALL_COUNT)) > 0:
            length = min(max(0, arena.load_word(entry + at.CALL_NAME_LENGTH)), at.CALL_NAME_BYTES)
            seconds = arena.load_word(entry + at.CALL_NANOSECONDS) / 1e9
            name = arena.text(entry + at.CALL_NAME, length)
            called = arena.load_word(entry + at.CALL_CALLER), name
            before = found.get(called, (0, 0.0))
            found[called] = before[0] + count, before[1] + seconds
    for (caller, name), (count, seconds) in found.items():
        yield ExecutedCalls(caller, name, count, seconds)


def _spans(rows: list[list[int]]) -> Iterator[Span]:
    for row in rows:
        kind, ended = row[at.WHAT // 8], row[at.ENDED // 8]
        if ended > 0 and 0 <= kind < len(SPAN_KINDS):
            yield Span(
                kind=SPAN_KINDS[kind],
                step=row[at.AMOUNT // 8],
                index=row[at.OTHER // 8] - 1 if row[at.OTHER // 8] > 0 else None,
                nbytes=row[at.MOVED_BYTES // 8],
                started=row[at.BEGAN // 8] / 1e9,
                ended=ended / 1e9,
            )


def _times(row: list[int], scale: TickScale) -> dict[str, Any]:
    ended = row[at.ENDED // 8]
    state: State = "running" if ended == 0 else "done" if ended > 0 else "failed"
    return {
        "nbytes": row[at.MOVED_BYTES // 8],
        "started": scale.time(row[at.BEGAN // 8]),
        "ended": None if ended == 0 else scale.time(abs(ended)),
        "state": state,
        "waited": scale.duration(row[at.WAITED // 8]),
    }
