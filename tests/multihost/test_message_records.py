"""Messages between hosts, in the flight record and in reports, look like those within a host."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated import host_processes, on_threads

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.engine.recorder.trace import trace_of
from torchestra.errors import CollectiveTimeoutError, DistBackendError, RankFailedError
from worlds import await_note, leave_note, store_barrier

SOON = 50.0
HUGE = 900_000
"""Elements of int64: more than is sent ahead, before the receiver has asked for it."""


def until(found: Callable[[], Any]) -> Any:
    """Return what is found at last."""
    deadline = time.monotonic() + SOON
    while not (result := found()):
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.002)
    return result


def running(rank: int) -> dist.FlightEntry | None:
    """The message that a rank blocks in, as any rank can read it."""
    return dist.flight_record().ranks[rank].running_message


def words_of(entries: tuple[dist.FlightEntry, ...]) -> list[tuple[Any, ...]]:
    return [
        (entry.number, str(entry), entry.peer, entry.tag, entry.nbytes, entry.blocking, entry.state)
        for entry in entries
    ]


def messages() -> dist.FlightRecord:
    rank = dist.get_rank()
    if rank == 0:
        dist.send(torch.ones(3), 1, tag=7)
        dist.isend(torch.ones(HUGE, dtype=torch.int64), 1).wait()
        dist.recv(torch.empty(2, dtype=torch.bool))
        dist.send(torch.ones(1), 1, tag=5)
    else:
        small, large = torch.empty(3), torch.empty(HUGE, dtype=torch.int64)
        works = [dist.irecv(small, 0, tag=7), dist.irecv(large, 0)]
        for work in works:
            work.wait()
        dist.send(torch.ones(2, dtype=torch.bool), 0)
        with pytest.raises(DistBackendError, match="thrown away"):
            dist.recv(torch.empty(2), 0, tag=5)
    dist.barrier()
    record = dist.flight_record()
    dist.barrier()
    return record


def test_messages_between_hosts_are_recorded_as_those_within_one() -> None:
    began = time.monotonic()
    nbytes = 8 * HUGE
    for record in on_threads((1, 1), messages):
        sender, receiver = record.ranks
        assert words_of(sender.messages) == [
            (1, "send(float32, to rank 1, 12 bytes, tag 7)", 1, 7, 12, True, "done"),
            (2, f"send(int64, to rank 1, {nbytes} bytes)", 1, 0, nbytes, False, "done"),
            (3, "recv(bool, from rank 1, 2 bytes)", 1, 0, 2, True, "done"),
            (4, "send(float32, to rank 1, 4 bytes, tag 5)", 1, 5, 4, True, "done"),
        ]
        assert words_of(receiver.messages) == [
            (1, "recv(float32, from rank 0, 12 bytes, tag 7)", 0, 7, 12, False, "done"),
            (2, f"recv(int64, from rank 0, {nbytes} bytes)", 0, 0, nbytes, False, "done"),
            (3, "send(bool, to rank 0, 2 bytes)", 0, 0, 2, True, "done"),
            (4, "recv(float32, from rank 0, 8 bytes, tag 5)", 0, 5, 8, True, "failed"),
        ]
        for rank in record.ranks:
            assert (rank.messages_begun, rank.running_message) == (4, None)
            assert rank.message_bytes == sum(each.nbytes for each in rank.messages if each.state == "done")
            for entry in rank.messages:
                assert entry.ended is not None
                assert began - 0.1 < entry.started <= entry.ended < time.monotonic() + 0.1
                assert 0 <= entry.waited <= entry.ended - entry.started + 1e-3
        assert sender.messages[2].waited > 0
        assert sender.messages_waited == pytest.approx(sender.messages[2].waited)
        events = [event for event in trace_of([record])["traceEvents"] if event.get("cat") == "message"]
        assert {event["args"]["peer"] for event in events if "args" in event} == {0, 1}


def from_here_and_there() -> tuple[dist.FlightEntry, ...]:
    rank = dist.get_rank()
    for other in (1, 2):  # the same host's first
        if rank == 0:
            assert dist.recv(torch.empty(3)) == other
        elif rank == other:
            dist.send(torch.ones(3), 0)
        dist.barrier()
    record = dist.flight_record()
    dist.barrier()  # a host that has gone does not answer
    return record.ranks[0].messages


def test_a_receive_from_any_rank_is_recorded_once_wherever_its_message_comes_from() -> None:
    entries = on_threads((2, 1), from_here_and_there)[0]
    assert words_of(entries) == [
        (peer, f"recv(float32, from rank {peer}, 12 bytes)", peer, 0, 12, True, "done") for peer in (1, 2)
    ]


def many_here_and_there() -> dist.RankRecord:
    rank = dist.get_rank()
    count = at.ENTRIES + 40
    if rank == 0:
        for number in range(count):
            dist.send(torch.ones(number), 1 + number % 2)
    else:
        for number in range(rank - 1, count, 2):
            dist.recv(torch.empty(number), 0)
    dist.barrier()
    record = dist.flight_record()
    dist.barrier()
    return record.ranks[0]


def test_the_last_are_kept_of_messages_within_and_between_hosts_together() -> None:
    record = on_threads((2, 1), many_here_and_there)[0]
    count = at.ENTRIES + 40
    assert record.messages_begun == count
    assert [each.number for each in record.messages] == list(range(41, count + 1))
    assert [each.peer for each in record.messages] == [1 + number % 2 for number in range(40, count)]
    assert record.message_bytes == sum(4 * number for number in range(count))


def by_many_threads() -> dist.RankRecord:
    rank, threads, each = dist.get_rank(), 4, 50
    if rank == 1:
        for tag in range(threads):
            for _ in range(each):
                dist.recv(torch.empty(tag), 0, tag=tag)
    else:
        group = dist.group.WORLD

        def send(tag: int) -> None:
            for _ in range(each):
                group.communicator.send(torch.ones(tag), 1, tag)

        senders = [threading.Thread(target=send, args=(tag,)) for tag in range(threads)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
    dist.barrier()
    record = dist.flight_record()
    dist.barrier()
    return record.ranks[0]


def test_messages_of_many_threads_are_all_recorded() -> None:
    record = on_threads((1, 1), by_many_threads)[0]
    assert [entry.number for entry in record.messages] == list(range(1, 201))
    assert {entry.state for entry in record.messages} == {"done"}
    for tag in range(4):
        assert sum(entry.tag == tag and entry.nbytes == 4 * tag for entry in record.messages) == 50


def both_receive() -> str:
    """Each waits for the other's message; one gives up soon, and its error tells of both."""
    rank = dist.get_rank()
    told = ""
    if rank == 1:
        dist.recv(torch.empty(3), 0, tag=9)
    else:
        message = until(lambda: running(1))
        assert str(message) == "recv(float32, from rank 0, 12 bytes, tag 9)"
        assert (message.state, message.ended) == ("running", None)
        while "host h1:" not in told:  # it answers late where the machine is busy
            with pytest.raises(CollectiveTimeoutError) as caught:
                dist.group.WORLD.communicator.recv(torch.empty(5), 1, 8, 0.2)
            told = str(caught.value)
        late = dist.flight_record().ranks[0].messages[-1]
        assert (str(late), late.state) == ("recv(float32, from rank 1, 20 bytes, tag 8)", "failed")
        dist.send(torch.ones(3), 1, tag=9)
    dist.barrier()
    return told


def test_a_time_out_tells_which_messages_between_hosts_are_waited_for() -> None:
    told = on_threads((1, 1), both_receive)[0]
    for rank, peer, length, tag in ((1, 0, 12, 9), (0, 1, 20, 8)):
        line = (
            rf"rank {rank} has called nothing yet, and is in recv\(float32, from rank {peer}, {length} bytes,"
            rf" tag {tag}\) for \d+\.\d s; is at \S+test_message_records\.py:\d+ in both_receive"
        )
        assert re.search(line, told), told


def until_one_dies() -> None:
    """Rank 1 is killed while it waits for a message from the other host."""
    rank = dist.get_rank()
    store_barrier()  # none is still making the group
    if rank == 1:
        dist.recv(torch.empty(3), 2)
    if rank == 0:
        until(lambda: running(1))
        leave_note("waits")
    else:
        await_note("waits")
    dist.all_reduce(torch.ones(1))


def test_a_death_tells_which_message_between_hosts_the_rank_was_in() -> None:
    with host_processes((2, 1), until_one_dies) as world:
        world.await_file("waits")
        world.signal(1, signal.SIGKILL)
        for rank in (0, 2):
            outcome = world.wait(rank)
            assert isinstance(outcome.error, RankFailedError), outcome
            line = r"rank 1 .*, and is in recv\(float32, from rank 2, 12 bytes\) for \d+\.\d s; has died"
            assert re.search(line, outcome.message), outcome.message
