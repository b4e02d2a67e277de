"""Fixtures of the tests of the elastic package."""

from __future__ import annotations

import pytest
import torch

from fork_server import start_server


@pytest.fixture(scope="session", autouse=True)
def _ranks_start_warm() -> None:
    """The fork server is forked before any test starts a thread, and with what an optimizer imports."""
    torch.set_num_threads(1)
    weight = torch.ones(1, requires_grad=True)
    torch.optim.Adam([weight]).step()
    start_server()
