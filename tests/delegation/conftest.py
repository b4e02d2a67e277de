"""Fixtures of the tests of delegated operations."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fork_server import start_server

# The table of collectives serves here too.
sys.path.append(str(Path(__file__).parents[1] / "collectives"))


@pytest.fixture(scope="session", autouse=True)
def _ranks_start_warm() -> None:
    """The fork server is forked before any test starts a thread."""
    torch.set_num_threads(1)
    start_server()
