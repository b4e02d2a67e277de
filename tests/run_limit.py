"""A limit for a whole run of the tests, and for tests that pytest-timeout cannot end.

pytest-timeout raises its error in the main thread of the process that runs the test: not while that thread
is in C code, nor in what is done after such an error. And nothing limits what goes on when a process has
crashed. So each run is watched by a process of its own (``run_watcher.py``). This plugin starts it, and notes
for it what runs. TORCHESTRA_TEST_LIMITS has other limits than the default ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from types import TracebackType

import pytest

from run_watcher import FOLDER, record_name

_LIMITS = "TORCHESTRA_TEST_LIMITS"
_DEFAULT_LIMITS = "2700,240,15"  # seconds: see run_watcher.Limits
_record: int | None = None
_crashed: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Start the process that watches, and the record of what this process runs."""
    global _record
    if config.option.collectonly or config.option.usepdb or config.option.trace:
        return
    if not hasattr(config, "workerinput"):
        os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="torchestra-running-")
        watcher = str(Path(__file__).with_name("run_watcher.py"))
        limits = os.environ.get(_LIMITS, _DEFAULT_LIMITS)
        started = subprocess.Popen(
            [sys.executable, "-I", "-S", watcher, folder, str(os.getpid()), limits],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        started.returncode = 0  # it outlives this process, which so does not complain of that
    if FOLDER in os.environ:
        path = os.path.join(os.environ[FOLDER], record_name(os.getpid()))
        _record = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note which test runs, since when, and how long it may."""
    _note(f"{time.monotonic()} {_limit_of(item)} {item.nodeid}")
    try:
        return (yield)
    finally:
        _note("")


def _limit_of(item: pytest.Item) -> float:
    """Return the test's time limit, as pytest-timeout has it; a day where there is none."""
    mark = item.get_closest_marker("timeout")
    if mark is not None and (mark.args or "timeout" in mark.kwargs):
        return float(mark.args[0] if mark.args else mark.kwargs["timeout"])
    return float(getattr(item.config, "_env_timeout", None) or 86400)


def _note(text: str) -> None:
    """Write to the record. Its length is 0 while the rest is being written."""
    if _record is not None:
        content = text.encode()
        os.pwrite(_record, b"    0\n" + content, 0)
        os.pwrite(_record, f"{len(content):5}\n".encode(), 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[object]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let pytest format the error of a time limit that came at an instruction without a line.

    Python 3.11 gives its entry in the traceback the line None, of which pytest's formatting dies, and with
    it the whole run.
    """
    if call.excinfo is not None:
        error: BaseException | None = call.excinfo.value
        while error is not None:
            error.__traceback__ = _with_lines(error.__traceback__)
            error = error.__cause__ or error.__context__
        call.excinfo = pytest.ExceptionInfo.from_exception(call.excinfo.value)
    return (yield)


def _with_lines(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback with the first line of its function for each entry that has none."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    for each in reversed(entries):
        line = each.tb_lineno or each.tb_frame.f_code.co_firstlineno
        traceback = TracebackType(traceback, each.tb_frame, each.tb_lasti, line)
    return traceback


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Note that a worker has crashed."""
    if error:
        _crashed.append(f"{getattr(getattr(node, 'gateway', None), 'id', node)}: {error}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Have the run fail if a worker has crashed between tests: no test has failed by that."""
    if _crashed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which workers have crashed."""
    for crash in _crashed:
        terminalreporter.write_line(f"FAILED: a process that ran tests has crashed, {crash}")
