"""The part of the benchmark that calls other workers."""

from __future__ import annotations

import pytest

from benchmarks import remote_calls
from benchmarks.options import BenchOptions
from benchmarks.remote_calls import measure_remote_calls


@pytest.mark.usefixtures("forked")
def test_remote_calls_are_measured_for_every_workload_and_both_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_calls, "_TURNS_PER_ROUND", 1)
    monkeypatch.setattr(remote_calls, "_LEAST_CALLS", 1)
    table, notes = measure_remote_calls(BenchOptions(nproc=(2,), seconds=0.001, rounds=1))
    assert notes == []
    assert [row.label for row in table.rows] == [
        "an int",
        "a tensor of 4 KB",
        "a tensor of 1 MB",
        "a tensor of 64 MB",
        "a tensor of 1 MB, negated",
        "a tensor of 64 MB, negated",
        "2,000 calls in flight, each",
    ]
    for row in table.rows:
        assert set(row.values) == {"torchestra", "tensorpipe"}
        assert all(value > 0 for value in row.values.values())
