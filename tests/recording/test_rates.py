"""Test what happened between two looks at a group, from records made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchestra.engine.recorder.flight_entries import ExecutedCalls, FlightEntry, RankRecord
from torchestra.engine.recorder.flight_record import FlightRecord
from torchestra.monitor.rates import rates, straggler

ENTRY = FlightEntry(
    number=5,
    kind="all_reduce",
    op="SUM",
    dtype="float32",
    root=None,
    count=10,
    nbytes=40,
    peer=None,
    tag=None,
    blocking=True,
    started=99.0,
    ended=99.5,
    state="done",
    waited=0.0,
    waited_for=None,
)
RECEIVE = replace(ENTRY, kind="recv", op=None, count=None, peer=2, tag=0, ended=None, state="running")


def rank(number: int, size: int, **changes: object) -> RankRecord:
    nothing = RankRecord(
        rank=number,
        pid=1,
        presence="present",
        operations=(ENTRY,),
        messages=(),
        operations_begun=5,
        messages_begun=0,
        operation_bytes=0,
        message_bytes=0,
        operations_waited=0.0,
        messages_waited=0.0,
        waited_for=(0.0,) * size,
        waiting_for=None,
        waiting_since=None,
    )
    return replace(nothing, **changes)


def group(taken: float, *ranks: RankRecord) -> FlightRecord:
    return FlightRecord(group="g", size=len(ranks), taken=taken, taken_at=taken, aborted=None, ranks=ranks)


def test_operations_and_bytes_per_second() -> None:
    before = group(100.0, rank(0, 1, messages_begun=3, operation_bytes=10))
    after = group(
        102.0, rank(0, 1, operations_begun=9, messages_begun=5, operation_bytes=30, message_bytes=6)
    )
    (found,) = rates(before, after)
    assert (found.operations, found.bytes) == (3.0, 13.0)
    assert (found.waiting, found.awaited) == (0.0, None)


def test_waits_that_have_ended_and_one_that_goes_on() -> None:
    before = group(100.0, *(rank(number, 3) for number in range(3)))
    after = group(
        104.0,
        rank(0, 3, waited_for=(0.0, 0.5, 1.0)),
        rank(1, 3, waiting_for=2, waiting_since=101.0),
        rank(2, 3),
    )
    found = rates(before, after)
    assert [each.waiting for each in found] == pytest.approx([0.375, 0.75, 0.0])
    assert [each.awaited for each in found] == [2, 2, None]
    assert straggler(found) == (2, pytest.approx(0.5))


def test_a_wait_that_went_on_at_both_looks_counts_once() -> None:
    waits = {"waiting_for": 1, "waiting_since": 90.0}
    before, after = (
        group(100.0, rank(0, 2, **waits), rank(1, 2)),
        group(101.0, rank(0, 2, **waits), rank(1, 2)),
    )
    assert rates(before, after)[0].waiting == pytest.approx(1.0)
    ended = group(101.0, rank(0, 2, waited_for=(0.0, 10.25)), rank(1, 2))
    assert rates(before, ended)[0].waiting == pytest.approx(0.25)


def test_a_receive_that_gets_nothing_is_a_wait_for_its_sender() -> None:
    receive = replace(RECEIVE, started=99.0)
    before, after = (
        group(taken, rank(0, 3, messages=(receive,)), rank(1, 3), rank(2, 3)) for taken in (100.0, 101.0)
    )
    found = rates(before, after)
    assert found[0].waited_for == (0.0, 0.0, 1.0)
    in_background = replace(receive, blocking=False)
    before, after = (
        group(taken, rank(0, 3, messages=(in_background,)), rank(1, 3), rank(2, 3))
        for taken in (100.0, 101.0)
    )
    assert rates(before, after)[0].waiting == 0.0


def test_nobody_waits_for_a_group_of_one_or_where_all_come_together() -> None:
    assert straggler(rates(group(1.0, rank(0, 1)), group(2.0, rank(0, 1)))) is None
    pair = [rank(number, 2) for number in range(2)]
    assert straggler(rates(group(1.0, *pair), group(2.0, *pair))) is None


def test_calls_by_rpc_per_second() -> None:
    calls = ExecutedCalls(1, "fetch", 3, 0.1), ExecutedCalls(-1, "other functions", 1, 0.1)
    before = group(100.0, rank(0, 1, calls=calls, calls_made=7, calls_sent_bytes=100))
    later = ExecutedCalls(1, "fetch", 9, 0.1), calls[1]
    after = group(102.0, rank(0, 1, calls=later, calls_made=8, calls_sent_bytes=500))
    (found,) = rates(before, after)
    assert (found.calls_executed, found.calls_made, found.calls_sent_bytes) == (3.0, 0.5, 200.0)
    assert not found.waiting
