"""Fixtures of the tests of the flight recorder and its readers."""

from __future__ import annotations

import pytest
import torch

from fork_server import start_server


@pytest.fixture(scope="session", autouse=True)
def _ranks_start_warm() -> None:
    """The fork server is forked before any test starts a thread."""
    torch.set_num_threads(1)
    start_server()
