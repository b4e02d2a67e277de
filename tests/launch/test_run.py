"""``torchestra run``: what a script finds, and how a job ends."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from warm_programs import run_warm

SURROUNDINGS = """
    import atexit, json, multiprocessing, os, pickle, random, sys
    import numpy, torch

    class Thing:
        pass

    def main():
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        print(json.dumps({
            **{name: os.environ[name] for name in names},
            "ports": [os.environ["MASTER_PORT"], os.environ["TORCHESTRA_STORE"].split(":")[1]],
            "argv": sys.argv,
            "file": __file__,
            "path": sys.path[0],
            "threads": torch.get_num_threads(),
            "thing": type(pickle.loads(pickle.dumps(Thing()))).__module__,
            "random": [random.random(), numpy.random.rand()],
            "seed": torch.initial_seed(),
            "input": sys.stdin.read(),
            "group": os.getpgrp() == os.getpid(),
        }))
        print("to stderr", file=sys.stderr)

    if __name__ == "__main__":
        atexit.register(print, "at exit")
        not_closed = open(sys.argv[1] + os.environ["RANK"], "w")
        not_closed.write("flushed")
        main()
"""


def test_a_script_finds_what_it_would_as_a_program_of_its_own(start, tmp_path, nothing_left) -> None:
    job = start(SURROUNDINGS, 2, f"{tmp_path}/out", "--flag", fresh=True, stdin=subprocess.PIPE)
    code, out, err = job.finish("typed")
    assert code == 0, err
    found: dict[int, dict] = {}
    for line in out.splitlines():
        match = re.fullmatch(r"\[rank (\d)\] (\{.*\}|at exit)", line)
        assert match, line
        if match[2] != "at exit":
            found[int(match[1])] = json.loads(match[2])
    assert sorted(found) == [0, 1]
    assert out.count("at exit") == 2
    assert sorted(err.splitlines()) == ["[rank 0] to stderr", "[rank 1] to stderr"]
    path = str(tmp_path / "job.py")
    for rank, facts in found.items():
        assert facts["RANK"] == facts["LOCAL_RANK"] == str(rank)
        assert facts["WORLD_SIZE"] == facts["LOCAL_WORLD_SIZE"] == "2"
        assert facts["MASTER_ADDR"] == "127.0.0.1"
        assert str(facts["threads"]) == facts["OMP_NUM_THREADS"]
        assert facts["argv"] == [path, f"{tmp_path}/out", "--flag"]
        assert facts["file"] == path
        assert facts["path"] == str(tmp_path)
        assert facts["thing"] == "__main__"
        assert facts["group"]
        assert Path(f"{tmp_path}/out{rank}").read_text() == "flushed"
    assert found[0]["ports"] == found[1]["ports"], "all ranks meet in one place"
    assert len(set(found[0]["ports"])) == 2, "a program's own store can have MASTER_PORT"
    assert found[0]["random"] != found[1]["random"], "ranks draw numbers of their own"
    assert found[0]["seed"] == found[1]["seed"], "torch begins the same everywhere, as without a launcher"
    assert [found[rank]["input"] for rank in (0, 1)] == ["typed", ""]
    nothing_left()


def test_a_module_runs_as_with_python_m_and_alone_without_a_prefix(tmp_path) -> None:
    package = tmp_path / "tool"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import sys; from . import __name__ as me\n"
        "print(me, __name__, __package__, sys.argv[1:], sys.path[0], end='')"
    )
    command = [sys.executable, "-m", "torchestra", "run", "-n", "1", "-m", "tool", "-m", "x"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_warm(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"tool __main__ tool ['-m', 'x'] {tmp_path}", done.stderr


ENDINGS = {
    "raise": ("def f():\n        raise ValueError('no')\n    f()", 1),
    "sys.exit": ("sys.exit(7)", 7),
    "message": ("sys.exit('no more')", 1),
    "os._exit": ("os._exit(9)", 9),
    "signal": ("os.kill(os.getpid(), signal.SIGABRT)", 128 + signal.SIGABRT),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_first_failure_ends_the_job_with_its_exit_code(ending, start, nothing_left) -> None:
    """Every other rank waits for ever, and one of them would not go for a SIGTERM."""
    statement, code = ENDINGS[ending]
    job = start(
        f"""
    import os, signal, sys, threading
    rank = os.environ["RANK"]
    if rank == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == "1":
    {"    " + statement.replace(chr(10), chr(10) + "    ")}
    threading.Event().wait()
    """,
        3,
    )
    finished = job.finish()
    assert finished.code == code
    last = finished.err.splitlines()[-1]
    assert re.match(r"torchestra: rank 1 \(pid \d+\) failed: ", last), finished.err
    assert last.endswith("; ranks 0, 2 ended with it")
    if ending == "raise":
        lines = finished.err.splitlines()
        begin = lines.index("Traceback (most recent call last):")
        assert re.search(r'job.py", line \d+, in <module>$', lines[begin + 1]), (
            "it begins in the user's script"
        )
        assert lines[-2] == "ValueError: no", "the traceback is last on the screen"
    if ending == "signal":
        assert "killed by SIGABRT" in last
    if ending == "message":
        assert "[rank 1] no more" in finished.err
    nothing_left()


@pytest.mark.parametrize("frames", ["users", "full"])
def test_an_error_of_torchestra_is_shown_with_the_frames_of_the_program_alone(
    frames, start, monkeypatch
) -> None:
    """A newcomer reads what is wrong beneath their own line, and not beneath a dozen of ours."""
    monkeypatch.setenv("TORCHESTRA_TRACEBACK", frames)
    job = start("import torchestra as dist\ndist.init_process_group()\ndist.all_reduce([1])\n", 1)
    lines = [line for line in job.finish().err.splitlines() if line.startswith("  File ")]
    assert re.search(r'job.py", line \d+, in <module>$', lines[0])
    assert (len(lines) > 1) == (frames == "full")


def test_the_rank_that_was_killed_is_named_not_those_that_noticed(start, tmp_path, nothing_left) -> None:
    job = start(
        """
    import os, select, sys, threading, time
    from torchestra.errors import RankFailedError
    note = sys.argv[1]
    if os.environ["RANK"] == "2":
        print(os.getpid(), flush=True)
        threading.Event().wait()
    while not (os.path.exists(note) and open(note).read()):
        time.sleep(0.001)
    victim = os.pidfd_open(int(open(note).read()))
    print("watching", flush=True)
    select.select([victim], [], [])
    raise RankFailedError("rank 2 died", (2,))
    """,
        4,
        str(tmp_path / "note"),
    )
    victim = job.line()
    (tmp_path / "note").write_text(victim)
    assert job.lines(3) == ["watching"] * 3
    os.kill(int(victim), signal.SIGKILL)
    code, _, err = job.finish()
    assert code == 128 + signal.SIGKILL
    *others, last = err.splitlines()
    assert last.startswith(f"torchestra: rank 2 (pid {victim}) failed: killed by SIGKILL")
    # One that has not noticed yet when the launcher has is ended before it does.
    told = [line for line in others if line.endswith("] torchestra.errors.RankFailedError: rank 2 died")]
    assert told
    assert not any("2" in line.partition("]")[0] for line in told)
    nothing_left()


@pytest.mark.parametrize(
    ("signum", "code", "message"),
    [(signal.SIGINT, 130, "ended by SIGINT"), (signal.SIGTERM, 143, "ended by SIGTERM")],
)
def test_a_signal_to_the_launcher_ends_all_ranks(signum, code, message, start, nothing_left) -> None:
    job = start(
        """
    import os, signal, sys, threading
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
    try:
        print("ready", flush=True)
        threading.Event().wait()
    finally:
        print("cleaned up", flush=True)
    """,
        3,
    )
    assert job.lines(3) == ["ready"] * 3
    job.send(signum)
    finished = job.finish()
    assert finished.code == code
    assert finished.out.count("cleaned up") == 3, "each rank could end in order"
    assert finished.err.endswith(f"torchestra: {message}\n")
    if signum == signal.SIGINT:
        assert "KeyboardInterrupt\n" in finished.err, "where the ranks were is told"
    nothing_left()


def test_a_second_signal_ends_ranks_that_do_not_listen(start, nothing_left) -> None:
    job = start(
        """
    import os, signal, threading
    signal.signal(signal.SIGINT, lambda *_: os.write(1, b"not now\\n"))
    print("ready", flush=True)
    while True:
        threading.Event().wait()
    """,
        2,
    )
    assert job.lines(2) == ["ready"] * 2
    job.send(signal.SIGINT)
    assert job.lines(2) == ["not now"] * 2
    job.send(signal.SIGINT)
    assert job.finish().code == 130
    nothing_left()


WITH_CHILDREN = """
    import subprocess, sys, threading
    child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    print(child.pid, flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize("victim", ["launcher", "server"])
def test_whoever_is_killed_no_rank_and_no_child_of_a_rank_is_left(victim, start, nothing_left) -> None:
    job = start(WITH_CHILDREN, 3)
    job.lines(3)
    server = int(Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text())
    os.kill(job.process.pid if victim == "launcher" else server, signal.SIGKILL)
    finished = job.finish()
    if victim == "server":
        assert finished.code == 1
        assert "fork server was killed" in finished.err
    nothing_left()


def test_a_failing_job_takes_the_children_of_its_ranks_along(start, nothing_left) -> None:
    job = start(WITH_CHILDREN.replace("threading.Event().wait()\n", "sys.exit(3)\n"), 2)
    assert job.finish().code == 3
    nothing_left()


def test_nobody_reading_the_output_ends_the_job(start, nothing_left) -> None:
    job = start("while True: print('more')", 2)
    job.line()
    job.process.stdout.close()
    assert job.process.wait(100) == 128 + signal.SIGPIPE
    nothing_left()


def test_on_a_terminal_rank_0_is_typed_to_and_ctrl_c_ends_the_job(script, nothing_left) -> None:
    path = script(
        """
    import os, threading
    if os.environ["RANK"] == "0":
        print("hello", input("name? "), flush=True)
    threading.Event().wait()
    """
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-m", "torchestra", "run", "-n", "2", path])
    screen = b""

    def read_until(wanted: bytes) -> None:
        nonlocal screen
        while wanted not in screen:
            assert select.select([terminal], [], [], 60)[0], screen
            screen += os.read(terminal, 4096)

    read_until(b"name? ")
    assert b"\x1b[0;36m[rank 0]\x1b[0m name? " in screen, "coloured, and shown though the line is not ended"
    os.write(terminal, b"Ada\n")
    read_until(b"hello Ada")
    os.write(terminal, b"\x03")
    read_until(b"torchestra: ended by SIGINT")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    os.close(terminal)
    nothing_left()


def test_a_halted_job_goes_on(start, nothing_left) -> None:
    """Ctrl-Z: the ranks, which are no part of the terminal's job, halt and go on with the launcher."""
    job = start("import os, threading\nprint(os.getpid(), flush=True)\ninput()", 1, stdin=subprocess.PIPE)
    rank = int(job.process.stdout.readline())

    def await_state(pid: int, state: str) -> None:
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    await_state(rank, "S")
    job.send(signal.SIGTSTP)
    await_state(job.process.pid, "T")
    await_state(rank, "T")
    job.send(signal.SIGCONT)
    await_state(rank, "S")
    assert job.finish("\n").code == 0
    nothing_left()


def test_wrong_arguments_are_refused_at_once() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "torchestra", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    missing = run("run", "no/such/file.py")
    assert (missing.returncode, missing.stderr) == (2, "torchestra run: there is no file 'no/such/file.py'\n")
    wrong = run("run", "--nproc", "0", "x.py")
    assert wrong.returncode == 2
    assert "must be a positive number or 'auto', got '0'" in wrong.stderr
    assert run("walk").returncode == 2
    assert run().returncode == 2


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["run", "no/such/file.py"]])
def test_the_command_line_answers_without_loading_torch(arguments) -> None:
    program = (
        "import sys\n"
        "from torchestra.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'llvmlite' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=60, capture_output=True)
