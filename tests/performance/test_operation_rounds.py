"""Operations are timed in rounds: a time that one round was disturbed in does not count."""

from __future__ import annotations

from collections import Counter

import pytest

from torchestra.launcher.api import launch
from torchestra.monitor.operation_timing import Cell, Timing
from torchestra.performance import operation_rounds
from torchestra.performance.operation_rounds import LONG_S, join_and_time, time_rounds

SMALL, LARGE, LARGER = (Cell("all_reduce", "float32", 4 << power) for power in (0, 10, 20))


def timed(patch: pytest.MonkeyPatch, times_s: dict[Cell, list[float]]) -> Counter[Cell]:
    """Have each round take the next of these times of a cell; return how often each was timed."""
    calls: Counter[Cell] = Counter()

    def time_call(call: Cell, seconds: float, group: None, least_batch: int) -> Timing:
        calls[call] += 1
        return Timing(1e6 * times_s[call][calls[call] - 1], 0.0, 0.0, 1)

    patch.setattr(operation_rounds, "time_call", time_call)
    patch.setattr(operation_rounds, "prepare", lambda cell, group: cell)
    return calls


def test_one_disturbed_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, {SMALL: [1e-6, 9e-6, 2e-6], LARGE: [8e-6, 3e-6, 3e-6]})
    assert time_rounds([SMALL, LARGE], 0.1) == pytest.approx([2e-6, 3e-6])


def test_long_operations_are_timed_once_and_larger_ones_not(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {SMALL: [1e-6] * 3, LARGE: [2 * LONG_S], LARGER: [9.0]}
    calls = timed(monkeypatch, times)
    assert time_rounds([*times], 0.1, stops=True) == [pytest.approx(1e-6), 2 * LONG_S, None]
    assert calls == {SMALL: 3, LARGE: 1}
    timed(monkeypatch, times)
    assert time_rounds([*times], 0.1)[-1] == 9.0


def test_all_ranks_get_the_same_times() -> None:
    one, other = launch(join_and_time, 2, [SMALL, Cell("barrier", "float32", 0)], 1e-4, kind="threads")
    assert one == other
    assert all(one)
