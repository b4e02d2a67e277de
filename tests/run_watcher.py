"""The process that watches a run of the tests from outside, and sees that it ends (see ``run_limit.py``).

- A test that goes on for minutes after its own time limit: the process that runs it writes the stacks of all
  its threads and ends; xdist reports the test and replaces the process.
- A run that takes longer than its limit: it is written which tests run, and the stacks of all threads of the
  processes that run them; then the run fails.
- What is left when pytest has ended is named and killed: who reads pytest's output would wait for its end.

A process has its stacks written by SIGABRT, for which pytest's plugin faulthandler has a handler that needs
neither the interpreter nor its lock, and that ends the process then.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = "TORCHESTRA_TEST_RUN"  # the run's folder; all processes of a run inherit it, and are known by it

_LOOK_S = 0.5
_ABORT_S = 20.0  # for the stacks of all threads
_SUMMARY_S = 60.0  # for pytest to say which tests have failed


class Limits(NamedTuple):
    """Say how long what may take, in seconds.

    Attributes:
        run: all tests.
        overdue: a test, after its own time limit is over.
        left: what is still there when pytest has ended.
    """

    run: float
    overdue: float
    left: float


class Running(NamedTuple):
    """Describe a test that a process runs."""

    pid: int
    seconds: float
    limit: float
    name: str


def main(folder: str, pytest_pid: int, limits: Limits) -> None:
    """Watch a run until it has ended, and see that it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    deadline = time.monotonic() + limits.run
    while not _has_ended(pytest_pid, _LOOK_S):
        if time.monotonic() > deadline:
            _end(folder, pytest_pid, limits)
            break
        for test in _tests(folder):
            if test.seconds > test.limit + limits.overdue:
                _say(f"{test.name} has run for {test.seconds:.0f} s, and its time-out did not end it")
                _abort([test.pid])
    _end_what_is_left(folder, limits.left)
    shutil.rmtree(folder, ignore_errors=True)


def _end(folder: str, pytest_pid: int, limits: Limits) -> None:
    """Have all processes that run tests write their stacks and end, and then pytest."""
    _say(f"the tests have not ended after {limits.run:.0f} s. Running are:")
    for test in _tests(folder):
        _say(f"in process {test.pid}, for {test.seconds:.0f} s: {test.name}")
    workers = [pid for pid in _recorded(folder) if pid != pytest_pid]
    if workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pytest_pid, signal.SIGINT)  # first: else it would start others in their place
    _abort(workers or [pytest_pid])
    if not _has_ended(pytest_pid, _SUMMARY_S):
        _say(f"pytest itself, process {pytest_pid}, does not end")
        _abort([pytest_pid])


def record_name(pid: int) -> str:
    """Return the name of a process's record: its number may be another's when it has ended."""
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if state in "XZ":
        raise ProcessLookupError(f"process {pid} has ended")
    return f"{pid}-{fields[18]}"


def _record_of(pid: int) -> str | None:
    try:
        return record_name(pid)
    except OSError:
        return None


def _recorded(folder: str) -> Iterator[int]:
    """Return the processes that have records and have not ended."""
    for name in os.listdir(folder):
        pid = int(name.partition("-")[0])
        if _record_of(pid) == name:
            yield pid


def _tests(folder: str) -> Iterator[Running]:
    for pid in _recorded(folder):
        with contextlib.suppress(OSError, ValueError):  # it has ended, it writes, or no test runs
            length, text = Path(folder, record_name(pid)).read_bytes().split(b"\n", 1)
            since, limit, name = text[: int(length)].decode().split(" ", 2)
            yield Running(pid, time.monotonic() - float(since), float(limit), name)


def _has_ended(pid: int, seconds: float) -> bool:
    """Return whether a process ends within a time."""
    name = _record_of(pid)
    deadline = time.monotonic() + seconds
    while name is not None and _record_of(pid) == name:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _abort(pids: Iterable[int]) -> None:
    """Have processes write the stacks of their threads, one after the other, and end."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
            if not _has_ended(pid, _ABORT_S):
                _say(f"process {pid} is killed: SIGABRT did not end it")
                os.kill(pid, signal.SIGKILL)


def _end_what_is_left(folder: str, seconds: float) -> None:
    """Kill what has not ended some time after pytest."""
    deadline = time.monotonic() + seconds
    while (left := _processes(folder)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    for pid, command in left.items():
        _say(f"process {pid} was left behind, and is killed: {command}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes(folder: str) -> dict[int, str]:
    """Return the processes of the run that have not ended, this one apart, with their commands."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                environment = (entry / "environ").read_bytes().split(b"\0")
                if f"{FOLDER}={folder}".encode() in environment and _record_of(int(entry.name)):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = command.strip()
    return found


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more
        os.write(2, f"\ntests: {text}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Limits(*map(float, sys.argv[3].split(","))))
