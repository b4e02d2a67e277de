"""Runs of tests that would not end: each ends, and says which test and which line of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent

UNREACHABLE = """
import signal, pytest

@pytest.mark.timeout(0.2)
def test_unreachable():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    signal.sigwait([signal.SIGUSR1])  # unreachable

def test_another():
    pass
"""

NO_LINE = """
def fails():
    raise ValueError("of a line that nobody knows")

EIGHT_WITHOUT = bytes([0x80 | 15 << 3 | 7])  # instructions: see CPython's Objects/locations.md
table = EIGHT_WITHOUT * -(-len(fails.__code__.co_code) // 16)
fails.__code__ = fails.__code__.replace(co_linetable=table)

def test_fails():
    try:
        fails()
    finally:
        assert False, "with its context"

def test_another():
    pass
"""

LEAVING = """
import signal, subprocess

def test_leaves():
    child = subprocess.Popen(["sleep", "300"], start_new_session=True, stderr=subprocess.PIPE)
    child.returncode = 0
    signal.sigwait([signal.SIGUSR1])  # hangs
"""


def run_pytest(folder: Path, source: str, limits: str) -> tuple[int, str]:
    """Run a test file with the plugin on a worker; the exit code, and all that is read until the end."""
    (folder / "test_it.py").write_text(source)
    options = [
        "-p",
        "run_limit",
        "-p",
        "no:torchestra",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:hypothesispytest",
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-n", "1", "-c", os.devnull, "--rootdir", folder, folder],
        env={**os.environ, "PYTHONPATH": str(_FOLDER), "TORCHESTRA_TEST_LIMITS": limits},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ran.returncode, ran.stdout


def test_an_error_at_no_line_fails_its_test_alone(tmp_path: Path) -> None:
    """As a time limit's is that comes at an instruction which belongs to no line."""
    code, printed = run_pytest(tmp_path, NO_LINE, "60,60,5")
    assert code == pytest.ExitCode.TESTS_FAILED, printed
    assert "of a line that nobody knows" in printed
    assert "1 failed, 1 passed" in printed
    assert "INTERNALERROR" not in printed


def test_a_test_that_no_time_out_reaches_is_ended_with_its_stacks(tmp_path: Path) -> None:
    code, said = run_pytest(tmp_path, UNREACHABLE, "100,0.1,15")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "::test_unreachable has run for" in said
    assert "line 7 in test_unreachable" in said
    assert "1 failed, 1 passed" in said
    assert "FAILED: a process that ran tests has crashed, gw0" in said


def test_a_run_that_does_not_end_is_ended_and_nothing_is_left(tmp_path: Path) -> None:
    for limit in (2, 8, 32, 128):  # a busy machine may need longer than that to begin
        code, said = run_pytest(tmp_path, LEAVING, f"{limit},100,0.1")
        assert code != pytest.ExitCode.OK
        assert f"the tests have not ended after {limit} s" in said
        if "::test_leaves" in said:
            break
    assert "line 7 in test_leaves" in said
    assert "was left behind, and is killed: sleep 300" in said
