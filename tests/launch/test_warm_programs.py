"""What the tests of this folder rest on: a program that is forked is one like any other to who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from warm_programs import TAG, WarmProgram

PROGRAM = """
import os, sys
leads = os.getsid(0) == os.getpid()
print(sys.argv[1:], os.environ["MINE"], os.getcwd(), "torch" in sys.modules, leads, flush=True)
print("to stderr", file=sys.stderr)
{statement}
"""


def start(folder: Path, statement: str, monkeypatch: pytest.MonkeyPatch) -> WarmProgram:
    (folder / "program.py").write_text(PROGRAM.format(statement=statement))
    monkeypatch.setenv("MINE", "of this test")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "program", "an", "argument"]
    return WarmProgram(command, cwd=folder, start_new_session=True, text=True, **pipes)


@pytest.mark.parametrize(
    ("statement", "code", "told"),
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no more')", 1, "no more\n"),
        ("raise ValueError(input())", 1, "ValueError: typed\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import atexit; atexit.register(print, 'at exit', file=sys.stderr)", 0, "at exit\n"),
    ],
)
def test_it_finds_what_it_was_given_and_its_end_is_told(
    statement: str, code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = (program := start(tmp_path, statement, monkeypatch)).communicate("typed\n", timeout=100)
    assert out == f"['an', 'argument'] of this test {tmp_path} True True\n"
    assert err.startswith("to stderr\n")
    assert err.endswith(told)
    assert program.returncode == code


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
