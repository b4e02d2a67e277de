"""The part of the benchmark that trains: every model, every way, in a few steps."""

from __future__ import annotations

import pytest

from benchmarks import training
from benchmarks.options import BenchOptions
from benchmarks.training import measure_training


def test_training_is_measured_for_every_model_and_both_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_TURNS_PER_ROUND", 2)
    table, notes = measure_training(BenchOptions(nproc=(2,), seconds=0.001, rounds=1))
    assert notes == []
    assert [row.label.split(":")[0] for row in table.rows] == [
        "2 ranks, MLP 64-128-10, batch 32",
        "2 ranks, MLP 1024-2048-2048-1024, batch 16",
        "2 ranks, transformer, 2 layers, width 128, sequence 64, batch 8",
    ]
    for row in table.rows:
        assert set(row.values) == {"torchestra", "gloo"}
        for way, value in row.values.items():
            low, high = row.intervals[way]
            assert 0 < low <= value <= high
