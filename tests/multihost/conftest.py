"""Fixtures of the tests of groups on several hosts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from real_hosts import why_no_hosts
from simulated import SECONDS

from fork_server import start_server
from torchestra.engine.multihost import failure_detector

# The table of collectives serves here too.
sys.path.append(str(Path(__file__).parents[1] / "collectives"))


@pytest.fixture(scope="session", autouse=True)
def _ranks_start_warm() -> None:
    """The fork server is forked before any test starts a thread."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # which operators of torch, and its optimizers, import late
    start_server()


@pytest.fixture(autouse=True)
def _hosts_have_time_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than the seconds after which a rank goes on without an answer."""
    monkeypatch.setattr(failure_detector, "_ANSWER_SECONDS", SECONDS)


@pytest.fixture(scope="session")
def no_hosts_in_spite_of_rights() -> None:
    """Fail a test on hosts that a process with these rights must be able to make."""
    pytest.fail(f"it has CAP_NET_ADMIN and CAP_SYS_ADMIN, and yet there are no hosts: {why_no_hosts()}")
