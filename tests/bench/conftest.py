"""What tests of benchmarks share."""

from __future__ import annotations

import pytest

from benchmarks import scripts, worker_processes
from warm_programs import WarmSubprocess


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the launchers and ranks that a benchmark starts, where what is tested is what they do then."""
    for module in (scripts, worker_processes):
        monkeypatch.setattr(module, "subprocess", WarmSubprocess())
