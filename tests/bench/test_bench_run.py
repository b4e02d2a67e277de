"""A tiny benchmark from end to end, with real peers."""

import argparse
import json
import sys

import pytest

from benchmarks.command import add_arguments, main
from benchmarks.measuring import measure_cell
from benchmarks.options import BenchOptions
from benchmarks.peers import Column
from benchmarks.ranks.shapes import OPERATIONS
from benchmarks.run import run_benchmark
from benchmarks.startup import launch_time
from benchmarks.worker_processes import PeerError


@pytest.mark.usefixtures("forked")
def test_gloo_is_measured_in_every_operation_and_its_results_are_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[str, int, int]] = []
    options = BenchOptions(
        sizes=(4, 4096), nproc=(2,), peers=("gloo",), rounds=1, seconds=0.002, sections=("collectives",)
    )
    report = run_benchmark(options, lambda *progress: seen.append(progress))
    assert report.notes == ()
    assert report.right
    cells = {(cell.operation, cell.size): cell.timings["gloo"] for cell in report.cells}
    assert len(cells) == 2 * (len(OPERATIONS) - 1) + 1
    assert all(timing.median_us > 0 and timing.p99_us > 0 for timing in cells.values())
    assert report.columns[0].description.startswith("torch 2")
    assert seen[-1][2] == len(cells)


@pytest.mark.usefixtures("forked")
def test_torchestra_is_measured_on_ordinary_and_on_symmetric_tensors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = BenchOptions(
        operations=("all_reduce", "all_gather", "barrier", "send_recv"),
        sizes=(4, 65536),
        nproc=(2,),
        peers=("torchestra", "symmetric"),
        rounds=1,
        seconds=0.002,
        sections=("collectives",),
    )
    report = run_benchmark(options)
    assert report.notes == ()
    assert report.right
    measured = {cell.operation: set(cell.timings) for cell in report.cells}
    both = {"torchestra", "symmetric"}
    assert measured == {"all_reduce": both, "all_gather": both, "send_recv": both, "barrier": {"torchestra"}}


@pytest.mark.usefixtures("forked")
def test_the_command_prints_a_table_writes_its_files_and_tells_who_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = [
        "--quick",
        "--nproc",
        "2",
        "--ops",
        "all_reduce",
        "--sizes",
        "4",
        "--peers",
        "gloo,nosuchmpi",
    ]
    assert main(parser.parse_args(arguments)) == 0
    captured = capsys.readouterr()
    assert "2 ranks, float32" in captured.out
    assert "left out: nosuchmpi: not found on this machine" in captured.out
    data = json.loads((tmp_path / "out" / "bench" / "bench.json").read_text())
    assert data["cells"][0]["peers"]["gloo"]["right"] is True


@pytest.mark.usefixtures("forked")
def test_cells_that_do_not_fit_into_memory_are_left_out_with_a_note(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.run.available_memory", lambda: 100_000)
    options = BenchOptions(
        operations=("all_gather",),
        sizes=(4, 65536),
        nproc=(2,),
        peers=("gloo",),
        rounds=1,
        seconds=0.002,
        sections=("collectives",),
    )
    report = run_benchmark(options)
    assert [cell.size for cell in report.cells] == [4]
    assert report.notes == ("all_gather 64 KB on 2 ranks: the peers need 0.0 GB, 0.0 GB are available",)


class PretendWorkers:
    """Answers like worker processes, without processes; may fail at a command, and may get a result wrong."""

    def __init__(self, log: list[str], name: str, fails_at: str = "", right: bool = True) -> None:
        self._log, self._name, self._fails_at, self._right = log, name, fails_at, right

    def ask(self, command, seconds):
        self._log.append(f"{self._name} {command['do']}")
        if command["do"] == self._fails_at:
            raise PeerError(f"{self._name} broke")
        if command["do"] == "time":
            return [{"means": [1e6] * command["batches"]}, {"means": [2e6] * command["batches"]}]
        return [{"right": self._right}, {"right": True}]


def cell_of(
    *workers: PretendWorkers, rounds: int = 2, operation: str = "all_reduce", memory: str = "private"
):
    turns = [(Column(f"peer{number}", "", memory), each) for number, each in enumerate(workers)]
    return measure_cell(turns, operation, 4, 2, BenchOptions(rounds=rounds, seconds=0.01))


def test_peers_take_turns_and_a_different_one_begins_each_round():
    log: list[str] = []
    timings, errors = cell_of(PretendWorkers(log, "a"), PretendWorkers(log, "b"))
    assert errors == []
    turns = [entry for entry in log if entry.endswith("time")]
    # One call each to find out how long a call takes, then two rounds.
    assert turns == ["a time", "b time", *("a time", "b time"), *("b time", "a time")]
    assert {key: timing.median_us for key, timing in timings.items()} == {"peer0": 2000.0, "peer1": 2000.0}


@pytest.mark.parametrize("command", ["prepare", "time", "check", "release"])
def test_a_peer_that_breaks_down_stops_alone(command):
    log: list[str] = []
    timings, errors = cell_of(PretendWorkers(log, "a", fails_at=command), PretendWorkers(log, "b"))
    assert [str(error) for error in errors] == ["a broke"]
    assert list(timings) == ["peer1"]
    assert log.count(f"a {command}") == 1


def test_a_result_that_is_wrong_on_one_rank_is_wrong():
    timings, _ = cell_of(PretendWorkers([], "a", right=False), PretendWorkers([], "b"))
    assert not timings["peer0"].right
    assert timings["peer1"].right


def test_a_barrier_knows_no_symmetric_memory():
    timings, errors = cell_of(PretendWorkers([], "a"), operation="barrier", memory="symmetric")
    assert (timings, errors) == ({}, [])


MARKING = """\
import os, socket, sys, time
mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
for rank in range({ranks}):
    mark.sendto(repr(time.monotonic()).encode(), "\\0" + os.environ["TORCHESTRA_BENCH_SOCKET"])
print("all is lost")
sys.exit({code})
"""


def launched(ranks: int, code: int) -> float:
    return launch_time([sys.executable, "-c", MARKING.format(ranks=ranks, code=code)], 2, {})


def test_a_launch_lasts_until_the_last_rank_is_done():
    assert 0 < launched(ranks=2, code=0) < 60


@pytest.mark.parametrize(("ranks", "code"), [(1, 0), (2, 3)])
def test_a_launch_that_fails_is_an_error_with_its_last_line(ranks, code):
    with pytest.raises(RuntimeError, match=f"exit code {code}, {ranks} of 2 ranks came: all is lost"):
        launched(ranks, code)


def test_without_peers_the_report_says_so_and_the_function_prints_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = BenchOptions(peers=("none",), nproc=(2,), sizes=(4,), sections=("collectives",))
    report = run_benchmark(options)
    assert report.notes == ("none: not found on this machine",)
    assert all(cell.timings == {} for cell in report.cells)
    assert capsys.readouterr().out == ""
