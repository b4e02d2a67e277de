"""Ranks are started, watched and ended; with those that only stream memory, because they start quickly."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from benchmarks.measuring import measure_streams
from benchmarks.peers import Column, Peer
from benchmarks.worker_processes import PeerError, WorkerProcesses

STREAM = {"slot": "", "operation": "update"}
PREPARE = {"do": "prepare", **STREAM, "size": 1 << 16, "memory": "private"}
TIME = {"do": "time", **STREAM, "batch": 2, "batches": 3, "warmup": 1}


def memory_peer(kind: str = "memory") -> Peer:
    return Peer("memory", kind, Path(sys.executable), (Column("memory", "memory"),))


def ranks_of(tag: str) -> dict[int, int]:
    """The processes of the ranks that inherited a tag in their environment, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"BENCH_TEST_TAG={tag}".encode() in environment:
                ranks = [variable[5:] for variable in environment if variable.startswith(b"RANK=")]
                found |= {int(rank): int(entry.name) for rank in ranks}
    return found


@pytest.fixture
def tag(monkeypatch) -> str:
    value = uuid.uuid4().hex
    monkeypatch.setenv("BENCH_TEST_TAG", value)
    return value


def test_every_rank_answers_in_order_and_nothing_is_left(tag, nothing_left):
    with WorkerProcesses(memory_peer(), 3) as workers:
        assert set(ranks_of(tag)) == {0, 1, 2}
        assert workers.description.startswith("NumPy")
        assert workers.ask(PREPARE, 20) == [{}, {}, {}]
        answers = workers.ask(TIME, 20)
        assert [len(answer["means"]) for answer in answers] == [3, 3, 3]
        assert all(mean > 0 for answer in answers for mean in answer["means"])
    nothing_left()


def test_a_rank_that_dies_is_named_at_once(tag, nothing_left):
    with WorkerProcesses(memory_peer(), 2) as workers:
        workers.ask(PREPARE, 20)
        os.kill(ranks_of(tag)[1], signal.SIGKILL)
        with pytest.raises(PeerError, match="memory, 2 ranks: rank 1 is gone at time update"):
            workers.ask({**TIME, "batches": 200}, 60)
    nothing_left()


def test_a_rank_that_raises_tells_what(nothing_left):
    with (
        WorkerProcesses(memory_peer(), 2) as workers,
        pytest.raises(PeerError, match=r"rank \d failed at prepare nonsense: KeyError: 'nonsense'"),
    ):
        workers.ask({**PREPARE, "operation": "nonsense"}, 20)
    nothing_left()


def test_a_peer_that_cannot_start_says_why_and_leaves_nothing(nothing_left):
    with pytest.raises(PeerError, match="ValueError: there is no kind of rank called 'telepathy'"):
        WorkerProcesses(memory_peer("telepathy"), 2)
    nothing_left()


def test_a_peer_whose_interpreter_ends_at_once_shows_its_last_words(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'cannot open shared object file' >&2\nexit 127\n")
    python.chmod(0o755)
    peer = Peer("broken", "mpi", python, (Column("broken", "Broken MPI"),))
    with pytest.raises(
        PeerError, match=r"Broken MPI, 2 ranks: a rank ended .*cannot open shared object file"
    ):
        WorkerProcesses(peer, 2)


def test_a_peer_that_never_joins_is_given_up_and_ended(tmp_path, nothing_left):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 1000\n")
    python.chmod(0o755)
    peer = Peer("asleep", "mpi", python, (Column("asleep", "Sleepy MPI"),))
    with pytest.raises(PeerError, match="only 0 of 2 ranks came"):
        WorkerProcesses(peer, 2, start_seconds=0.2)
    nothing_left()


def test_an_answer_that_does_not_come_in_time_is_an_error(nothing_left):
    with WorkerProcesses(memory_peer(), 2) as workers:
        workers.ask(PREPARE, 20)
        with pytest.raises(PeerError, match="rank 0, rank 1 did not finish time update in time"):
            workers.ask({**TIME, "batches": 100_000_000}, 0.1)
        workers.kill()
    nothing_left()


def test_ranks_leave_when_the_driver_is_killed(tag, nothing_left):
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from benchmarks.worker_processes import WorkerProcesses\n"
        "from benchmarks.peers import Column, Peer\n"
        "peer = Peer('memory', 'memory', Path(sys.executable), (Column('memory', 'memory'),))\n"
        "workers = WorkerProcesses(peer, 2)\nprint('started', flush=True)\ntime.sleep(1000)\n"
    )
    checkout = str(Path(__file__).parents[2])
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=checkout)
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"started\n"
        assert set(ranks_of(tag)) == {0, 1}
    finally:
        driver.kill()
        driver.communicate()
    nothing_left()


def test_streams_are_told_in_bytes_per_second_of_all_processes(monkeypatch):
    monkeypatch.setattr("benchmarks.measuring._STREAM_BYTES", 1 << 20)
    with WorkerProcesses(memory_peer(), 2) as workers:
        rates = measure_streams(workers, ("update", "read", "write", "copy"), 0.01)
    assert set(rates) == {"update", "read", "write", "copy"}
    # Between a slow phone and a rack: a mistake in the units would be outside.
    assert all(1e7 < rate < 1e14 for rate in rates.values())
