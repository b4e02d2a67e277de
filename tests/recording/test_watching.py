"""``torchestra top`` and ``torchestra report`` beside jobs that run, hang, have died, or do not exist."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.cli import main
from torchestra.monitor import diagnosis, jobs
from torchestra.monitor.jobs import find_jobs
from torchestra.monitor.live.recording import Recording
from warm_programs import WarmProgram, run_warm
from worlds import ProcessWorld, await_note, leave_note, processes
from worlds import run as run_world

SOON = 90.0
LONG = 600.0  # the tests' time-outs come before


def waits_in_barrier(rank: int) -> bool:
    last = dist.flight_record().ranks[rank].operations[-1]
    return (last.kind, last.state) == ("barrier", "running")


def work_on() -> None:
    """Collectives without end, until the test says so; rank 1 is always late. Then all wait for rank 2."""
    rank, sub = dist.get_rank(), dist.new_group([0, 2])
    tensor, note = torch.ones(1000), os.path.join(os.environ["WORLD_DIRECTORY"], "stop")
    if rank != 1:
        dist.all_reduce(torch.ones(3), group=sub)
    if rank == 0:
        dist.isend(tensor, 1, tag=4).wait()
    elif rank == 1:
        dist.recv(tensor, 0, tag=4)
    stop = torch.zeros(1)
    while not stop.item():
        if rank == 1:
            time.sleep(0.05)  # the subject, not a way to wait for somebody
            stop.fill_(float(os.path.exists(note)))
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        dist.broadcast(stop, 1)
        leave_note(f"works {rank}")
    if rank == 2:
        while not all(waits_in_barrier(peer) for peer in (0, 1)):
            time.sleep(0.002)
        leave_note("hangs")
        await_note("end", LONG)
    dist.barrier()


@pytest.fixture
def job() -> Iterator[ProcessWorld]:
    with processes(3, work_on, timeout=LONG) as world:  # no rank gives up while tests look
        for rank in range(3):
            world.await_file(f"works {rank}")
        yield world


def hang(job: ProcessWorld) -> None:
    Path(job.path("stop")).touch()
    job.await_file("hangs")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def look(capsys: pytest.CaptureFixture[str], job: ProcessWorld, interval: str = "0.5") -> dict[str, Any]:
    code, text = run(capsys, "top", "--json", "--once", "--interval", interval, "--job", str(job.pids[0]))
    assert code == 0
    told: dict[str, Any] = json.loads(text)
    return told


def test_top_tells_who_keeps_the_others_waiting(
    job: ProcessWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    told = look(capsys, job, "1.0")
    assert told["job"] == job.pids[0]
    default, sub = told["groups"]
    assert (default["group"], default["aborted"]) == ("default", None)
    assert [(rank["rank"], rank["pid"], rank["alive"]) for rank in default["ranks"]] == [
        (rank, pid, True) for rank, pid in enumerate(job.pids)
    ]
    for rank in default["ranks"]:
        assert rank["operation"]["kind"] in ("all_reduce", "broadcast")
        assert rank["operations"] > 0
        assert rank["bytes"] > 0
    for rank in (0, 2):
        waited = default["ranks"][rank]["waited_for"]
        assert waited[1] == max(waited) > 0.1
    assert [rank["pid"] for rank in sub["ranks"]] == [job.pids[0], job.pids[2]]
    assert [rank["operations"] for rank in sub["ranks"]] == [0, 0]


def test_a_job_is_shown_by_the_command_that_has_started_its_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank of a fork server has the server's command line, and its program has many lines."""
    server = "import sys; sys.path[:] = ['/a']\nfrom torchestra.launcher.fork_server import serve_descriptor"
    run_, own = "python -m torchestra run -n 2 train.py", "python -c 'import train\ntrain.main()'"
    processes_ = {7: (1, "bash"), 8: (7, run_), 9: (8, f"python -c {server}"), 10: (9, f"python -c {server}")}
    for pid, (parent, line) in {**processes_, 11: (7, own), 12: (99, f"python -c {server}")}.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_text(line.replace(" ", "\0") + "\0")
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (python) S {parent} 0")
    monkeypatch.setattr(jobs, "_PROC", tmp_path)
    shown = {}
    for pid in (10, 11, 12, 99):
        monkeypatch.setattr(jobs.Job, "pid", pid)
        shown[pid] = jobs.Job([]).command
    assert shown == {
        10: run_,
        11: "python -c 'import train train.main()'",
        12: " ".join(f"python -c {server}".split()),
        99: "?",
    }


def test_a_job_of_a_real_fork_server_is_not_shown_by_its_program(job: ProcessWorld) -> None:
    (found,) = (each for each in find_jobs()[0] if job.pids[0] in each.pids)
    assert "serve_descriptor" not in found.command


def test_top_draws_a_table(
    job: ProcessWorld, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.Job, "command", "a long command line that does not fit " * 10)
    hang(job)
    code, text = run(capsys, "top", "--once", "--interval", "0.2", "--job", str(job.pids[1]))
    assert code == 0
    lines = text.splitlines()
    assert lines[0].startswith(f"job {job.pids[0]} a long command")
    assert lines[2].strip() == "group 'default'"
    assert lines[3].split()[:4] == ["rank", "pid", "no.", "operation"]
    for rank, line in enumerate(lines[4:7]):
        cells = line.split()
        assert cells[:2] == [str(rank), str(job.pids[rank])]
        if rank == 2:
            assert "broadcast(float32, 1 element, root 1) done" in line
        else:
            assert re.search(r" barrier\(\) +\d+(\.\d)? m?s +0 +0 B +\d+% +rank 2$", line.rstrip())
    assert re.fullmatch(r"the others wait for rank 2: \d+% of their time *", lines[7])
    assert any("all_reduce(SUM, float32, 3 elements) done" in line for line in lines[8:])


def test_top_shows_who_has_died(job: ProcessWorld, capsys: pytest.CaptureFixture[str]) -> None:
    hang(job)
    for rank in (0, 1):
        job.signal(rank, signal.SIGSTOP)  # so that they do not end too
    job.signal(2, signal.SIGKILL)
    deadline = time.monotonic() + SOON
    while os.path.exists(f"/proc/{job.pids[2]}/fd/0") and time.monotonic() < deadline:
        pass
    assert [rank["alive"] for rank in look(capsys, job, "0.1")["groups"][0]["ranks"]] == [True, True, False]
    _, text = run(capsys, "top", "--once", "--interval", "0.1", "--job", str(job.pids[0]))
    assert "broadcast(float32, 1 element, root 1) done when it died" in text


def test_top_draws_until_the_job_ends_and_records_what_it_saw(job: ProcessWorld, tmp_path: Path) -> None:
    hang(job)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "torchestra", "top", "--interval", "0.1", "--job", str(job.pids[0])]
    command += ["--record", str(tmp_path / "job.top")]
    room_for_a_page = {**os.environ, "LINES": "50", "COLUMNS": "120"}
    process = WarmProgram(command, stdin=theirs, stdout=theirs, stderr=theirs, env=room_for_a_page)
    os.close(theirs)
    drawn = b""
    with process:
        while b"the others wait for rank 2" not in drawn:
            drawn += os.read(ours, 1 << 16)
        os.write(ours, b"j\r")
        while b"waits by peer" not in drawn:
            drawn += os.read(ours, 1 << 16)
        Path(job.path("end")).touch()
        try:
            while piece := os.read(ours, 1 << 16):
                drawn += piece
        except OSError:
            pass  # the other end is closed
    os.close(ours)
    assert process.returncode == 0
    assert f"rank 1 (pid {job.pids[1]}) of group 'default'".encode() in drawn
    assert f"job {job.pids[0]} has ended".encode() in drawn
    assert b"\x1b[?1049h" in drawn  # on the alternate screen,
    assert b"\x1b[?1049l" in drawn  # and back
    with closing(Recording(tmp_path / "job.top")) as recording:
        sample = recording.sample(1)
    assert [rank.pid for rank in sample.groups[0].record.ranks] == job.pids
    assert all(process is not None and process.all_threads > 1 for process in sample.groups[0].processes)


def test_report_writes_a_trace_of_a_running_job(
    job: ProcessWorld,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diagnosis, "_HUNG_SECONDS", 0.0)
    hang(job)
    path = tmp_path / "trace.json"
    code, text = run(capsys, "report", "--out", str(path), "--seconds", "0", "--job", str(job.pids[0]))
    assert code == 0
    assert re.search(r"trace\.json: \d+ operations in 2 groups", text)
    assert text.startswith("group 'default': diagnosis")
    assert "rank 2 has not called operation" in text.splitlines()[0]
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[1, 2] == f"rank 2 (pid {job.pids[2]})"
    assert names[2, 1] == f"rank 1 (pid {job.pids[2]})"
    slices = [event for event in events if event["ph"] == "X"]
    for track in names:
        ends = 0.0
        for event in sorted((e for e in slices if (e["pid"], e["tid"]) == track), key=lambda e: e["ts"]):
            assert event["ts"] >= ends - 1e-3, "slices of one track must not overlap"
            ends = event["ts"] + event["dur"]
    running = [(event["name"], event["tid"]) for event in slices if event["args"]["state"] == "running"]
    assert sorted(running) == [("barrier (running)", 0), ("barrier (running)", 1)]
    arrows = {phase: [event for event in events if event["ph"] == phase] for phase in "sf"}
    assert len(arrows["s"]) == len(arrows["f"]) > 0
    for start, end in zip(arrows["s"], arrows["f"], strict=True):
        assert start["id"] == end["id"]
        assert start["tid"] != end["tid"]
        # An arrow binds to the slice that it lies in.
        for event in (start, end):
            assert any(
                (e["pid"], e["tid"]) == (event["pid"], event["tid"])
                and e["ts"] <= event["ts"] <= e["ts"] + e["dur"]
                for e in slices
            )
    begun = [event for event in events if event["ph"] == "b"]
    assert [(event["name"], event["args"]["tag"]) for event in begun] == [("send in the background", 4)]


def test_report_tells_the_straggler_and_looks_at_its_process(
    job: ProcessWorld, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    code, text = run(capsys, "report", "--out", str(path), "--seconds", "0.5", "--job", str(job.pids[0]))
    assert code == 0
    lines = text.splitlines()
    assert lines[0] == "group 'default', 3 ranks:"
    assert re.match(r"  (Rank 1 is .* between operations|The others wait most for rank 1)", lines[1])
    assert re.search(r"its program was mostly at \S*test_watching\.py:\d+ in work_on", text)
    samples = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "sample"]
    assert {(event["pid"], event["tid"]) for event in samples} == {(1, 0), (1, 1), (1, 2)}


def test_report_puts_traces_together(
    job: ProcessWorld, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("one.json", "two.json"):
        path = str(tmp_path / name)
        assert main(["report", "--out", path, "--seconds", "0", "--job", str(job.pids[0])]) == 0
    code, text = run(capsys, "report", "--from", str(tmp_path), "--out", str(tmp_path / "both.csv"))
    assert code == 0
    assert "operations in 4 groups" in text


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([], "There is no group in the record."),
        ([1], "group '<b>0', 1 rank: there is no other rank to wait for."),
        ([2], "group '<b>0', 2 ranks: no rank has called an operation yet."),
    ],
)
def test_report_says_why_there_is_nothing_to_tell(
    sizes: list[int], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = [
        {
            "ph": "M",
            "name": "process_name",
            "pid": number,
            "tid": 0,
            "args": {"name": "", "group": f"<b>{number}", "size": size},
        }
        for number, size in enumerate(sizes)
    ]
    trace, page = tmp_path / "trace.json", tmp_path / "report.html"
    trace.write_text(json.dumps({"traceEvents": groups}))
    code, text = run(capsys, "report", "--from", str(trace), "--html", str(page))
    assert code == 0
    assert text.splitlines() == [told, f"{page}: 0 operations in 0 groups"]
    assert f"<li>{escape(told)}</li>" in page.read_text()


@pytest.mark.parametrize("name", ["pytorch", "kineto"])
def test_report_writes_what_other_tools_read(
    name: str, job: ProcessWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live, kept = tmp_path / "live", tmp_path / "kept"
    looking = ("--seconds", "0", "--job", str(job.pids[0]))
    assert main(["report", "--out", str(tmp_path / "t.json"), *looking]) == 0
    for out, source in ((live, looking), (kept, ("--from", str(tmp_path / "t.json")))):
        code, text = run(capsys, "report", "--out", str(out), "--format", name, *source)
        assert code == 0, text
        assert f"{out}: " in text
        assert [path.name.partition(".")[0] for path in sorted(out.iterdir())] == [
            "rank_0",
            "rank_1",
            "rank_2",
        ]


def test_jobs_are_looked_at_without_loading_torch(job: ProcessWorld, tmp_path: Path) -> None:
    """It takes seconds, and none of these commands has tensors."""
    trace = str(tmp_path / "trace.json")
    for command in (
        ["top", "--once", "--interval", "0.05", "--job", str(job.pids[0])],
        ["report", "--seconds", "0.1", "--out", trace, "--job", str(job.pids[0])],
        ["report", "--from", trace, "--format", "chakra", "--out", str(tmp_path / "traces")],
    ):
        program = (
            "import sys\n"
            "from torchestra.cli import main\n"
            "code = main(sys.argv[1:])\n"
            "loaded = sorted({'torch', 'numba'} & sys.modules.keys())\n"
            "sys.exit(code or ('loaded: ' + ' '.join(loaded) if loaded else 0))"
        )
        subprocess.run([sys.executable, "-c", program, *command], check=True, timeout=SOON)


def test_nothing_is_left_of_a_job_that_was_killed(job: ProcessWorld) -> None:
    for rank in range(3):
        job.signal(rank, signal.SIGKILL)
    job.finish()
    found, _ = find_jobs()
    assert not any(set(job.pids) & each.pids for each in found)


@contextlib.contextmanager
def bystander(program: str = "") -> Iterator[int]:
    """The number of a process that is of no job: tests may have left arenas open in this one."""
    command = [sys.executable, "-c", f"import os\n{program}\nprint('ready', flush=True)\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.communicate(b"\n")


@pytest.mark.parametrize("command", [("top", "--once"), ("report", "--out", "never.json")])
def test_a_process_without_a_job_is_said_to_be_one(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with bystander() as pid:
        code, text = run(capsys, *command, "--job", str(pid))
    assert code == 1
    assert f"process {pid} belongs to no running job of this user on this host" in text
    assert not os.path.exists("never.json")


@pytest.mark.parametrize("command", [("top", "--once"), ("report", "--out", "never.json")])
def test_no_job_at_all(
    command: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "_PROC", tmp_path)
    code, text = run(capsys, *command)
    assert (code, text) == (1, f"torchestra {command[0]}: no job of this user runs on this host\n")


def test_several_jobs_are_listed(job: ProcessWorld, capsys: pytest.CaptureFixture[str]) -> None:
    """Here one of processes, and one of two threads of this process (and what other tests left in it)."""

    def body() -> tuple[int, str]:
        dist.barrier()
        told = run(capsys, "top", "--once") if dist.get_rank() == 0 else (0, "")
        dist.barrier()
        return told

    (code, text), _ = run_world("threads", 2, body)
    assert code == 1
    assert "jobs run on this host: choose one with --job" in text
    assert re.search(rf"^  --job {job.pids[0]}: .*, 3 ranks$", text, re.MULTILINE)
    assert re.search(rf"^  --job {os.getpid()}: .*, \d+ ranks$", text, re.MULTILINE)


STARTER = """
import os, threading
import torchestra as dist
from torchestra.launcher import launch

def work():
    dist.init_process_group()
    os.write(1, b"ready\\n")
    threading.Event().wait()

for _ in range(2):
    if os.fork() == 0:
        launch(work, 2, kind="threads")
threading.Event().wait()
"""


def test_a_process_that_started_several_jobs_names_none_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", STARTER]
    with WarmProgram(command, stdout=subprocess.PIPE, start_new_session=True) as starter:
        try:
            assert starter.stdout is not None
            assert [starter.stdout.readline() for _ in range(4)] == [b"ready\n"] * 4
            started = Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()
            code, text = run(capsys, "top", "--once", "--job", str(starter.pid))
        finally:
            os.killpg(starter.pid, signal.SIGKILL)
    assert code == 1
    assert f"process {starter.pid} has started 2 jobs" in text
    assert sorted(re.findall(r"\n  --job (\d+): ", text)) == sorted(started)


def test_of_a_rank_that_has_started_a_job_its_own_is_meant(
    job: ProcessWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> tuple[int, str]:
        dist.barrier()
        told = 0, ""
        if dist.get_rank() == 0:
            told = run(capsys, "top", "--once", "--interval", "0.05", "--job", str(os.getpid()))
        dist.barrier()
        return told

    (code, text), _ = run_world("threads", 2, body)
    assert (code, text.startswith(f"job {os.getpid()} ")) == (0, True), text


def test_a_foreign_file_is_named_and_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with bystander("os.write(os.memfd_create('torchestra:not one'), b'something else')") as pid:
        code, text = run(capsys, "top", "--once", "--job", str(pid))
    assert code == 1
    assert f"process {pid}: this is not an arena of torchestra: it is not a sealed memory file" in text


def test_threads_are_found_too(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> str:
        dist.barrier()
        told = ""
        if dist.get_rank() == 0:
            told = run(capsys, "top", "--once", "--interval", "0.05", "--job", str(os.getpid()))[1]
        dist.barrier()
        return told

    zero, _ = run_world("threads", 2, body)
    assert zero.count(f" {os.getpid()} ") >= 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["top", "--interval", "0"], "must be between 0.05 and 3600 seconds, got 0"),
        (["top", "--interval", "soon"], "must be between 0.05 and 3600 seconds, got soon"),
        (["top", "--speed", "nan"], "must be between 0.01 and 10000, got nan"),
        (["report", "--seconds", "-1"], "must be between 0 and 3600 seconds, got -1"),
        (["metrics", "--interval", "0"], "must be between 0.001 and 86400 seconds, got 0"),
        (["metrics", "--interval", "-1"], "must be between 0.001 and 86400 seconds, got -1"),
        (["metrics", "--interval", "nan"], "must be between 0.001 and 86400 seconds, got nan"),
        (["report", "--out", "x.json", "--job", "1", "--from", "y"], "not allowed with argument"),
    ],
)
def test_wrong_arguments(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--out", "x.txt"],
            "--out must end in .json, .csv, .parquet, or be a directory for --format",
        ),
        (
            ["--out", "x.csv", "--format", "kineto"],
            "--format kineto writes into a directory, got --out x.csv",
        ),
        (["--format", "kineto"], "--format kineto needs a directory: --out DIRECTORY"),
    ],
)
def test_a_path_that_does_not_suit_the_format(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(capsys, "report", *arguments)
    assert code == 1
    assert told in text


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents": [3]}',
        '{"traceEvents": [{"ph": "X"}]}',
        '{"traceEvents": [{"ph": "X", "pid": 1, "tid": 1, "name": "by another program"}]}',
    ],
)
def test_what_is_no_trace_is_refused(
    content: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    code, text = run(capsys, "report", "--out", str(tmp_path / "x.csv"), "--from", str(path))
    assert code == 1
    assert f"{path} is not a trace that torchestra has written" in text
    code, text = run(capsys, "report", "--out", "x.csv", "--from", str(tmp_path / "none"))
    assert code == 1
    (tmp_path / "empty").mkdir()
    code, text = run(capsys, "report", "--out", "x.csv", "--from", str(tmp_path / "empty"))
    assert (code, text.count("there are no traces")) == (1, 1)


FAILING = """
import time, torch, torchestra as dist
dist.init_process_group()
group = dist.new_group([1, 0], group_desc="pair")
dist.all_reduce(torch.ones(21))
dist.all_reduce(torch.ones(22), group=group)
if dist.get_rank() == 1:
    while dist.flight_record().ranks[0].operations[-1].count != 23:
        time.sleep(0.002)
    raise ValueError("this rank fails")
dist.all_reduce(torch.ones(23))
"""


def damaged_trace(path: Path, name: str, value: object) -> Path:
    """A trace of two ranks, in whose first operation, or else whose first group, a value is another."""
    said = {"number": 1, "bytes": 4, "state": "done", "waited_us": 1.0, "waited_for": 1, "op": "SUM"}
    group = {"name": "g", "group": "g", "size": 2}
    event = {"ph": "X", "name": "all_reduce", "pid": 1, "tid": 0, "ts": 5.0, "dur": 2.0, "args": said}
    for part in (said, group, event):
        part.update({name: value} if name in part else {})  # type: ignore[attr-defined]
    names = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": group}]
    names += [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": rank, "args": {"name": "r", "pid": 9 + rank}}
        for rank in range(2)
    ]
    path.write_text(json.dumps({"traceEvents": [*names, event]}))
    return path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("bytes", bad) for bad in (None, "many", -1, 1e308, 1 << 70, True)),
        *(("waited_for", bad) for bad in (2, -1, "rank 1", [])),
        *(("size", bad) for bad in (1, 1 << 40, "two")),
        *((name, float("nan")) for name in ("waited_us", "ts", "dur")),
        ("tid", 2),
        ("op", {}),
        ("state", None),
    ],
)
def test_a_damaged_trace_is_refused_in_one_line(
    name: str, value: object, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = damaged_trace(tmp_path / "kept.json", "none", None)
    assert run(capsys, "report", "--from", str(path))[0] == 0, "it is right before"
    code, text = run(capsys, "report", "--from", str(damaged_trace(path, name, value)))
    assert code == 1
    assert text.startswith(f"torchestra report: {path} is not a trace that torchestra has written, or it is")
    assert text.count("\n") == 1


def test_what_a_terminal_obeys_is_not_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = damaged_trace(tmp_path / "kept.json", "name", "\x1b[2J[red]")
    code, text = run(capsys, "report", "--from", str(path))
    assert code == 0, text
    assert "\x1b" not in text


def test_the_launcher_keeps_the_record_of_a_job_that_fails(tmp_path: Path) -> None:
    """Of all its groups, though the ranks that are left are ended at once."""
    script, kept = tmp_path / "fails.py", tmp_path / "kept"
    script.write_text(FAILING)
    command = ["run", "-n", "2", "--record", str(kept), str(script)]
    command = [sys.executable, "-m", "torchestra", *command]
    ended = run_warm(command, capture_output=True, timeout=100)
    assert ended.returncode == 1
    assert b"this rank fails" in ended.stderr
    out = tmp_path / "trace.json"
    assert main(["report", "--out", str(out), "--from", str(kept)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    counts = {e["args"]["count"]: e["args"]["state"] for e in events if e["name"].startswith("all_reduce")}
    assert counts.keys() == {21, 22, 23}
    assert counts[21] == counts[22] == "done"
    assert counts[23] in ("running", "failed")
