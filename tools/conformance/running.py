"""Running a module's tests in worker processes that may hang, crash or kill themselves."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_STARTING_SECONDS = 120.0


class Ending(NamedTuple):
    """Describe how a test ended.

    Attributes:
        module: its source's name.
        test: its class and name.
        how: "passed", "failed", "skipped", "timed out" or "crashed"; "not loaded" of a whole module.
        text: the traceback, or why it was skipped.
        seconds: how long it took.
    """

    module: str
    test: str
    how: str
    text: str
    seconds: float


class _Worker:
    """A process that runs tests, in a session of its own, so that all of its children can be killed."""

    def __init__(self, module: str, tests: list[str], directory: Path, settings: Mapping[str, str]) -> None:
        read, write = os.pipe()
        self.output, names = directory / "output", directory / "names"
        names.write_text("\n".join(tests))
        paths = [str(directory), os.getcwd(), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **settings,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with self.output.open("wb") as output, names.open() as given:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.conformance.worker", str(write), module],
                pass_fds=[write],
                stdin=given,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        os.close(write)
        self._read = read
        self._rest = b""

    def line(self, seconds: float) -> list[Any] | None:
        """Return what it tells next, None if it has ended; TimeoutError if it says nothing for so long."""
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], seconds)
            if not ready:
                raise TimeoutError
            piece = os.read(self._read, 1 << 16)
            if not piece:
                return None
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return list(json.loads(line))

    def tail(self) -> str:
        """The end of what it has printed."""
        return self.output.read_bytes()[-4000:].decode(errors="replace")

    def close(self) -> None:
        """Kill what still runs."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        os.close(self._read)


def run_module(
    name: str,
    module: str,
    directory: Path,
    settings: Mapping[str, str],
    seconds: float,
    wanted: Callable[[str], bool],
    tell: Callable[[Ending], None],
) -> list[Ending]:
    """Run all tests of a module; how they ended.

    Args:
        name: of the module, for the report.
        module: of its test cases, importable from the directory.
        directory: of renamed modules.
        settings: environment variables.
        seconds: that one test may take.
        wanted: whether to run a test, by its name.
        tell: is called with each ending.
    """
    endings: list[Ending] = []

    def note(ending: Ending) -> None:
        endings.append(ending)
        tell(ending)

    tests = _find(name, module, directory, settings, note)
    left = [test for test in tests if wanted(test)]
    while left:
        worker = _Worker(module, left, directory, settings)
        running, since = "", time.monotonic()
        try:
            while (told := worker.line(seconds if running else _STARTING_SECONDS)) is not None:
                what, test, *how = told
                if what == "begins":
                    running, since = test, time.monotonic()
                else:
                    left.remove(test)
                    note(Ending(name, test, how[0], how[1], time.monotonic() - since))
                    running = ""
            ended, text = "crashed", worker.tail()
        except TimeoutError:
            ended, text = "timed out", f"TimeoutError: not done after {seconds:g} s\n"
        finally:
            worker.close()
        if left:
            test = running or left[0]
            left.remove(test)
            note(Ending(name, test, ended, text, time.monotonic() - since))
    return endings


def _find(
    name: str,
    module: str,
    directory: Path,
    settings: Mapping[str, str],
    note: Callable[[Ending], None],
) -> list[str]:
    worker = _Worker(module, [], directory, settings)
    try:
        found = worker.line(_STARTING_SECONDS)
    except TimeoutError:
        found = None
    finally:
        worker.close()
    if found:
        return list(found[1])
    note(Ending(name, "", "not loaded", worker.tail(), 0.0))
    return []
