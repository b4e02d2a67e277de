"""Predicted beside measured: measurements are kept, predicted again, and compared."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.prediction import main
from benchmarks.prediction_report import Result, kind_of
from benchmarks.ranks.predicted import SMALL_BUCKETS, STEP, STEP_SOURCE, join_and_time
from torchestra.launcher.api import launch
from torchestra.performance.calibration import (
    Calibration,
    HostCalibration,
    LinkCalibration,
    LinkClass,
    OperationFactor,
    Rate,
    StepCalibration,
    StepTimes,
)
from torchestra.performance.decoding import encode
from torchestra.performance.machine import Machine
from torchestra.performance.prediction import steady_state_seconds
from torchestra.performance.workload import Operation

RATES = (Rate(1, 1 << 20, 10e9),)
HOST = HostCalibration(2, 1e-6, 1e-7, 1e-5, 1e-6, 3e-3, RATES, RATES, RATES)
LINK = LinkCalibration((LinkClass(None, 1e-4, 1e-5, 1e-5, 1e-5, 1e-8),), shares_cores=True)
STEPS = StepCalibration(STEP_SOURCE, (1 << 20,), "float32", (StepTimes(1, 0.01, 0.02, 0.001, (0.015,)),))


def test_errors_are_relative_to_the_measured_time() -> None:
    result = Result(2, 3, 100, "barrier", 0, measured_s=2.0, predicted_s=1.5)
    assert result.error == -0.25
    assert result.layout == "2 hosts x 3, 100 Mbit/s"
    assert Result(1, 16, 0, "barrier", 0, 1.0, 1.0).layout == "1 host x 16"


@pytest.mark.parametrize(
    ("hosts", "ranks", "operation", "nbytes", "told"),
    [
        (1, 2, "scan", 4, "operations: calibrated"),
        (1, 2, "scan", 8, "operations: other sizes"),
        (1, 3, "scan", 4, "operations: other numbers of ranks"),
        (1, 3, "scan", 8, "operations: other numbers of ranks and sizes"),
        (2, 1, "barrier", 0, "operations: calibrated"),
        (3, 1, "barrier", 0, "operations: other numbers of hosts"),
        (1, 1, STEP, 0, "a training step: calibrated"),
        (1, 1, SMALL_BUCKETS, 0, "a training step: held out"),
        (2, 1, STEP, 0, "a training step: held out"),
    ],
)
def test_what_was_held_out(hosts: int, ranks: int, operation: str, nbytes: int, told: str) -> None:
    host = replace(HOST, operations=(OperationFactor("scan", 2, 4, 1.0),))
    link = replace(LINK, operations=(OperationFactor("barrier", 1, 0, 1.0),))
    result = Result(hosts, ranks, 100, operation, nbytes, 1.0, 1.0)
    assert kind_of(result, Calibration(host, None, STEPS), {100: link}) == told


def test_what_was_measured_is_predicted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, output = tmp_path / "measured.json", tmp_path / "again.json"
    cells = [(1, 2, 0, "all_reduce", 4096), (2, 1, 100, "barrier", 0), (1, 1, 0, STEP, 0)]
    names = ("hosts", "ranks_per_host", "mbit", "operation", "nbytes")
    told = {
        "calibration": encode(Calibration(HOST, None, STEPS)),
        "links": {"100": encode(LINK)},
        "per_op_s": {"100": {"multihost_call": 1e-3}},
        "results": [
            {**dict(zip(names, cell, strict=True)), "measured_s": 0.05, "again_s": 0.06} for cell in cells
        ],
    }
    measured.write_text(json.dumps(told))
    monkeypatch.setattr(sys, "argv", ["prediction", "--again", str(measured), "-o", str(output)])
    assert main() == 0
    found = json.loads(output.read_text())["results"]
    assert [tuple(each[name] for name in names) for each in found] == cells
    operation, barrier, step = (each["predicted_s"] for each in found)
    assert operation == steady_state_seconds(Operation("all_reduce", 4096), Machine(1, 2, HOST))
    assert barrier > 1e-3  # what operations over hosts cost was measured with the link
    assert 0.031 <= step < 0.04
    shown = capsys.readouterr().out
    assert "median error of all 3" in shown
    assert "of measuring again: 20.0%" in shown
    assert "2 hosts x 1, 100 Mbit/s" in shown


def test_ranks_time_operations_and_the_step() -> None:
    cells = [("barrier", 0), ("broadcast", 4096), (STEP, 0)]
    one, other = launch(join_and_time, 2, cells, 0.001, kind="threads")
    assert one == other  # both tell of the slower rank
    assert all(seconds > 0 for seconds in one)
