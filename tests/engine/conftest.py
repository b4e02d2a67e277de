"""Fixtures of the tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mailboxes import Ranks

from fork_server import start_server


@pytest.fixture(scope="session", autouse=True)
def _ranks_start_warm() -> None:
    """The fork server is forked before any test starts a thread."""
    torch.set_num_threads(1)
    start_server()


@pytest.fixture
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()
