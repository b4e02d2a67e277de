"""``flight_record()``: what every rank did last, true in every field, readable by any rank at any time."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.engine.operations import DTYPE_BYTES
from torchestra.engine.recorder import clock
from torchestra.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    NotInitializedError,
    RankFailedError,
)
from worlds import KINDS, await_note, leave_note, outcomes, processes, run

SOON = 30.0


def operations(record: dist.FlightRecord, rank: int) -> list[dist.FlightEntry]:
    return list(record.ranks[rank].operations)


def one_of_each() -> tuple[dist.FlightRecord, float, float]:
    """Each collective once, on known sizes; the record, and the time before and after."""
    began = time.monotonic()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(3, 5), dist.ReduceOp.MAX)
    dist.reduce(torch.ones(4, dtype=torch.int64), 2)
    dist.broadcast(torch.ones(70_000, dtype=torch.float64), 1)
    dist.all_gather_into_tensor(torch.empty(10 * size), torch.ones(10))
    dist.all_gather([torch.empty(each + 1) for each in range(size)], torch.ones(rank + 1))
    dist.gather(torch.ones(6), list(torch.empty(size, 6)) if rank == 0 else None, 0)
    dist.scatter(torch.ones(7), [torch.ones(7)] * size if rank == 1 else None, 1)
    dist.reduce_scatter_tensor(torch.ones(8), torch.ones(8 * size))
    dist.all_to_all_single(torch.ones(2 * size, dtype=torch.int8), torch.ones(2 * size, dtype=torch.int8))
    dist.barrier()
    return dist.flight_record(), began, time.monotonic()


@pytest.mark.parametrize("kind", KINDS)
def test_every_collective_is_recorded_as_it_was_called(kind: str) -> None:
    results = run(kind, 3, one_of_each)
    began, ended = min(began for _, began, _ in results), max(ended for _, _, ended in results)
    for record, _, _ in results:
        assert (record.group, record.size, record.aborted) == ("default", 3, None)
        assert [each.rank for each in record.ranks] == [0, 1, 2]
        assert {each.presence for each in record.ranks} <= {"present", "left"}
        for rank in range(3):
            # Its last barrier may not be closed yet on a rank that is about to return from it.
            entries = operations(record, rank)[1:11]
            assert [entry.number for entry in entries] == list(range(2, 12))
            got = [(entry.kind, entry.op, entry.dtype, entry.root, entry.nbytes) for entry in entries]
            assert got == [
                ("all_reduce", "MAX", "float32", None, 60),
                ("reduce", "SUM", "int64", 2, 32),
                ("broadcast", None, "float64", 1, 560_000),
                ("all_gather", None, "float32", None, 120),
                ("all_gather", None, "float32", None, 24),
                ("gather", None, "float32", 0, 72 if rank == 0 else 24),
                ("scatter", None, "float32", 1, 84 if rank == 1 else 28),
                ("reduce_scatter", "SUM", "float32", None, 96),
                ("all_to_all", None, "int8", None, 6),
                ("barrier", None, None, None, 0),
            ]
            assert [entry.count for entry in entries[:4]] == [15, 4, 70_000, 10]
            assert entries[4].count is None
            for early, late in itertools.pairwise(entries):
                assert early.state == "done"
                assert early.ended is not None
                assert began - 0.1 < early.started <= early.ended <= late.started < ended + 0.1
                assert 0 <= early.waited <= early.ended - early.started + 1e-3
            total = sum(entry.nbytes for entry in entries)
            assert record.ranks[rank].operation_bytes == total
            assert record.ranks[rank].operations_begun >= 11
        assert abs(record.taken - ended) < SOON


def test_only_the_last_are_kept_and_all_are_counted() -> None:
    def body() -> dist.FlightRecord:
        for length in range(at.ENTRIES + 40):
            dist.all_reduce(torch.ones(length))
        return dist.flight_record()

    for record in run("threads", 2, body):
        ranks = record.ranks
        for rank in ranks:
            entries = [entry for entry in rank.operations if entry.state == "done"]
            assert at.ENTRIES - 1 <= len(entries) <= at.ENTRIES
            last = entries[-1].number
            assert [entry.number for entry in entries] == list(range(last - len(entries) + 1, last + 1))
            assert all(entry.count == entry.number - 2 for entry in entries)
            assert rank.operations_begun == last or rank.last_operation.state == "running"


def who_came_late(late: int) -> tuple[dist.FlightRecord, tuple[float, ...]]:
    """The record, and for how long this rank had waited for each rank before one was late."""
    dist.barrier()
    rank = dist.get_rank()
    before = dist.flight_record().ranks[rank].waited_for
    if rank == late:
        others = [other for other in range(3) if other != late]
        while not all(waits_for(late, other) for other in others):
            time.sleep(0.002)
        time.sleep(0.2)  # the subject, not a way to wait for somebody
    dist.all_reduce(torch.ones(1))
    record = dist.flight_record()
    dist.barrier()
    return record, before


def waits_for(peer: int, rank: int) -> bool:
    """Return whether a rank is in operation 3, and waits for a peer there."""
    found = dist.flight_record().ranks[rank]
    return found.operations[-1].number == 3 and found.waiting_for == peer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("late", [0, 1, 2])
def test_who_waited_for_whom_is_recorded(kind: str, late: int) -> None:
    """Also where another rank was waited for first: the one that came last is to blame."""
    for rank, (record, before) in enumerate(run(kind, 3, who_came_late, late)):
        entry = next(entry for entry in operations(record, rank) if entry.number == 3)
        waited = [seconds - then for seconds, then in zip(record.ranks[rank].waited_for, before, strict=True)]
        if rank == late:
            assert entry.waited < entry.ended - entry.started + 1e-3
        else:
            assert entry.waited_for == late
            assert 0.1 < entry.waited <= entry.ended - entry.started + 1e-3
            assert max(range(3), key=waited.__getitem__) == late
            assert record.ranks[rank].operations_waited >= entry.waited - 1e-3


def messages() -> list[dist.FlightEntry]:
    rank = dist.get_rank()
    if rank == 0:
        dist.send(torch.ones(3), 1, tag=7)
        dist.isend(torch.ones(100_000, dtype=torch.int64), 1).wait()
        source = torch.empty(2, dtype=torch.bool)
        dist.recv(source)
        dist.send(torch.ones(1), 0)
        dist.recv(torch.ones(1), 0)
    else:
        small, large = torch.empty(3), torch.empty(100_000, dtype=torch.int64)
        works = [dist.irecv(small, 0, tag=7), dist.irecv(large, 0)]
        for work in works:
            work.wait()
        dist.send(torch.ones(2, dtype=torch.bool), 0)
    dist.barrier()
    return list(dist.flight_record().ranks[rank].messages)


@pytest.mark.parametrize("kind", KINDS)
def test_messages_are_recorded_at_both_ends(kind: str) -> None:
    def told(entries: list[dist.FlightEntry]) -> list[tuple[object, ...]]:
        return [(e.kind, e.dtype, e.nbytes, e.peer, e.tag, e.blocking, e.state) for e in entries]

    zero, one = run(kind, 2, messages)
    assert told(zero) == [
        ("send", "float32", 12, 1, 7, True, "done"),
        ("send", "int64", 800_000, 1, 0, False, "done"),
        ("recv", "bool", 2, 1, 0, True, "done"),
        ("send", "float32", 4, 0, 0, True, "done"),
        ("recv", "float32", 4, 0, 0, True, "done"),
    ]
    assert told(one) == [
        ("recv", "float32", 12, 0, 7, False, "done"),
        ("recv", "int64", 800_000, 0, 0, False, "done"),
        ("send", "bool", 2, 0, 0, True, "done"),
    ]
    assert [entry.number for entry in zero] == [1, 2, 3, 4, 5]
    assert str(zero[0]) == "send(float32, to rank 1, 12 bytes, tag 7)"


def fail_in_several_ways() -> list[tuple[str, str]]:
    rank = dist.get_rank()
    with pytest.raises(CollectiveMismatchError):
        dist.all_reduce(torch.ones(1 + rank))
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError):
            dist.group.WORLD.communicator.recv(torch.ones(1), 1, tag=3, timeout_s=0.2)
        with pytest.raises(CollectiveTimeoutError):
            dist.group.WORLD.communicator.barrier(timeout_s=0.2)
        leave_note("over")
    else:
        await_note("over")
    record = dist.flight_record()
    assert record.aborted is not None
    assert "barrier() of group 'default' timed out" in record.aborted
    assert "rank 1 last called operation 2" in record.aborted
    zero = record.ranks[0]
    return [(entry.kind, entry.state) for entry in (*zero.operations[1:], *zero.messages)]


def test_what_failed_is_recorded_as_failed() -> None:
    for told in run("processes", 2, fail_in_several_ways):
        assert told == [("all_reduce", "failed"), ("barrier", "failed"), ("recv", "failed")]


def outlive() -> dist.FlightRecord | None:
    """Rank 1 is killed while it waits for rank 0; what it was in is still told."""
    dist.all_reduce(torch.ones(11))
    if dist.get_rank() == 1:
        dist.broadcast(torch.ones(12), 0)
        dist.barrier()
        return None
    deadline = time.monotonic() + SOON
    while not waits_for(0, 1):
        assert time.monotonic() < deadline
    leave_note("rank 1 waits")
    await_note("killed")
    dist.broadcast(torch.ones(12), 0)  # rank 1 had arrived
    with pytest.raises(RankFailedError):
        dist.barrier()
    return dist.flight_record()


def test_what_a_killed_rank_did_can_be_read_by_who_is_left() -> None:
    with processes(2, outlive) as world:
        world.await_file("rank 1 waits")
        world.signal(1, signal.SIGSTOP)
        world.signal(1, signal.SIGKILL)
        Path(world.path("killed")).touch()
        record = world.finish()[0].result()
    assert record.ranks[1].pid == world.pids[1]
    _, done, hung = operations(record, 1)
    assert (done.kind, done.count, done.state) == ("all_reduce", 11, "done")
    assert (hung.kind, hung.count, hung.state) == ("broadcast", 12, "running")
    assert (hung.number, hung.ended) == (3, None)


def test_subgroups_have_records_of_their_own_and_a_destroyed_group_keeps_its_own() -> None:
    def body() -> None:
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(5), group=group)
        dist.destroy_process_group(group)
        record = dist.flight_record(group)
        assert record.group == group.group_name != "default"
        assert record.ranks[dist.get_rank()].presence == "left"
        assert [entry.count for entry in record.ranks[dist.get_rank()].operations] == [0, 5]
        assert dist.flight_record().ranks[0].operations[0].kind == "barrier"

    run("threads", 2, body)


def test_a_record_of_nothing_is_refused() -> None:
    with pytest.raises(NotInitializedError):
        dist.flight_record()

    def body() -> None:
        with pytest.raises(InvalidArgumentTypeError, match="`group` must be a ProcessGroup or"):
            dist.flight_record(3)
        other = dist.new_group([1])
        if dist.get_rank() == 0:
            with pytest.raises(InvalidArgumentError, match="flight_record: this rank is <no member of group"):
                dist.flight_record(other)

    run("threads", 2, body)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_is_read_while_everybody_writes(kind: str) -> None:
    assert run(kind, 2, reduce_and_read) == [True, True]


def reduce_and_read() -> bool:
    """Reduce tensors whose lengths follow from the operations' numbers, and read all rings meanwhile."""
    for turn in range(1500):
        dist.all_reduce(torch.ones(turn % 40))
        if turn % 10 == dist.get_rank():
            for rank in dist.flight_record().ranks:
                for entry in rank.operations[1:]:
                    assert entry.count == (entry.number - 2) % 40
                    assert entry.nbytes == 4 * entry.count
                    assert entry.ended is None or entry.ended >= entry.started
    return True


def test_the_bytes_of_every_dtype() -> None:
    """They are written down so that a record can be read without torch."""
    here = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    known = {getattr(torch, name): length for name, length in DTYPE_BYTES.items() if hasattr(torch, name)}
    assert known == {dtype: dtype.itemsize for dtype in here & known.keys()}
    assert len(known) > 20


@pytest.mark.parametrize("chosen", [clock.COUNTER, clock.NANOSECONDS])
def test_both_clocks_tell_the_time_of_the_host(chosen: int) -> None:
    if chosen == clock.COUNTER and clock.best_clock() != chosen:
        pytest.skip("the processor's counter cannot be relied on here")
    early = clock.Moment.now(chosen)
    middle = clock.Moment.now(chosen)
    began = time.monotonic()
    while time.monotonic() < began + 0.01:
        pass
    scale = clock.TickScale(early, clock.Moment.now(chosen))
    assert abs(scale.time(middle.ticks) - middle.nanoseconds / 1e9) < 1e-3
    assert abs(scale.now - time.monotonic()) < SOON


def use_and_leave(directory: str, fail: bool) -> None:
    os.environ["TORCHESTRA_RECORD"] = directory
    dist.all_reduce(torch.ones(9))
    if fail and dist.get_rank() == 1:
        os._exit(3)
    if fail:
        with pytest.raises(RankFailedError):
            dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("fail", [False, True])
def test_a_job_leaves_its_record_where_it_is_told_to(tmp_path: Path, fail: bool) -> None:
    outcomes("processes", 2, use_and_leave, str(tmp_path), fail)
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("default-")
    events = json.loads(file.read_text())["traceEvents"]
    reduced = [event for event in events if event["name"] == "all_reduce"]
    assert sorted(event["tid"] for event in reduced) == [0, 1]
    assert {event["args"]["count"] for event in reduced} == {9}
    aborted = [event["args"]["why"] for event in events if event["name"] == "the group was aborted"]
    assert ["rank 1 died (" in why for why in aborted] == [True] * fail


def test_a_record_that_cannot_be_written_says_where_to_and_why(tmp_path: Path) -> None:
    (record,) = run("threads", 1, dist.flight_record)
    path = str(tmp_path / "nowhere" / "record.json")
    with pytest.raises(
        FileNotFoundError, match=r"FlightRecord\.save: the record cannot be written"
    ) as caught:
        record.save(path)
    assert caught.value.filename == path
    with pytest.raises(OSError, match=r"FlightRecord\.save: the record cannot be written") as caught:
        record.save(tmp_path)
    assert caught.value.filename == str(tmp_path)
    for name in ("a\0b", "\ud800"):
        with pytest.raises(dist.InvalidArgumentError, match=r"FlightRecord\.save: `path` must be the name"):
            record.save(str(tmp_path / name))
    assert not list(tmp_path.iterdir())
