"""The part of the benchmark that runs torch.distributed on both backends, in a few steps."""

from __future__ import annotations

import pytest

from benchmarks.interop import measure_interop
from benchmarks.options import BenchOptions


@pytest.mark.usefixtures("forked")
@pytest.mark.timeout(300)  # as long as the script may take
def test_everything_is_measured_on_both_backends_and_losses_agree() -> None:
    table, notes = measure_interop(BenchOptions(nproc=(2,), seconds=0.001, rounds=1))
    assert notes == []
    assert [row.label.split(" (")[0] for row in table.rows] == [
        "2 ranks, all_reduce 4 B",
        "2 ranks, all_reduce 4 KB",
        "2 ranks, all_reduce 64 KB",
        "2 ranks, all_reduce 1 MB",
        "2 ranks, a step of the MLP 1024-2048-2048-1024, batch 16, by DDP",
        "2 ranks, a step of the transformer by DDP",
        "2 ranks, a step of the transformer by FSDP2",
        "2 ranks, a step of the transformer by tensor parallel",
    ]
    for row in table.rows:
        assert set(row.values) == {"torchestra", "gloo"}
        assert all(value is not None and value > 0 for value in row.values.values())
