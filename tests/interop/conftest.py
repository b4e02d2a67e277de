"""Fixtures of the tests of interop."""

from __future__ import annotations

import importlib

import pytest
import torch

from fork_server import start_server


@pytest.fixture(scope="session", autouse=True)
def _ranks_start_warm() -> None:
    """The fork server is forked before any test starts a thread.

    What torch imports when DistributedDataParallel and FSDP2 are first used is there by then: for each rank
    to import it takes longer than the tests.
    """
    importlib.import_module("torch._dynamo")
    torch.set_num_threads(1)
    start_server()
