"""What the tests of other people's software share, and the table of how long each took."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from fork_server import start_server

sys.path.insert(0, str(Path(__file__).parents[1] / "interop"))  # torch_worlds and small_transformer

SECONDS: dict[str, tuple[float, float]] = {}
"""By software: how long its training took on Gloo and on torchestra."""


@pytest.fixture(scope="session", autouse=True)
def _ranks_start_warm() -> None:
    """The fork server is forked before any test starts a thread, and has imported what ranks use."""
    importlib.import_module("torch._dynamo")
    torch.set_num_threads(1)
    start_server()


@pytest.fixture(scope="session")
def seconds() -> dict[str, tuple[float, float]]:
    return SECONDS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the times, which say little where other programs compute."""
    if SECONDS:
        terminalreporter.write_line(f"{'seconds of training':40} {'gloo':>8} {'torchestra':>11}")
    for name, (gloo, ours) in SECONDS.items():
        terminalreporter.write_line(f"{name:40} {gloo:8.2f} {ours:11.2f}")
