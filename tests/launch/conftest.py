"""Running ``torchestra run`` as a user does: a process of its own, with a script in a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from warm_programs import WarmProgram

_LIMIT_S = 100


class Finished(NamedTuple):
    """Describe how a job ended, and what it printed."""

    code: int
    out: str
    err: str


class Running:
    """A job under way, in a session of its own.

    Args:
        fresh: the launcher is a new interpreter, as a user's is, and has to load torch.
    """

    def __init__(self, arguments: list[str], *, fresh: bool = False, **options: object) -> None:
        self.process = (subprocess.Popen if fresh else WarmProgram)(
            [sys.executable, "-m", "torchestra", "run", *arguments],
            start_new_session=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,  # type: ignore[call-overload]
        )

    def line(self) -> str:
        """The next line of its output, without the prefix."""
        stdout: IO[str] = self.process.stdout  # type: ignore[assignment]
        return stdout.readline().rstrip("\n").partition("] ")[2]

    def lines(self, count: int) -> list[str]:
        """The next lines of its output, sorted."""
        return sorted(self.line() for _ in range(count))

    def said_until(self, words: str) -> str:
        """Return what it writes to its standard error, up to a line with these words."""
        stderr: IO[str] = self.process.stderr  # type: ignore[assignment]
        lines = [stderr.readline()]
        while words not in lines[-1]:
            assert lines[-1], f"it has ended without saying {words!r}: {''.join(lines)}"
            lines.append(stderr.readline())
        return "".join(lines)

    def send(self, signum: signal.Signals) -> None:
        """Signal the launcher alone."""
        self.process.send_signal(signum)

    def finish(self, stdin: str | None = None) -> Finished:
        out, err = self.process.communicate(stdin, timeout=_LIMIT_S)
        return Finished(self.process.returncode, out, err)

    def kill(self) -> None:
        """Leave nothing of it, whatever the test found."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script to a file; its path."""

    def write(text: str) -> str:
        path = tmp_path / "job.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def start(script: Callable[[str], str]) -> Iterator[Callable[..., Running]]:
    """Start ranks that run the text given: ``start(text, nproc, *arguments, **popen_options)``.

    ``before`` holds more arguments of the launcher's own.
    """
    jobs: list[Running] = []

    def begin(
        text: str, nproc: int, *arguments: str, before: tuple[str, ...] = (), **options: object
    ) -> Running:
        jobs.append(Running(["--nproc", str(nproc), *before, script(text), *arguments], **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()
