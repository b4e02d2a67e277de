"""The calls that a worker has executed are in its flight record, where a report finds them."""

from __future__ import annotations

import threading

import pytest
import torch

import rpc_workers
from torchestra import rpc
from torchestra.engine import layout as at
from torchestra.engine.recorder.flight_entries import ExecutedCalls, RankRecord
from torchestra.engine.recorder.flight_record import read_flight_record
from torchestra.rpc.agent import Agent
from torchestra.rpc.current import current_agent


def doubled(number: int) -> int:
    return 2 * number


def failing() -> None:
    raise ValueError("on purpose")


def executed() -> list[tuple[int, str, int]]:
    """What this worker has executed, as its record has it now."""
    agent = current_agent()
    agent.executor.executed.write()
    record = read_flight_record(agent.router.context.arena)
    found: tuple[ExecutedCalls, ...] = record.ranks[agent.number].calls
    assert all(each.seconds > 0 for each in found)
    return [(each.caller, each.function, each.calls) for each in found]


def body(rank: int) -> list[tuple[int, str, int]] | None:
    if rank == 1:
        return None
    for number in range(5):
        assert rpc.rpc_sync("worker1", doubled, (number,)) == 2 * number
    with pytest.raises(ValueError, match="on purpose"):
        rpc.rpc_sync("worker1", failing)
    found: list[tuple[int, str, int]] = rpc.rpc_sync("worker1", executed)
    return found


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_what_a_worker_has_executed_is_in_its_record(kind: str) -> None:
    """Without the call that failed, and the one that asks, which has not returned."""
    assert rpc_workers.run(kind, 2, body)[0] == [(0, "doubled", 5)]


def many(rank: int) -> list[tuple[int, str, int]] | None:
    agent = current_agent()
    for number in range(at.CALL_ENTRIES + 10):
        agent.executor.executed.note(0, type(f"Function{number}", (), {}), 1000)
    return executed()


def test_functions_beyond_those_that_there_is_room_for_are_counted_together() -> None:
    (found,) = rpc_workers.run("threads", 1, many)
    assert found is not None
    assert len(found) == at.CALL_ENTRIES
    assert found[-1] == (-1, "other functions", 11)


def with_long_names(rank: int) -> list[tuple[int, str, int]] | None:
    for end in ("first", "second"):
        current_agent().executor.executed.note(0, type("F" * at.CALL_NAME_BYTES + end, (), {}), 1000)
    return executed()


def test_functions_whose_names_are_cut_off_alike_are_one() -> None:
    """For metrics, which have one value for each name."""
    assert rpc_workers.run("threads", 1, with_long_names) == [[(0, "F" * at.CALL_NAME_BYTES, 2)]]


def written_record(agent: Agent) -> RankRecord:
    for check in agent.checks:
        check()
    return read_flight_record(agent.router.context.arena).ranks[0]


def waits_and_refers(rank: int) -> tuple[int, int, int] | None:
    """Worker 0 has a reference to a value of worker 1, and waits for an answer, as its record is written."""
    if rank == 1:
        return None
    agent = current_agent()
    reference = rpc.remote("worker1", doubled, (3,))
    assert reference.to_here() == 6
    release = rpc.rpc_async("worker1", wait_for_release)
    record = written_record(agent)
    while record.calls_in_flight > 1:  # the confirmation of the reference may be under way
        record = written_record(agent)
    rpc.rpc_sync("worker1", release_waiter)
    release.wait()
    return record.calls_in_flight, record.references_owned, record.references_used


released = threading.Event()


def wait_for_release() -> None:
    assert released.wait(60.0)


def release_waiter() -> None:
    released.set()


def test_calls_in_flight_and_references_are_in_the_record() -> None:
    released.clear()
    found = rpc_workers.run("threads", 2, waits_and_refers)[0]
    assert found == (1, 0, 1)


def first_element(tensor: torch.Tensor) -> float:
    return float(tensor[0])


def calls_with_tensors(rank: int) -> tuple[int, int, int] | None:
    """Five calls of worker 1 with 400,000 bytes each, as worker 0's record has them; and one of worker 0."""
    if rank == 1:
        return None
    agent, tensor = current_agent(), torch.ones(100_000)
    before = written_record(agent)
    for _ in range(5):
        assert rpc.rpc_sync("worker1", first_element, (tensor,)) == 1.0
    sent = written_record(agent)
    assert rpc.rpc_sync("worker0", first_element, (tensor,)) == 1.0
    to_itself = written_record(agent)
    return (
        to_itself.calls_made - before.calls_made,
        sent.calls_sent_bytes - before.calls_sent_bytes,
        to_itself.calls_sent_bytes - sent.calls_sent_bytes,
    )


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_calls_made_and_bytes_sent_are_in_the_record(kind: str) -> None:
    found = rpc_workers.run(kind, 2, calls_with_tensors)[0]
    assert found is not None
    made, sent, to_itself = found
    assert made == 6
    assert 0 < sent - 5 * 400_000 < 5 * 500, "the tensors, and what belongs to them"
    assert to_itself == 0
