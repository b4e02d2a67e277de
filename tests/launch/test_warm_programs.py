"""What the tests of this folder rest on: a program that is forked is one like any other to who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import warm_programs
from warm_programs import (
    SERVER,
    TAG,
    FinalizedWarm,
    NestedWarm,
    WarmIfPython,
    WarmProgram,
    is_python,
    run_warm,
    share_server,
    without_leaks,
)

PROGRAM = """
import os, sys
leads = os.getsid(0) == os.getpid()
print(sys.argv[1:], os.environ["MINE"], os.getcwd(), "torch" in sys.modules, leads, flush=True)
print("to stderr", file=sys.stderr)
{statement}
"""


def start(
    folder: Path, statement: str, monkeypatch: pytest.MonkeyPatch, kind: type[WarmProgram] = WarmProgram
) -> WarmProgram:
    (folder / "program.py").write_text(PROGRAM.format(statement=statement))
    monkeypatch.setenv("MINE", "of this test")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "program", "an", "argument"]
    return kind(command, cwd=folder, start_new_session=True, text=True, **pipes)


EXIT_HOOK = "import atexit; atexit.register(print, 'at exit', file=sys.stderr)"


@pytest.mark.parametrize(
    ("kind", "statement", "code", "told"),
    [
        (WarmProgram, "", 0, ""),
        (WarmProgram, "sys.exit(7)", 7, ""),
        (WarmProgram, "sys.exit('no more')", 1, "no more\n"),
        (WarmProgram, "raise ValueError(input())", 1, "ValueError: typed\n"),
        (WarmProgram, "raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        (WarmProgram, EXIT_HOOK, 0, "at exit\n"),
        (FinalizedWarm, "sys.exit(7)", 7, ""),
        (FinalizedWarm, "raise ValueError(input())", 1, "ValueError: typed\n"),
        (FinalizedWarm, EXIT_HOOK, 0, "at exit\n"),
    ],
)
def test_it_finds_what_it_was_given_and_its_end_is_told(
    kind: type[WarmProgram],
    statement: str,
    code: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = start(tmp_path, statement, monkeypatch, kind)
    out, err = program.communicate("typed\n", timeout=100)
    assert out == f"['an', 'argument'] of this test {tmp_path} True True\n"
    assert err.startswith("to stderr\n")
    assert without_leaks(err).endswith(told)
    assert program.returncode == code


LAST = """
class Last:
    def __del__(self):
        print("taken apart", flush=True)
last = Last()
"""


@pytest.mark.parametrize(("kind", "told"), [(WarmProgram, ""), (FinalizedWarm, "taken apart\n")])
def test_one_that_is_finalized_takes_apart_what_it_has_loaded(kind: type[WarmProgram], told: str) -> None:
    ended = run_warm([sys.executable, "-c", LAST], timeout=100, capture_output=True, text=True, kind=kind)
    assert (ended.returncode, ended.stdout, without_leaks(ended.stderr)) == (0, told, "")


def test_it_can_be_waited_for_and_killed_and_what_is_left_behind_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: Any
) -> None:
    """The fixture knows processes by a variable, which a forked one has not inherited from this test."""
    program = start(tmp_path, "input()", monkeypatch)
    assert program.stdout is not None
    program.stdout.readline()
    environment = Path(f"/proc/{program.pid}/environ").read_bytes().split(b"\0")
    tag = next(each for each in environment if each.startswith(TAG.encode())).partition(b"=")[2]
    assert tag.decode() == os.environ[TAG]
    assert program.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.001)
    program.kill()
    program.communicate(timeout=100)
    assert program.returncode == -signal.SIGKILL
    nothing_left()


TELLING = """
import os, sys
main = sys.modules["__main__"]
pipe = int(os.environ.get("PIPE", "-1"))
if pipe >= 0:
    os.write(pipe, b"kept")
print(sys.argv[1:], sys.path[0], vars(main) is globals(), getattr(main, "__file__", None))
"""


def test_a_script_and_a_text_find_what_an_interpreter_gives_them(tmp_path: Path) -> None:
    """The same as a new interpreter, which is run here too."""
    script = tmp_path / "a script.py"
    script.write_text(TELLING)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "more")}
    for command in ([str(script), "x"], ["-c", TELLING, "-m", "y"]):
        told = [
            run([sys.executable, *command], env=environment, text=True, timeout=100, capture_output=True)
            for run in (run_warm, subprocess.run)
        ]
        assert told[0].stdout == told[1].stdout != "", told
        assert told[0].returncode == told[1].returncode == 0


def test_it_has_as_many_threads_as_its_environment_says() -> None:
    for number in ("1", "3"):
        command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
        environment = {**os.environ, "OMP_NUM_THREADS": number}
        assert (
            run_warm(command, env=environment, text=True, timeout=100, capture_output=True).stdout
            == f"{number}\n"
        )


def test_open_files_keep_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    monkeypatch.setenv("PIPE", str(theirs))
    with WarmProgram(
        [sys.executable, "-c", TELLING], stdout=subprocess.DEVNULL, pass_fds=[theirs]
    ) as program:
        os.close(theirs)
        assert os.read(ours, 10) == b"kept"
        assert os.read(ours, 10) == b""
    os.close(ours)
    assert program.returncode == 0


STARTING = """
import subprocess, sys
command = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
told = subprocess.run(command, capture_output=True)
other = subprocess.run(["sh", "-c", "echo other; exit 3"], capture_output=True, text=True)
print(told.stdout.decode().strip(), other.stdout.strip(), other.returncode)
"""


def test_all_variables_that_processes_are_known_by_can_be_seen_from_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTHER_TAG", "seen")
    with WarmProgram([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as program:
        while b"OTHER_TAG=seen" not in Path(f"/proc/{program.pid}/environ").read_bytes().split(b"\0"):
            assert program.poll() is None
        program.communicate("\n", timeout=100)


@pytest.mark.parametrize(("kind", "loaded"), [(NestedWarm, True), (WarmIfPython, False)])
def test_what_a_program_starts_is_forked_too_where_that_is_asked_for(kind: Any, loaded: bool) -> None:
    with kind([sys.executable, "-c", STARTING], stdout=subprocess.PIPE, text=True) as program:
        assert program.communicate(timeout=100)[0] == f"{loaded} other 3\n"


STARTING_AND_ENDING = """
import os, sys
from warm_programs import WarmProgram
ours, theirs = os.pipe()
program = f"import os, signal; os.write({theirs}, b'runs'); signal.pause()"
WarmProgram([sys.executable, "-c", program], pass_fds=[theirs])
print(os.read(ours, 4), "torch" in sys.modules, flush=True)
os._exit(0)
"""


def test_workers_share_a_server_and_what_one_leaves_is_killed_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, nothing_left: Any
) -> None:
    """A worker is a process that finds the address in its environment."""
    run_warm([sys.executable, "-c", ""], timeout=100)
    monkeypatch.setenv(SERVER, "")  # it is what it was when the test has ended
    share_server()
    path = os.pathsep.join([str(Path(warm_programs.__file__).parent), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", STARTING_AND_ENDING],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.stdout == "b'runs' False\n", ended.stderr
    nothing_left()
    assert run_warm([sys.executable, "-c", "raise SystemExit(3)"], timeout=100).returncode == 3


def test_only_what_a_forked_program_can_be_is_forked() -> None:
    for arguments in (["-m", "this"], ["-c", ""], ["script.py", "-x"], ["-u", "script.py"]):
        assert is_python([sys.executable, *arguments])
    for command in (
        [sys.executable],
        [sys.executable, "-B", "script.py"],
        [sys.executable, "-m"],
        ["sh", "-c", ""],
    ):
        assert not is_python(command)
