"""Fixtures of the tests of functional collectives, meshes, group lookup and the fake world."""

from __future__ import annotations

import pytest
import torch

from fork_server import start_server
from worlds import guard_absent_devices


@pytest.fixture(scope="session", autouse=True)
def _ranks_start_warm() -> None:
    """The fork server is forked before any test starts a thread."""
    torch.set_num_threads(1)
    start_server()
    guard_absent_devices()
