"""A flight record in the formats of other tools, read by these tools' own code where they are at hand."""

from __future__ import annotations

import argparse
import csv
import gc
import inspect
import itertools
import json
import re
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars
import pytest
import torch
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.loader import read_dir
from torch.distributed.flight_recorder.components.types import Database, Op

import torchestra as dist
from torchestra.engine.recorder.formats.chakra import chakra_messages
from torchestra.engine.recorder.formats.writing import write
from torchestra.engine.recorder.trace import trace_of
from torchestra.errors import CollectiveMismatchError, DistError, InvalidArgumentError
from worlds import run

analysed = pytest.mark.skipif(
    "gloo" not in inspect.getsource(Op.__init__),
    reason="torch's analyser knows NCCL's operations only (torch 2.10)",
)
DIRECTORIES = ("pytorch", "pytorch-json", "kineto")


def judged(directory: Path) -> Database:
    """What torch's own analyser makes of a directory."""
    options = argparse.Namespace(trace_dir=str(directory), prefix=None, verbose=False, mismatch_cap=10)
    options.just_print_entries = options.allow_incomplete_ranks = False
    try:
        details, version = read_dir(options)
    finally:
        gc.enable()  # which it turns off for good
    return build_db(details, options, version)


def one_of_each() -> tuple[dist.FlightRecord, dist.FlightRecord | None]:
    rank, size = dist.get_rank(), dist.get_world_size()
    sub = dist.new_group([0, 2])
    dist.all_reduce(torch.ones(5))
    dist.broadcast(torch.ones(6), 1)
    dist.reduce(torch.ones(6), 2)
    dist.all_gather_into_tensor(torch.empty(4 * size), torch.ones(4))
    dist.all_gather([torch.empty(each + 1) for each in range(size)], torch.ones(rank + 1))
    dist.reduce_scatter_tensor(torch.empty(3), torch.ones(3 * size))
    dist.all_to_all_single(torch.empty(size), torch.ones(size))
    dist.gather(torch.ones(6), list(torch.empty(size, 6)) if rank == 0 else None, 0)
    dist.scatter(torch.ones(7), [torch.ones(7)] * size if rank == 1 else None, 1)
    dist.scan(torch.ones(2))  # which the analyser does not know
    for tag in (0, 3):
        if rank == 0:
            dist.send(torch.ones(5), 2, tag=tag)
        if rank == 2:
            dist.recv(torch.ones(5), 0, tag=tag)
    if rank != 1:
        dist.all_reduce(torch.ones(3), group=sub)
    dist.barrier()
    return dist.flight_record(), dist.flight_record(sub) if rank == 0 else None


@pytest.fixture(scope="module")
def records() -> list[dist.FlightRecord]:
    """Of two groups of three processes, without the last barrier, which may still run on some."""
    whole, sub = run("processes", 3, one_of_each)[0]
    assert sub is not None
    ended = [
        replace(rank, operations=tuple(entry for entry in rank.operations if entry.number < 12))
        for rank in whole.ranks
    ]
    return [replace(whole, ranks=tuple(ended)), sub]


def without(record: dist.FlightRecord, rank: int, number: int) -> dist.FlightRecord:
    """The record, had a rank never called what has this number, and the others waited in it."""
    changed = []
    for each in record.ranks:
        entries = [entry for entry in each.operations if entry.number < number + (each.rank != rank)]
        if each.rank != rank:
            entries[-1] = replace(entries[-1], state="running", ended=None)
        changed.append(replace(each, operations=tuple(entries)))
    return replace(record, ranks=tuple(changed))


@analysed
def test_torchs_analyser_matches_all_operations(records: list[dist.FlightRecord], tmp_path: Path) -> None:
    assert write(tmp_path, trace_of(records), "pytorch") == 3
    found = judged(tmp_path)
    assert all(each.pass_check and not each.missing_ranks for each in found.collectives)
    counted: dict[frozenset[int], list[str]] = {}
    for each in found.collectives:
        counted.setdefault(frozenset(each.expected_ranks), []).append(each.collective_name)
    assert counted[frozenset({0, 1, 2})] == [
        "gloo:barrier",
        "gloo:all_reduce",
        "gloo:broadcast",
        "gloo:reduce",
        "gloo:all_gather",
        "gloo:all_gather_v",
        "gloo:reduce_scatter",
        "gloo:all_to_all",
        "gloo:gather",
        "gloo:scatter",
    ]
    small = [name.partition(" ")[0] for name in counted[frozenset({0, 2})]]
    assert [name for name in small if name not in ("gloo:send", "gloo:recv")] == [
        "gloo:barrier",
        "gloo:all_reduce",
    ]
    assert len(small) == 4  # both messages, each under the name of the end that the analyser saw first
    assert len(found.ncclcalls) == 10 * 3 + 4 * 2


@analysed
def test_torchs_analyser_names_the_rank_that_is_missing(
    records: list[dist.FlightRecord], tmp_path: Path
) -> None:
    without(records[0], 1, 4).save(tmp_path, "pytorch")
    bad = [each for each in judged(tmp_path).collectives if each.missing_ranks]
    assert [(each.collective_seq_id, each.collective_name, each.missing_ranks) for each in bad] == [
        (4, "gloo:reduce", {1})
    ]


def differ() -> dist.FlightRecord | None:
    with pytest.raises(CollectiveMismatchError):
        dist.all_reduce(torch.ones(5 + (dist.get_rank() == 1)))
    dist.barrier()
    return dist.flight_record() if dist.get_rank() == 0 else None


@analysed
def test_torchs_analyser_names_the_rank_that_called_another_size(tmp_path: Path) -> None:
    record = run("threads", 3, differ)[0]
    assert record is not None
    record.save(tmp_path, "pytorch")
    # The barrier after it may have ended on some ranks only.
    wrong = [each for each in judged(tmp_path).collectives if each.collective_seq_id == 2]
    assert not any(each.pass_check for each in wrong)
    assert {rank for each in wrong for rank in each.mismatch_collectives or {}} == {1}


def test_groups_of_threads_have_a_directory_each(tmp_path: Path) -> None:
    """Their ranks cannot be told apart by their processes, so nobody may guess."""
    records = [record for record in run("threads", 3, one_of_each)[0] if record is not None]
    assert write(tmp_path, trace_of(records), "pytorch-json") == 5
    found = {path.parent.name: 0 for path in tmp_path.rglob("*.json")}
    assert len(found) == 2
    for path in tmp_path.rglob("*.json"):
        dump = json.loads(path.read_text())
        assert dump["entries"]
        assert dump["entries"] == sorted(dump["entries"], key=lambda entry: entry["record_id"])


def test_tables_have_a_row_for_each_operation(records: list[dist.FlightRecord], tmp_path: Path) -> None:
    record = records[0]
    record.save(tmp_path / "record.csv")
    record.save(tmp_path / "record.parquet")
    with open(tmp_path / "record.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [(rank.rank, entry) for rank in record.ranks for entry in (*rank.operations, *rank.messages)]
    assert len(rows) == len(expected)
    for rank, entry in expected:
        (row,) = (
            row
            for row in rows
            if (row["rank"], row["number"], row["kind"]) == (str(rank), str(entry.number), entry.kind)
        )
        assert row["nbytes"] == str(entry.nbytes)
        assert row["dtype"] == (entry.dtype or "")
        assert row["peer"] == ("" if entry.peer is None else str(entry.peer))
        assert entry.ended is not None
        assert float(row["duration_us"]) == pytest.approx((entry.ended - entry.started) * 1e6, abs=0.5)
    frame = polars.read_parquet(tmp_path / "record.parquet")
    assert frame.columns == list(rows[0])
    assert frame["nbytes"].sum() == sum(entry.nbytes for _, entry in expected)


def test_all_files_have_columns_of_the_same_types(records: list[dist.FlightRecord], tmp_path: Path) -> None:
    """Also those in which no operation has a root or a peer, or in which there is none."""
    empty = replace(
        records[0], ranks=tuple(replace(rank, operations=(), messages=()) for rank in records[0].ranks)
    )
    for name, record in (("all", records[0]), ("collectives", records[1]), ("empty", empty)):
        record.save(tmp_path / f"{name}.parquet")
    frames = [polars.read_parquet(path) for path in sorted(tmp_path.iterdir())]
    assert polars.concat(frames).height == sum(frame.height for frame in frames) > 0


def test_a_profile_of_each_rank(records: list[dist.FlightRecord], tmp_path: Path) -> None:
    """Each operation on a stream, and what lies between them on another; nothing on a stream overlaps."""
    assert write(tmp_path, trace_of(records), "kineto") == 3
    for rank in range(3):
        said = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert said["distributedInfo"] == {"backend": "gloo", "rank": rank, "world_size": 3}
        kernels = [event for event in said["traceEvents"] if event.get("cat") == "kernel"]
        streams: dict[int, list[dict[str, Any]]] = {}
        for event in kernels:
            streams.setdefault(event["args"]["stream"], []).append(event)
        own = sum(
            len(each.operations) + len(each.messages)
            for record in records
            for each in record.ranks
            if each.pid == records[0].ranks[rank].pid
        )
        assert len(streams[20]) == own
        assert {event["name"] for event in streams[7]} == {"compute"}
        for events in streams.values():
            for early, late in itertools.pairwise(events):
                assert early["ts"] + early["dur"] <= late["ts"] + 1e-3


def test_a_format_that_does_not_exist_or_cannot_be_written_is_told(
    records: list[dist.FlightRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgumentError, match="`format` must be one of trace, csv, parquet, pytorch"):
        records[0].save(tmp_path / "x", "xml")
    monkeypatch.setitem(__import__("sys").modules, "polars", None)
    with pytest.raises(DistError, match=r"polars.*pip install 'torchestra\[parquet\]'"):
        records[0].save(tmp_path / "x.parquet")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may have more than a kilobyte, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet"])
@pytest.mark.usefixtures("small_files")
def test_where_there_is_no_room_the_error_names_the_file_and_leaves_none(
    suffix: str, records: list[dist.FlightRecord], tmp_path: Path
) -> None:
    path = tmp_path / f"record.{suffix}"
    with pytest.raises(OSError, match=re.escape(f"File too large: '{path}'")):
        records[0].save(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_file_in_the_way_of_a_directory_is_told(
    name: str, records: list[dist.FlightRecord], tmp_path: Path
) -> None:
    (tmp_path / "there").touch()
    with pytest.raises(OSError, match="the record cannot be written"):
        records[0].save(tmp_path / "there", name)


def test_chakra_has_operations_and_compute_between_them(
    records: list[dist.FlightRecord], tmp_path: Path
) -> None:
    pytest.importorskip("google.protobuf", reason="protobuf writes Chakra's traces")
    assert write(tmp_path, trace_of(records), "chakra") == 4
    assert json.loads((tmp_path / "comm_groups.json").read_text()) == {"2": [0, 2]}
    for rank in range(3):
        metadata, *nodes = delimited((tmp_path / f"chakra.{rank}.et").read_bytes())
        assert chakra_messages().metadata.FromString(metadata).version
        read = [chakra_messages().node.FromString(node) for node in nodes]
        assert [node.id for node in read] == list(range(len(read)))
        # Chakra's feeder issues a node once its data_deps are done: one after the other, as the rank did.
        assert [list(node.data_deps) for node in read] == [[], *([node.id] for node in read[:-1])]
        assert any((node.name, node.type) == ("compute", 4) and node.duration_micros > 0 for node in read)
        told = {
            node.name.partition(" ")[0]: {
                each.name: getattr(each, each.WhichOneof("value")) for each in node.attr
            }
            for node in read
        }
        assert told["all_gather"]["comm_type"] == 2
        assert told["broadcast"] == {"is_cpu_op": False, "comm_size": 24, "pg_name": "0", "comm_type": 5}
        groups = {each.string_val for node in read for each in node.attr if each.name == "pg_name"}
        assert groups == ({"0"} if rank == 1 else {"0", "2"})  # ASTRA-sim's name for all ranks is 0
        assert "scan" not in told
        message = {0: "send", 2: "recv"}.get(rank)
        if message is not None:
            assert [told[message][name] for name in ("comm_src", "comm_dst", "comm_tag")] == [0, 2, 3]


def test_chakra_writes_the_bytes_of_its_schema(tmp_path: Path) -> None:
    """By hand: field numbers and types of Node, of which a file has the lengths before each."""
    pytest.importorskip("google.protobuf", reason="protobuf writes Chakra's traces")
    node = chakra_messages().node(id=300, name="x", type=7, data_deps=[1, 2], duration_micros=5)
    assert node.SerializeToString() == b"\x08\xac\x02\x12\x01x\x18\x07\x2a\x02\x01\x02\x38\x05"
    attribute = chakra_messages().attribute(name="n", bool_val=False)
    assert attribute.SerializeToString() == b"\x0a\x01n\xd8\x01\x00"  # a value of a oneof is always there


CHAKRA_SCHEMA = {
    "AttributeProto": {"name": 1, "int32_val": 7, "int64_val": 9, "bool_val": 27, "string_val": 29},
    "GlobalMetadata": {"version": 1, "attr": 2},
    "Node": {"id": 1, "name": 2, "type": 3, "data_deps": 5, "start_time_micros": 6, "duration_micros": 7,
             "attr": 10},
}  # fmt: skip
"""Of Chakra's et_def.proto (of 2026), the numbers of the fields that are written."""
CHAKRA_TYPES = {
    "int32_val": "INT32", "int64_val": "INT64", "bool_val": "BOOL", "id": "UINT64", "data_deps": "UINT64",
    "start_time_micros": "UINT64", "duration_micros": "UINT64", "attr": "MESSAGE",
    "type": "INT32",  # an enum there, which is the same in a file
}  # fmt: skip
"""Their types; of all others STRING."""
CHAKRA_NODES = {"COMP": 4, "COMM_SEND": 5, "COMM_RECV": 6, "COMM_COLL": 7}
CHAKRA_COLLECTIVES = ("ALL_REDUCE", "REDUCE", "ALL_GATHER", "GATHER", "SCATTER", "BROADCAST", "ALL_TO_ALL",
                      "REDUCE_SCATTER", "REDUCE_SCATTER_BLOCK", "BARRIER")  # fmt: skip


def test_what_is_declared_of_chakra_is_its_schema(records: list[dist.FlightRecord], tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf", reason="protobuf writes Chakra's traces")
    from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

    messages = chakra_messages()
    for message in messages:
        declared = DescriptorProto()
        message.DESCRIPTOR.CopyToProto(declared)
        assert {field.name: field.number for field in declared.field} == CHAKRA_SCHEMA[declared.name]
        for field in declared.field:
            told = FieldDescriptorProto.Type.Name(field.type)
            assert told == f"TYPE_{CHAKRA_TYPES.get(field.name, 'STRING')}", field.name
            repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
            assert repeated == (field.name in ("data_deps", "attr")), field.name
    records[0].save(tmp_path, "chakra")
    for node in map(messages.node.FromString, delimited((tmp_path / "chakra.0.et").read_bytes())[1:]):
        kind = node.name.partition(" ")[0]
        called = {"compute": "COMP", "send": "COMM_SEND", "recv": "COMM_RECV"}.get(kind, "COMM_COLL")
        assert node.type == CHAKRA_NODES[called]
        told_types = [each.int64_val for each in node.attr if each.name == "comm_type"]
        expected = [CHAKRA_COLLECTIVES.index(kind.upper())] if called == "COMM_COLL" else []
        assert told_types == expected, kind


def delimited(content: bytes) -> list[bytes]:
    """The messages of a file, each of which has its length before it."""
    messages = []
    while content:
        length, used = 0, 0
        while True:
            length |= (content[used] & 0x7F) << (7 * used)
            used += 1
            if content[used - 1] < 0x80:
                break
        messages.append(content[used : used + length])
        content = content[used + length :]
    return messages
