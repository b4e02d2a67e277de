"""Fixtures of the tests of interop."""

from __future__ import annotations

import importlib

import pytest
import torch

import worlds
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


@pytest.fixture(autouse=True)
def _processes_serve_one_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts the groups that a process has had, and what serves "gloo" is decided once in it."""
    monkeypatch.setattr(worlds, "processes_are_shared", False)
