"""Workers that were stopped for a while, with what they had under way."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import rpc_workers
import worlds
from torchestra import rpc
from torchestra.rpc.current import current_agent
from torchestra.transport.endpoint import EndpointRecord
from torchestra.transport.pair import PairConnection

SECONDS = 5.0  # of a call: enough to stop the workers before they are over


def answer_late(note: str) -> int:
    worlds.await_note(note)
    return 5


def call_and_be_stopped() -> int:
    """All are stopped for longer than the call may take; the answer comes right afterwards."""
    rank = rpc_workers.begin()
    found = 5
    if rank == 0:
        future = rpc.rpc_async("worker1", answer_late, ("go",), timeout=SECONDS)
        worlds.leave_note("calling")
        found = future.wait()
    rpc.shutdown()
    return found


def test_a_call_does_not_time_out_because_the_workers_were_stopped() -> None:
    with worlds.processes(2, call_and_be_stopped) as world:
        world.await_file("calling")
        for rank in range(2):
            world.signal(rank, signal.SIGSTOP)
        time.sleep(SECONDS + 0.5)
        Path(world.path("go")).touch()
        for rank in range(2):
            world.signal(rank, signal.SIGCONT)
        assert worlds.results(world.finish()) == [5, 5]


def call_while_time_jumps() -> None:
    """The clock of the worker finds that much time has passed, as it does when the process was stopped."""
    future = rpc.rpc_async("worker1", answer_late, ("go",), timeout=20.0)
    agent = current_agent()
    agent.clock._last_read -= 100.0
    agent.check()
    assert agent.pending
    worlds.leave_note("go")
    assert future.wait() == 5


def test_time_in_which_the_process_was_stopped_does_not_count_for_calls() -> None:
    rpc_workers.first("processes", 2, call_while_time_jumps)


def test_a_worker_whose_connection_has_ended_is_not_gone_because_this_process_paused() -> None:
    """What it sent before may not have been read: whatever reads it has paused as well."""
    peer = PairConnection(1, EndpointRecord("tcp://127.0.0.1:1", b""))
    peer.wanted = peer.joined = True
    peer._ended, peer._last_check = 0.0, 0.1
    peer.check(0.6, 60.0)
    assert not peer.end_reason
    peer.received_at = 0.6  # something has come
    peer.check(1.1, 60.0)
    assert not peer.end_reason
    for tick in range(1, 6):
        peer.check(1.1 + tick / 20, 60.0)
    assert peer.end_reason == "died (its connection has ended)"
