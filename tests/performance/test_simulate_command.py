"""``torchestra simulate`` answers in tables and in JSON, and refuses what makes no sense by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import HOST, link_of

import torchestra as dist
from torchestra.cli import main
from torchestra.performance.calibration import Calibration, StepCalibration, StepTimes
from worlds import run

STEP = StepCalibration(
    "a model", (1 << 20, 1 << 20), "float32", (StepTimes(1, 0.01, 0.02, 0.001, (0.01, 0.02)),)
)


@pytest.fixture
def calibration(tmp_path: Path) -> str:
    Calibration(HOST, link_of(), STEP).save(tmp_path / "here.json")
    return str(tmp_path / "here.json")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["simulate", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_operations(calibration: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(
        capsys, "--calibration", calibration, "--hosts", "2", "--ranks", "2",
        "--operations", "all_reduce:1MB,barrier", "--faults", "--sweep", "thresholds", "--control",
    )  # fmt: skip
    assert found["workload"] == "all_reduce:1MB, barrier"
    assert found["seconds"] > (1 << 20) * 8 / 1e9
    assert 0 < found["waiting_share"] < 1
    assert found["closed_form_seconds"] == pytest.approx(found["seconds"], rel=0.3)
    assert len(found["faults"]) == 4
    assert sum(each["best"] for each in found["thresholds"]) == 1
    assert {each["per"] for each in found["control"]} == {"job", "second"}


def test_another_network(calibration: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--calibration", calibration, "--hosts", "2", "--operations", "all_reduce:4MB")
    slow = answer(capsys, *common)
    fast = answer(capsys, *common, "--bandwidth", "10Gbit", "--latency", "20us")
    assert fast["seconds"] < slow["seconds"] / 4


def test_a_training_step(calibration: str, capsys: pytest.CaptureFixture[str]) -> None:
    measured = answer(capsys, "--calibration", calibration, "--hosts", "2", "--step", "--sweep", "buckets")
    assert measured["seconds"] > 0.031
    assert sum(each["best"] for each in measured["buckets"]) == 1
    given = answer(
        capsys, "--calibration", calibration, "--hosts", "2",
        "--gradients", "8MB", "--compute", "0.3", "--bucket", "4MB",
    )  # fmt: skip
    assert given["workload"] == "a training step with 8MB of gradients in 3 buckets"
    assert given["seconds"] > 0.3


def record(path: str) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
    dist.barrier()
    if dist.get_rank() == 0:
        dist.flight_record().save(path)
    dist.barrier()


def test_a_recorded_job(calibration: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("threads", 2, record, str(tmp_path / "job.json"))
    found = answer(capsys, "--calibration", calibration, "--record", str(tmp_path / "job.json"))
    assert (found["hosts"], found["ranks_per_host"]) == (1, 2), "as it was recorded"
    assert "all_reduce:3.906KB" in found["workload"]
    assert found["seconds"] > 0
    assert found["recorded_seconds"] > 0
    wider = answer(
        capsys, "--calibration", calibration, "--hosts", "4", "--record", str(tmp_path / "job.json")
    )
    assert wider["seconds"] > found["seconds"]


def test_tables(calibration: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    goal = tmp_path / "job.goal"
    arguments = [
        "--calibration",
        calibration,
        "--hosts",
        "2",
        "--operations",
        "all_reduce:1MB",
        "--goal",
        str(goal),
    ]
    assert main(["simulate", *arguments, "--faults", "--sweep", "thresholds", "--control"]) == 0
    shown = capsys.readouterr().out
    for word in (
        "takes",
        "What faults cost",
        "Thresholds",
        "(fastest)",
        "Control messages",
        "coordinator",
        "wrote",
    ):
        assert word in shown
    assert goal.read_text().startswith("num_ranks 2\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--operations", "all_reduce"], "an operation is NAME:SIZE"),
        (["--operations", "reduce_all:4"], "there is no collective 'reduce_all'"),
        (["--operations", "all_reduce:4:floaty"], "there is no dtype 'floaty'"),
        (["--operations", "all_reduce:big"], "a size is a number of bytes"),
        (["--operations", "barrier", "--hosts", "0"], "--hosts must be at least 1"),
        (["--operations", "barrier", "--ranks", "1000"], "1 to 256 ranks"),
        (
            ["--operations", "barrier", "--bandwidth", "fast"],
            "--bandwidth is a number above 0 and one of kbit",
        ),
        (["--operations", "barrier", "--latency", "0us"], "--latency is a number above 0"),
        (["--operations", "barrier", "--straggler", "0"], "take NUMBER=VALUE"),
        (["--operations", "barrier", "--straggler", "9=2"], "a straggler is a rank from 0 to 0"),
        (["--operations", "barrier", "--slow-link", "0=3"], "a share of its speed"),
        (["--operations", "barrier", "--sweep", "buckets"], "is for a training step"),
        (["--gradients", "0"], "must be above 0"),
        (["--gradients", "1MB", "--compute", "nan"], "--compute must be >= 0"),
        (["--step", "--compute", "3"], "--compute is for --gradients"),
        (["--operations", "barrier", "--bucket", "1MB"], "--bucket is for --gradients"),
        (["--record", "nowhere.json"], "nowhere.json cannot be read: No such file"),
        (["--operations", "all_to_all_single:1MB", "--hosts", "100"], "is simulated on up to 64 ranks"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str], told: str, calibration: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--calibration", calibration, *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_link_has_to_be_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Calibration(replace(HOST, cores=2)).save(tmp_path / "host.json")
    common = [
        "simulate",
        "--calibration",
        str(tmp_path / "host.json"),
        "--hosts",
        "2",
        "--operations",
        "barrier",
    ]
    assert main(common) == 2
    assert "2 hosts need a link: run `torchestra calibrate` on ranks of two hosts" in capsys.readouterr().err
    assert main([*common, "--latency", "5us"]) == 2
    assert "give both --latency and --bandwidth" in capsys.readouterr().err
