"""Measure what a test with ``@pytest.mark.ranks`` costs, here and with another version's sources, by turns.

    python -m benchmarks.marked_tests --other ../before/src

The test calls ``all_reduce`` once on a small tensor. Each side is a run of pytest of its own, which stays; in
each round each runs ten tests while the others wait. The processor time is that of all its processes: pytest,
the server of ranks, and the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.summary import percentile
from torchestra.system.proc import PARENT, stat_fields

_TESTS = 10
_TURN = "TORCHESTRA_BENCH_TURN"
_SOURCES = Path(__file__).resolve().parents[1] / "src"
_LIMIT_S = 300.0
_CHILDREN = slice(13, 15)
"""In stat_fields: the ticks that ended children have computed, and the system for them."""
_IMPORTS = {"torchestra": "import torchestra as dist", "torch": "from torch import distributed as dist"}

_TEST = """\
import pytest
import torch
{imports}


@pytest.mark.ranks({ranks}, world={world!r}, kind={kind!r}{backend})
@pytest.mark.parametrize("turn", range({tests}))
def test_empty(turn):
    dist.all_reduce(torch.ones(4))
"""

_CONFTEST = f"""\
import os

asks, answers = map(int, os.environ["{_TURN}"].split())
started = 0


def pytest_runtest_protocol(item):
    global started
    if started % {_TESTS} == 0:
        os.write(answers, b".")
        os.read(asks, 1)
    started += 1


def pytest_sessionfinish():
    os.write(answers, b".")
"""


class Cost(NamedTuple):
    """The seconds that ten tests took."""

    processor: float
    clock: float


class Session:
    """A run of pytest that runs ten tests each time it is asked to.

    Args:
        sources: the folder that it imports torchestra from.
        test: the text of the test file.
        folder: an empty one, for its files.
    """

    def __init__(self, sources: Path, test: str, folder: Path) -> None:
        (folder / "test_empty.py").write_text(test)
        (folder / "conftest.py").write_text(_CONFTEST)
        (folder / "pytest.ini").write_text("[pytest]\n")
        asks, self._ask = os.pipe()
        self._answers, answers = os.pipe()
        environment = {**os.environ, "PYTHONPATH": str(sources), _TURN: f"{asks} {answers}"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._output = (folder / "output").open("w+b")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_empty.py"],
            cwd=folder,
            env=environment,
            stdout=self._output,
            stderr=self._output,
            pass_fds=(asks, answers),
        )
        os.close(asks)
        os.close(answers)
        self._await()

    def run(self) -> Cost:
        """Run ten tests."""
        processor, clock = self._processor_seconds(), time.perf_counter()
        os.write(self._ask, b".")
        self._await()
        return Cost(self._processor_seconds() - processor, time.perf_counter() - clock)

    def end(self) -> None:
        """Wait until pytest has ended, after the last test; kill it if it runs on.

        Raises:
            RuntimeError: a test failed.
        """
        os.close(self._ask)
        try:
            code = self._process.wait(_LIMIT_S if sys.exc_info()[0] is None else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        os.close(self._answers)
        with self._output as output:
            output.seek(0)
            if code != 0 and sys.exc_info()[0] is None:
                raise RuntimeError(f"pytest ended with {code}:\n{output.read().decode(errors='replace')}")

    def _await(self) -> None:
        if os.read(self._answers, 1) != b".":
            self._output.seek(0)
            raise RuntimeError(f"pytest ended early:\n{self._output.read().decode(errors='replace')}")

    def _processor_seconds(self) -> float:
        return sum(map(_processor_seconds, (self._process.pid, *_descendants(self._process.pid))))


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    parents = {}
    for each in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            parents[each] = int(stat_fields(f"/proc/{each}")[PARENT])
    found = [pid]
    for known in found:
        found += [each for each, parent in parents.items() if parent == known]
    return found[1:]


def _processor_seconds(pid: int) -> float:
    """Return the processor time of a process with all its threads, and of the children that have ended.

    Its clock's number is made as by clock_getcpuclockid(3), which Python does not have. Ranks that have ended
    are children of the server.
    """
    of_children = sum(map(int, stat_fields(f"/proc/{pid}")[_CHILDREN])) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime((~pid << 3) | 2) + of_children


@contextlib.contextmanager
def _sessions(sides: Sequence[tuple[str, Path, str]]) -> Iterator[dict[str, Session]]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        sessions = {}
        for number, (name, sources, test) in enumerate(sides):
            own = Path(folder, str(number))
            own.mkdir()
            sessions[name] = Session(sources, test, own)
            ends.callback(sessions[name].end)
        yield sessions


def measure(sides: Sequence[tuple[str, Path, str]], rounds: int) -> dict[str, list[Cost]]:
    """Return by side what each round took; its first ten tests, which fork the ranks, do not count."""
    costs: dict[str, list[Cost]] = {name: [] for name, _, _ in sides}
    with _sessions(sides) as sessions:
        for number in range(rounds + 1):
            for name in list(costs) if number % 2 else reversed(costs):
                cost = sessions[name].run()
                if number > 0:
                    costs[name].append(cost)
    return costs


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the arguments say, and print medians, and the median of each round's quotients."""
    parser = argparse.ArgumentParser("python -m benchmarks.marked_tests", description=__doc__)
    parser.add_argument("--other", type=Path, help="the src folder of another version")
    parser.add_argument("--gloo", action="store_true", help="the same test on Gloo itself as well")
    parser.add_argument("--world", choices=tuple(_IMPORTS), default="torch")
    parser.add_argument("--kind", choices=("processes", "threads"), default="processes")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    tests = _TESTS * (options.rounds + 1)

    def test(backend: str = "") -> str:
        imports = _IMPORTS[options.world]
        return _TEST.format(imports=imports, tests=tests, backend=backend, **vars(options))

    sides = [("this version", _SOURCES, test())]
    if options.other is not None:
        sides.append(("the other", options.other.resolve(), test()))
    if options.gloo:
        sides.append(("Gloo", _SOURCES, test(", backend='gloo'")))
    load = os.getloadavg()[0]
    costs = measure(sides, options.rounds)
    print(
        f"ms a test, medians of {options.rounds} rounds of {_TESTS} tests on {options.ranks} {options.kind},"
        f" world {options.world!r}; load {load:.1f} to {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':14} {'processor':>24} {'clock':>24}    beside the first")
    first = costs[sides[0][0]]
    for name, found in costs.items():
        columns = [_spread([cost[which] for cost in found]) for which in (0, 1)]
        pairs = [
            percentile([one[which] / other[which] for one, other in zip(found, first, strict=True)], 0.5)
            for which in (0, 1)
        ]
        print(f"{name:14} {columns[0]:>24} {columns[1]:>24}    {pairs[0]:.2f} {pairs[1]:.2f}")
    return 0


def _spread(seconds: Sequence[float]) -> str:
    low, middle, high = (percentile([1e3 * each / _TESTS for each in seconds], at) for at in (0, 0.5, 1))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    sys.exit(main())
