"""Flight records as execution traces in Chakra's format, which simulators such as ASTRA-sim replay.

One file for each rank, ``chakra.N.et``: messages of protobuf, each after its length, the first of them about
the whole trace. A node is an operation, or ``compute``, what the rank did between two of them, and depends
on what came before: by ``data_deps``, since Chakra's own feeder looks at no other dependencies. The format is
schema/protobuf/et_def.proto of https://github.com/mlcommons/chakra: the parts that are written are declared
here, by the numbers that their fields have there.

The largest group is ``0``, by which ASTRA-sim means all ranks. The ranks of the others are in
``comm_groups.json``, which it reads as ``--comm-group-configuration``.

Scans are left out, which Chakra does not know, and operations that have not ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torchestra.engine.recorder.formats.rows import Row, Table, rows_by_rank
from torchestra.engine.recorder.trace import replacing
from torchestra.errors import DistError

_VERSION = "0.0.4"
_COMPUTE, _SEND, _RECEIVE, _COLLECTIVE = 4, 5, 6, 7  # types of nodes
_COLLECTIVES = {
    "all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5, "all_to_all": 6,
    "reduce_scatter": 7, "barrier": 9, "sparse_all_reduce": 0,
}  # fmt: skip
_STRING, _BOOL, _INT32, _INT64, _UINT64, _MESSAGE = 9, 8, 5, 3, 4, 11  # types of fields, as protobuf counts
_ONE, _MANY = 1, 3
_ATTRIBUTE = {
    "name": (1, _STRING, _ONE),
    "int32_val": (7, _INT32, _ONE),
    "int64_val": (9, _INT64, _ONE),
    "bool_val": (27, _BOOL, _ONE),
    "string_val": (29, _STRING, _ONE),
}
_METADATA = {"version": (1, _STRING, _ONE), "attr": (2, _MESSAGE, _MANY)}
_NODE = {
    "id": (1, _UINT64, _ONE),
    "name": (2, _STRING, _ONE),
    "type": (3, _INT32, _ONE),  # an enum there, which is the same in a file
    "data_deps": (5, _UINT64, _MANY),
    "start_time_micros": (6, _UINT64, _ONE),
    "duration_micros": (7, _UINT64, _ONE),
    "attr": (10, _MESSAGE, _MANY),
}
_VALUES = ("int32_val", "int64_val", "bool_val", "string_val")


class Messages(NamedTuple):
    """The classes of protobuf's messages."""

    attribute: Any
    metadata: Any
    node: Any


def write_chakra(directory: Path, table: Table) -> int:
    """Write a file for each rank of the largest group; return the number of files.

    Of other groups the operations of processes that are ranks of the largest are in it, too.

    Raises:
        DistError: protobuf is not installed.
    """
    messages = chakra_messages()
    directory.mkdir(parents=True, exist_ok=True)
    world, by_rank = rows_by_rank(table)
    if world is None:
        return 0
    ranks = {pid: rank for rank, pid in world.pids.items()}
    members = {
        group.number: {member: ranks.get(pid, member) for member, pid in group.pids.items()}
        if group is not world
        else {rank: rank for rank in world.pids}
        for group in table.groups
    }
    names = {number: "0" if number == world.number else str(number) for number in members}
    for rank, rows in by_rank.items():
        with replacing(directory / f"chakra.{rank}.et", binary=True) as file:
            for message in (messages.metadata(version=_VERSION), *_nodes(messages, rows, members, names)):
                content = message.SerializeToString()
                file.write(_varint(len(content)) + content)
    used = {row.group for rows in by_rank.values() for row in rows} - {world.number}
    others = {names[number]: sorted(members[number].values()) for number in sorted(used)}
    if others:
        with replacing(directory / "comm_groups.json") as file:
            json.dump(others, file)
    return len(by_rank) + bool(others)


@cache
def chakra_messages() -> Messages:
    """Return the messages of a trace.

    Raises:
        DistError: protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise DistError(
            "Chakra's traces are written by protobuf, which is not installed: pip install"
            " 'torchestra[chakra]'"
        ) from error
    package = "ChakraProtoMsg"
    file = descriptor_pb2.FileDescriptorProto(
        name="torchestra_chakra.proto", package=package, syntax="proto3"
    )
    names = {"AttributeProto": _ATTRIBUTE, "GlobalMetadata": _METADATA, "Node": _NODE}
    for name, fields in names.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, label) in fields.items():
            added = message.field.add(name=field, number=number, type=kind, label=label)
            if kind == _MESSAGE:
                added.type_name = f".{package}.AttributeProto"
            elif field in _VALUES:
                added.oneof_index = 0
        if fields is _ATTRIBUTE:
            message.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{package}.{name}") for name in names)
    return Messages(*map(message_factory.GetMessageClass, found))


def _nodes(
    messages: Messages,
    rows: Sequence[Row],
    members: Mapping[int, Mapping[int, int]],
    names: Mapping[int, str],
) -> Iterator[Any]:
    """Return a rank's nodes. What blocks comes after what blocked before; the rest runs beside it."""
    number, before = 0, list[int]()
    ended: float | None = None
    for row in rows:
        if row.state != "done" or not (row.is_message or row.kind in _COLLECTIVES):
            continue
        if ended is not None and row.started_us > ended:
            times = {"start_time_micros": round(ended), "duration_micros": round(row.started_us - ended)}
            attributes = _attributes(messages, is_cpu_op=True)
            yield messages.node(id=number, name="compute", type=_COMPUTE, data_deps=before, attr=attributes,
                                **times)  # fmt: skip
            number, before = number + 1, [number]
        yield messages.node(
            id=number,
            name=f"{row.kind} {row.number}",
            type=_type_of(row),
            data_deps=before,
            start_time_micros=round(row.started_us),
            duration_micros=round(row.duration_us),
            attr=_attributes(messages, **_of_operation(row, members[row.group], names[row.group])),
        )
        if row.blocking:
            before, ended = [number], max(ended or 0.0, row.started_us + row.duration_us)
        number += 1


def _type_of(row: Row) -> int:
    return {"send": _SEND, "recv": _RECEIVE}.get(row.kind, _COLLECTIVE)


def _of_operation(row: Row, members: Mapping[int, int], group: str) -> dict[str, Any]:
    """Return the attributes of an operation, named as Chakra's reader has them; ranks are the world's."""
    told: dict[str, Any] = {"is_cpu_op": False, "comm_size": row.nbytes, "pg_name": group}
    if not row.is_message:
        return {**told, "comm_type": _COLLECTIVES[row.kind]}
    own, peer = members.get(row.rank, row.rank), members.get(row.peer or 0, row.peer or 0)
    source, target = (own, peer) if row.kind == "send" else (peer, own)
    return {**told, "comm_src": source, "comm_dst": target, "comm_tag": row.tag or 0}


def _attributes(messages: Messages, **values: Any) -> list[Any]:
    attributes = []
    for name, value in values.items():
        if isinstance(value, bool):
            field = "bool_val"
        elif isinstance(value, str):
            field = "string_val"
        else:
            field = "int32_val" if name in ("comm_src", "comm_dst", "comm_tag") else "int64_val"
        attributes.append(messages.attribute(name=name, **{field: value}))
    return attributes


def _varint(number: int) -> bytes:
    """Return a number as protobuf writes it: seven bits in each byte, the lowest first."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
