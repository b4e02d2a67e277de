"""``breakpoint``: one rank is in the debugger, the others wait."""

from __future__ import annotations

import io
import sys

import pytest

import torchestra as dist
from torchestra.errors import InvalidArgumentError
from worlds import run


def stop_twice() -> list[float]:
    """Return the default group's time-out after each call of the same line."""
    group = dist.group.WORLD
    assert group is not None
    found: list[float] = []
    for _ in range(2):
        dist.breakpoint(1, skip=1, timeout_s=1234)
        found.append(group.timeout.total_seconds())
    with pytest.raises(InvalidArgumentError, match="global rank 2 is not part"):
        dist.breakpoint(2)
    return found


def test_one_rank_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes by the first call; in the second it reads commands, which see the program's frames."""
    commands = io.StringIO("up\n" * 3 + "p found\nc\n")
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdin", commands)
    monkeypatch.setattr(sys, "stdout", written)
    first, second = run("threads", 2, stop_twice)
    assert first == second == [first[0], 1234.0]
    assert first[0] != 1234.0
    assert written.getvalue().count("rank 1 has stopped") == 1
    assert f"[{first[0]}]" in written.getvalue(), written.getvalue()
