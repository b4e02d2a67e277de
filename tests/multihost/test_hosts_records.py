"""``flight_record()`` of a group on several hosts: all ranks of all, by one clock; who is silent is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.text import Text
from simulated import SECONDS, host_processes, on_threads

import torchestra as dist
from torchestra.engine.diagnosis.process_counts import read_process
from torchestra.engine.failure.program_samples import ProgramSample
from torchestra.engine.hosts import Hosts
from torchestra.engine.multihost import failure_detector, remote_records
from torchestra.engine.multihost.failure_detector import FailureDetector
from torchestra.engine.recorder.flight_entries import HostRecord
from torchestra.engine.recorder.flight_record import FlightRecord
from torchestra.engine.recorder.trace import merged, trace_of
from torchestra.monitor.jobs import choose_job
from torchestra.monitor.live.rank_page import rank_page
from torchestra.monitor.live.samples import Change, GroupSample, JobSampler
from torchestra.monitor.rates import rates
from torchestra.store.unreadable import unpacked
from worlds import await_note, leave_note, results, store_barrier


def called() -> FlightRecord:
    """Some operations; the record, once all ranks have ended them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(3, 5), dist.ReduceOp.MAX)
    dist.broadcast(torch.ones(70_000, dtype=torch.float64), size - 1)
    dist.all_gather([torch.empty(each + 1) for each in range(size)], torch.ones(rank + 1))
    dist.barrier()
    dist.barrier()
    record = dist.flight_record()
    dist.barrier()
    return record


@pytest.mark.parametrize("layout", [(2, 1, 2), (1, 1)])
def test_any_rank_reads_what_all_ranks_of_all_hosts_did(layout: tuple[int, ...]) -> None:
    for record in on_threads(layout, called):
        assert (record.size, record.aborted) == (sum(layout), None)
        assert [host.name for host in record.hosts] == [f"h{host}" for host in range(len(layout))]
        assert [len(host.ranks) for host in record.hosts] == list(layout)
        assert all(host.answered for host in record.hosts)
        for number, rank in enumerate(record.ranks):
            assert (rank.rank, rank.pid, rank.presence) == (number, os.getpid(), "present")
            first = rank.operations[:4]
            assert [
                (each.number, each.kind, each.op, each.dtype, each.root, each.count, each.nbytes, each.state)
                for each in first
            ] == [
                (1, "all_reduce", "MAX", "float32", None, 15, 60, "done"),
                (2, "broadcast", None, "float64", record.size - 1, 70_000, 560_000, "done"),
                (3, "all_gather", None, "float32", None, None, 2 * record.size * (record.size + 1), "done"),
                (4, "barrier", None, None, None, 0, 0, "done"),
            ]
            assert rank.operation_bytes >= sum(each.nbytes for each in first)


def as_told(record: FlightRecord) -> remote_records.Answer:
    """Return a record as received from a host whose clock is 1000 s ahead, and that took a second."""
    packed = remote_records.answer(record, 0.0).partition(b"\n")[2]
    return remote_records.understand(b"1010.0 1011.0\n" + packed, 9.5, 11.5)


def one_part() -> FlightRecord:
    dist.all_reduce(torch.ones(3))
    record = dist.flight_record()
    dist.barrier()
    return record


def test_times_of_another_host_are_turned_into_those_of_this_one() -> None:
    whole = on_threads((1, 1), one_part)[0]
    hosts = Hosts([[0], [1]], ["here", "there"])
    there = replace(whole, ranks=(whole.ranks[1],))
    told = as_told(there)
    assert (told.record, told.offset, told.error) == (replace(there, hosts=()), -1000.0, 0.5)
    own = replace(whole, ranks=(whole.ranks[0],))
    joined = remote_records.merge_records(own, 0, {1: told}, hosts)
    assert joined.hosts == (HostRecord("here", (0,)), HostRecord("there", (1,), True, -1000.0, 0.5))
    assert joined.ranks[0] == whole.ranks[0]
    before, after = whole.ranks[1].operations[0], joined.ranks[1].operations[0]
    assert after == replace(before, started=before.started - 1000.0, ended=(before.ended or 0) - 1000.0)


def test_a_host_that_does_not_answer_is_named_and_its_ranks_are_unknown() -> None:
    whole = on_threads((1, 1), one_part)[0]
    own = replace(whole, ranks=(whole.ranks[0],))
    joined = remote_records.merge_records(own, 0, {}, Hosts([[0], [1]], ["here", "there"]))
    assert [(host.name, host.answered) for host in joined.hosts] == [("here", True), ("there", False)]
    assert [rank.presence for rank in joined.ranks] == ["present", "unknown"]
    assert joined.ranks[1].last_operation is None
    names = [event["args"].get("name") for event in trace_of([joined])["traceEvents"] if event["ph"] == "M"]
    assert "rank 1 (did not answer on host there)" in names


def test_traces_that_the_hosts_of_a_job_leave_fit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tells whose ranks it is of; the clock of one host is turned into that of another."""
    monkeypatch.setenv("TORCHESTRA_RECORD", str(tmp_path))
    on_threads((1, 2), dist.barrier)
    traces = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    names = [trace["traceEvents"][0]["args"]["name"] for trace in traces]
    assert names == [
        "group 'default', 1 of its 3 ranks, on host h0",
        "group 'default', 2 of its 3 ranks, on host h1",
    ]
    assert [
        event["args"]["name"] for event in traces[1]["traceEvents"] if event["name"] == "thread_name"
    ] == [
        f"rank 1 (pid {os.getpid()})",
        f"rank 2 (pid {os.getpid()})",
    ]
    same = merged(traces)["traceEvents"]
    epoch = traces[0]["otherData"]["epoch_us"] + 5e6
    elsewhere = {**traces[1], "otherData": {"clock": "of another host", "epoch_us": epoch}}
    moved = merged([traces[0], elsewhere])["traceEvents"]
    pairs = [pair for pair in zip(same, moved, strict=True) if "ts" in pair[0]]
    later = {(before["pid"], round(after["ts"] - before["ts"])) for before, after in pairs}
    assert later == {(1, 0), (2, 5_000_000)}


def test_a_second_part_of_an_answer_tells_of_programs_and_is_nothing_to_those_who_know_the_first() -> None:
    record = replace(on_threads((1, 1), one_part)[0], hosts=())
    programs = (ProgramSample("at a.py:1 in f, 0.1 s ago", read_process(os.getpid())), ProgramSample())
    first, both = (remote_records.answer(record, 1.0, told) for told in ((), programs))
    assert remote_records.understand(first, 0.0, 2.0).programs == ()
    assert remote_records.understand(both, 0.0, 2.0).programs == programs
    packed = [each.partition(b"\n")[2] for each in (first, both)]
    assert unpacked(packed[0], 1 << 20) == unpacked(packed[1], 1 << 20)
    with pytest.raises(ValueError, match="1 programs of 2 ranks"):
        remote_records.understand(remote_records.answer(record, 1.0, programs[1:]), 0.0, 2.0)


def stay() -> None:
    leave_note(f"there {dist.get_rank()}")
    await_note("end")


def test_top_has_the_processes_and_lines_of_ranks_on_another_host() -> None:
    with host_processes((1, 2), stay) as world:
        for rank in range(3):
            world.await_file(f"there {rank}")
        sampler = JobSampler(choose_job(world.pids[0]))
        here: list[GroupSample] = []
        told: list[GroupSample] = []

        def has_told() -> bool:
            sample = sampler.sample()
            assert sample is not None
            here[:], told[:] = sample.groups[:1], sample.groups[1:]
            # At first they may be of a moment before the ranks waited for the note.
            lines = [line for group in sample.groups for line in group.lines]
            return len(lines) == 3 and all("in await_note" in line for line in lines)

        deadline = time.monotonic() + SECONDS
        while not has_told():
            assert time.monotonic() < deadline, [group.lines for group in (*here, *told)]
            time.sleep(0.02)
        now = [read_process(pid) for pid in world.pids[1:]]
        Path(world.path("end")).touch()
        results(world.finish())
    assert [rank.pid for rank in told[0].record.ranks] == world.pids[1:]
    assert (here[0].host, told[0].host) == ("h0", "h1")
    for process, later in zip(told[0].processes, now, strict=True):
        assert process is not None
        assert 0 < process.cpu_s <= later.cpu_s
        assert process.all_threads > 1
    page = rank_page(Change(None, told[0], tuple(rates(told[0].record, told[0].record))), 1)
    words = [part.plain for part in page if isinstance(part, Text)]
    assert any(re.match(r"its program was at .*worlds.py:\d+ in await_note, ", line) for line in words)
    assert any(re.match(r"its process: \d+ of \d+ threads run", line) for line in words)


CALLS = (("all_reduce", 3, "done"), ("barrier", 0, "running"))


def watch_other_hosts(directory: str) -> None:
    """Rank 0 has another process watch the job, until a host has answered, and until it has fallen silent."""
    dist.all_reduce(torch.ones(3))
    store_barrier()
    if dist.get_rank() == 0:
        command = [sys.executable, "-m", "torchestra", "top", "--json", "--interval", "0.05"]
        command += ["--job", str(os.getpid())]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
            try:
                told = await_host(reader, answered=True)
                Path(directory, "silent").touch()
                silent = await_host(reader, answered=False)
            finally:
                reader.kill()
        assert [(rank["rank"], rank["presence"], rank["alive"]) for rank in told["ranks"]] == [
            (1, "present", True),
            (2, "present", True),
        ]
        for rank in told["ranks"]:
            call = rank["operation"]
            assert (call["kind"], call["count"], call["state"]) in CALLS
        assert silent["ranks"] == []
    dist.barrier()


def await_host(reader: subprocess.Popen[bytes], answered: bool) -> Any:
    """Read samples until one tells of h1 as h0 sees it. The test's time-out bounds the wait."""
    assert reader.stdout is not None
    for line in reader.stdout:
        found = [each for each in json.loads(line)["groups"] if each.get("host") == "h1"]
        # Perhaps there are still groups of earlier tests in this process, which have ended.
        found = [each for each in found if all(rank["presence"] != "left" for rank in each["ranks"])]
        # The first is that of the arena of h1, which is in the same process.
        for group in found[1:]:
            if group["answered"] is answered:
                return group
    raise AssertionError("the reader has ended")


def test_a_reader_outside_of_the_job_learns_of_other_hosts_and_of_their_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recount = FailureDetector._recount

    def hold_back(detector: FailureDetector, *arguments: Any) -> None:
        if not (tmp_path / "silent").exists():
            recount(detector, *arguments)

    monkeypatch.setattr(FailureDetector, "_recount", hold_back)
    monkeypatch.setattr(failure_detector, "_ANSWER_SECONDS", 0.2)
    on_threads((1, 2), watch_other_hosts, str(tmp_path))
