"""Fixtures of the tests of groups on several hosts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from worlds import start_server

# The table of collectives serves here too.
sys.path.append(str(Path(__file__).parents[1] / "collectives"))


@pytest.fixture(scope="session", autouse=True)
def _ranks_start_warm() -> None:
    """The fork server is forked before any test starts a thread."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # which operators of torch, and its optimizers, import late
    start_server()
