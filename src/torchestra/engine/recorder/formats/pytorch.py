"""Flight records in the format of PyTorch's flight recorder, for ``torch.distributed.flight_recorder``.

One file for each rank, ``rank_N``, as ``TORCH_FR_BUFFER_SIZE`` and its companions have NCCL's groups write
them. Its analyser (``python -m torch.distributed.flight_recorder.fr_trace DIR``) compares the ranks'
collectives one by one, and names the rank that is missing or called another.

What it asks for, and how it is met:

- Ranks are numbered through all groups, so the largest group is taken for the world, and the ranks of the
  others are found in it by their processes. A group whose ranks cannot be told apart so (they are threads of
  one process) gets a directory of its own, with its own numbers.
- Records begin at the same operation on all ranks: what only some still have is left out.
- Messages belong to groups of two, as NCCL's do, in the order in which the two exchange them. Once a rank has
  forgotten its first messages the order is not known, and its messages are left out.
- It knows no scan and exscan, which are left out, and only backends of its own list: the name is Gloo's.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchestra.engine.recorder.formats.rows import Row, Table, TracedGroup
from torchestra.engine.recorder.trace import replacing

_VERSION = "2.10"
"""That of the format which this writes."""
_STATES = {"done": "completed", "running": "started", "failed": "started"}
_NAMES = {"sparse_all_reduce": "all_reduce"}
_UNEVEN = {
    "all_gather": "all_gather_v",
    "reduce_scatter": "reduce_scatter_v",
    "all_to_all": "all_to_all_v_single",
}
_UNKNOWN = ("scan", "exscan")
_WHOLE_OUTPUT, _WHOLE_INPUT = ("all_gather", "gather"), ("reduce_scatter", "scatter")
_Dump = dict[str, Any]


def write_pickles(directory: Path, table: Table) -> int:
    """Write what the analyser reads; return the number of files."""
    return _write(directory, table, lambda path, dump: _write_bytes(path, pickle.dumps(dump)))


def write_jsons(directory: Path, table: Table) -> int:
    """Write the same as ``rank_N.json``; return the number of files."""

    def write(path: Path, dump: _Dump) -> None:
        with replacing(path.with_suffix(".json")) as file:
            json.dump(dump, file, indent=1)

    return _write(directory, table, write)


def _write_bytes(path: Path, content: bytes) -> None:
    with replacing(path, binary=True) as file:
        file.write(content)


def _write(directory: Path, table: Table, write: Callable[[Path, _Dump], None]) -> int:
    files = 0
    for folder, dumps in dumps_of_worlds(table):
        subdirectory = directory / folder
        subdirectory.mkdir(parents=True, exist_ok=True)
        for rank, dump in dumps.items():
            write(subdirectory / f"rank_{rank}", dump)
        files += len(dumps)
    return files


def dumps_of_worlds(table: Table) -> Iterator[tuple[str, dict[int, _Dump]]]:
    """Return, by the directory they go to, the dumps of groups that are numbered together."""
    groups = sorted(table.groups, key=lambda group: -group.size)
    while groups:
        world = groups[0]
        found = [(group, _numbers(group, world)) for group in groups]
        numbered = [(group, numbers) for group, numbers in found if numbers is not None]
        folder = "" if len(numbered) == len(table.groups) else f"{quote(world.name, safe='')}-{world.number}"
        yield folder, _dumps(table, world, numbered)
        groups = [group for group, numbers in found if numbers is None]


def _numbers(group: TracedGroup, world: TracedGroup) -> list[int] | None:
    """Return the ranks of a group in the world's numbering, None if they cannot be found there."""
    if group is world:
        return list(range(world.size))
    ranks_by_process = {(world.hosts[rank], pid): rank for rank, pid in world.pids.items()}
    found = [ranks_by_process.get((group.hosts[rank], group.pids[rank])) for rank in sorted(group.pids)]
    known = [rank for rank in found if rank is not None]
    distinct = len(ranks_by_process) == len(world.pids) and len(set(known)) == group.size
    return known if distinct and known == sorted(known) else None


def _dumps(
    table: Table, world: TracedGroup, numbered: Sequence[tuple[TracedGroup, list[int]]]
) -> dict[int, _Dump]:
    entries: dict[int, list[_Dump]] = {rank: [] for rank in range(world.size)}
    config: dict[int, _Dump] = {rank: {} for rank in range(world.size)}
    for group, numbers in numbered:
        rows = [row for row in table.rows if row.group == group.number]
        for members, name, each in (
            (range(group.size), f"{group.number}", _collectives(group, rows)),
            *_pairs(group, rows),
        ):
            ranks = [numbers[member] for member in members]
            said = {"name": name, "desc": group.name, "ranks": str(ranks)}
            for rank in ranks:
                config[rank][name] = said
            for number, row in each:
                entries[numbers[row.rank]].append(_entry(name, group, row, number, table.epoch_us))
    for own in entries.values():
        own.sort(key=lambda entry: entry["time_created_ns"])
        for number, entry in enumerate(own):
            entry.update(record_id=number, op_id=number)
    return {
        rank: {"version": _VERSION, "pg_config": config[rank], "pg_status": {}, "entries": own}
        for rank, own in entries.items()
    }


def _collectives(group: TracedGroup, rows: Sequence[Row]) -> list[tuple[int, Row]]:
    """Return the collectives that all ranks still have, with their numbers, and those that came after."""
    known = [row for row in rows if not row.is_message]
    first = {rank: min((row.number for row in known if row.rank == rank), default=0) for rank in group.pids}
    begin = max(first.values(), default=0)
    return [(row.number, row) for row in known if row.number >= begin and row.kind not in _UNKNOWN]


def _pairs(
    group: TracedGroup, rows: Sequence[Row]
) -> Iterator[tuple[tuple[int, int], str, list[tuple[int, Row]]]]:
    """Return the messages of each pair of ranks, those of one direction and tag by their order."""
    messages = [row for row in rows if row.is_message and row.peer not in (None, row.rank)]
    kept = {rank: min((row.number for row in messages if row.rank == rank), default=1) for rank in group.pids}
    pairs = sorted({(min(row.rank, row.peer or 0), max(row.rank, row.peer or 0)) for row in messages})
    for low, high in pairs:
        if kept[low] > 1 or kept[high] > 1:
            continue
        own = [row for row in messages if {row.rank, row.peer} == {low, high}]
        yield (low, high), f"{group.number}:{low}-{high}", _in_order(own)


def _in_order(messages: Sequence[Row]) -> list[tuple[int, Row]]:
    """Return the messages of a pair, both ends of each under one number."""
    counts: dict[tuple[Any, ...], int] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    numbered = []
    for row in sorted(messages, key=lambda row: (row.rank, row.number)):
        way = (row.rank, row.peer) if row.kind == "send" else (row.peer, row.rank)
        end = (*way, row.tag, row.kind)
        counts[end] = counts.get(end, 0) + 1
        number = numbers.setdefault((*way, row.tag, counts[end]), len(numbers) + 1)
        numbered.append((number, row))
    return numbered


def _entry(name: str, group: TracedGroup, row: Row, number: int, epoch_us: float) -> _Dump:
    created = round((epoch_us + row.started_us) * 1e3)
    ended = None if row.state == "running" else created + round(row.duration_us * 1e3)
    inputs, outputs = _sizes(group, row)
    dtypes = [] if row.dtype is None else [row.dtype]
    return {
        "pg_id": row.group,
        "process_group": (name, group.name),
        "collective_seq_id": number,
        "p2p_seq_id": number if row.is_message else 0,
        "is_p2p": False,  # true only of what is part of a coalesced operation, which the analyser takes apart
        "profiling_name": f"gloo:{_name(row)}",
        "time_created_ns": created,
        "time_discovered_started_ns": created,
        "time_discovered_completed_ns": ended,
        "duration_ms": None if ended is None else row.duration_us / 1e3,
        "input_sizes": inputs,
        "input_dtypes": dtypes,
        "output_sizes": outputs,
        "output_dtypes": dtypes,
        "state": _STATES[row.state],
        "retired": row.state != "running",
        "timeout_ms": 0,
        "frames": [],
    }


def _name(row: Row) -> str:
    if row.is_message:
        low = min(row.rank, row.peer or 0)
        here, there = int(row.rank != low), int(row.rank == low)  # in the group of the two
        return f"send {here}->{there}" if row.kind == "send" else f"recv {here}<-{there}"
    if row.count is None and row.kind in _UNEVEN:
        return _UNEVEN[row.kind]
    return _NAMES.get(row.kind, row.kind)


def _sizes(group: TracedGroup, row: Row) -> tuple[list[list[int]], list[list[int]]]:
    """Return the sizes of what goes in and what comes out; nothing is known of the tensors' shapes."""
    if row.is_message:
        return [[row.nbytes]], [[row.nbytes]]
    if row.count is None:
        return [[]], [[]]
    whole = [[row.count * group.size]]
    own = [[row.count]]
    return whole if row.kind in _WHOLE_INPUT else own, whole if row.kind in _WHOLE_OUTPUT else own
