"""The part of the benchmark that trains: every model, every way, in a few steps."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks import training
from benchmarks.options import BenchOptions
from benchmarks.training import measure_training, spinning_processes


@pytest.mark.usefixtures("forked")
def test_training_is_measured_for_every_model_and_both_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_TURNS_PER_ROUND", 2)
    monkeypatch.setattr(training, "_WARM_UP_STEPS", 2)
    monkeypatch.setattr(training, "_LEAST_STEPS", 1)
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


def test_on_a_loaded_machine_a_process_spins_on_each_core_meanwhile() -> None:
    cores = os.sched_getaffinity(0)
    with spinning_processes() as spinning:
        while {frozenset(os.sched_getaffinity(each)) for each in spinning} != {frozenset({c}) for c in cores}:
            time.sleep(0.001)
        assert len(spinning) == len(cores)
    for each in spinning:
        with pytest.raises(ProcessLookupError):
            os.kill(each, 0)
