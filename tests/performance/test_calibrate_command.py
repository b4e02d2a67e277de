"""``torchestra calibrate`` writes what it measured, keeps the rest of a file, and refuses a busy machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from test_calibration import CALIBRATION

from torchestra.cli import main
from torchestra.launcher.api import launch
from torchestra.performance import conditions, fitting, host
from torchestra.performance.calibrate import summary
from torchestra.performance.calibration import Calibration
from torchestra.performance.prediction import steady_state


def busy(share: float, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(conditions, "busy_share", lambda seconds: share)


def test_a_host_is_measured_and_the_step_in_the_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    busy(0.1, monkeypatch)
    monkeypatch.setattr(host, "launch", partial(launch, kind="threads"))  # a process takes a second to start
    monkeypatch.setattr(fitting, "_SIZES", (4, 4 << 10))
    monkeypatch.setattr(fitting, "steady_state", partial(steady_state, calls=2))  # each one is recorded
    path = tmp_path / "machine.json"
    CALIBRATION.save(path)
    assert main(["calibrate", "-o", str(path), "--only", "host", "-n", "1,2", "--seconds", "0.02"]) == 0
    told = capfd.readouterr()
    found = Calibration.load(path)
    assert (found.step, found.link) == (CALIBRATION.step, CALIBRATION.link)
    assert {rate.ranks for rate in found.host.copy} == {1, 2}
    assert found.host.per_op_s["call.all_reduce"] > 0
    assert {each.ranks for each in found.host.work_slowdowns} == {1, 2}
    assert found.conditions.busy_share == 0.1
    assert "other programs use 10% of this machine's cores" in found.conditions.warnings[0]
    assert "other programs use 10% of this machine's cores" in told.err
    assert f"wrote {path}" in told.out


def test_a_busy_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy(0.5, monkeypatch)
    assert main(["calibrate", "-o", str(tmp_path / "machine.json")]) == 1
    assert "use 50% of this machine's cores, so nothing was measured" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "link"], "two hosts"),
        (["--only", "step"], "needs --step"),
        (["--only", "step", "--step", "a.py:b"], "cannot read the calibration"),
        (["-n", "0"], "numbers of ranks must be like 1,2,4, and at most 256, got '0'"),
        (["-n", "1000"], "numbers of ranks must be like 1,2,4, and at most 256, got '1000'"),
        (["--step-nproc", "two"], "got 'two'"),
        (["--seconds", "0"], "seconds must be more than 0"),
        (["--quantile", "1"], "quantile must be between 0 and 1"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "-o", str(tmp_path / "none.json"), *arguments]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nowhere/machine.json", "."])
def test_where_no_file_can_be_written_nothing_is_measured(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "-o", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.endswith(": no file can be written there\n")


def test_the_summary_has_a_line_for_each_part() -> None:
    lines = summary(CALIBRATION)
    assert [line.split(" ")[0].rstrip(":") for line in lines] == ["host", "memory", "link", "step"]
    assert "waking 5 µs" in lines[0]
    assert "125 MB/s" in lines[2]
    assert "backward 200 ms" in lines[3]
