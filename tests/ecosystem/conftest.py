"""What the tests of other people's software share, and the table of how long each took (software_times.py).

With ``--rounds 3`` what is timed is run three times on Gloo and three times on torchestra, by turns, and for
longer: make test-ecosystem SOFTWARE=lightning ARGS="--rounds 3".
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from software_times import Times

from fork_server import start_server

sys.path.insert(0, str(Path(__file__).parents[1] / "interop"))  # torch_worlds and small_transformer


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option by which times are measured."""
    parser.addoption("--rounds", type=int, default=1, help="runs on Gloo and on torchestra, for times")


_times = pytest.StashKey[Times]()


@pytest.fixture(scope="session", autouse=True)
def _ranks_start_warm() -> None:
    """The fork server is forked before any test starts a thread, and has imported what ranks use."""
    importlib.import_module("torch._dynamo")
    torch.set_num_threads(1)
    start_server()


def pytest_configure(config: pytest.Config) -> None:
    """Make the table of times."""
    config.stash[_times] = Times(config.getoption("--rounds"))


@pytest.fixture(scope="session")
def times(request: pytest.FixtureRequest) -> Times:
    return request.config.stash[_times]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the times, which say little where other programs compute."""
    times = config.stash[_times]
    for line in times.lines() if times.runs else ():
        terminalreporter.write_line(line)
