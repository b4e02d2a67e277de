"""A calibration is read back as it was written, and a damaged file is refused by the name of the field."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchestra.errors import InvalidArgumentError
from torchestra.performance.calibration import (
    Calibration,
    Conditions,
    HostCalibration,
    LinkCalibration,
    LinkClass,
    OperationFactor,
    Rate,
    Slowdown,
    StepCalibration,
    StepTimes,
)
from torchestra.performance.interpolation import factor_at

HOST = HostCalibration(
    cores=2,
    call_s=1e-6,
    flag_s=1e-7,
    wakeup_s=5e-6,
    switch_s=2e-6,
    time_slice_s=3e-3,
    copy=(Rate(1, 1 << 10, 20e9), Rate(1, 1 << 20, 10e9), Rate(4, 1 << 10, 20e9), Rate(4, 1 << 20, 2.5e9)),
    fetch=(Rate(1, 1 << 20, 9e9),),
    reduce=(Rate(1, 1 << 20, 8e9),),
    per_op_s={"bridge": 2e-5},
    operations=(OperationFactor("barrier", 2, 0, 1.5),),
    work_slowdowns=(Slowdown(2, 1 << 10, 2.0), Slowdown(2, 1 << 20, 1.0), Slowdown(4, 1 << 10, 4.0)),
)
LINK = LinkCalibration(
    (LinkClass(65536, 3e-5, 1e-5, 1e-5, 2e-5, 8e-9), LinkClass(None, 3e-5, 2e-5, 2e-5, 4e-5, 8e-9)),
)
STEP = StepCalibration("Linear", (4096, 65536), "float32", (StepTimes(1, 0.1, 0.2, 0.01, (0.05, 0.15)),))
CALIBRATION = Calibration(HOST, LINK, STEP, Conditions("a machine", {"torch": "2"}, busy_share=0.1))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    for calibration in (CALIBRATION, Calibration(HOST)):
        calibration.save(tmp_path / "machine.json")
        assert Calibration.load(tmp_path / "machine.json") == calibration


@pytest.mark.parametrize(
    ("keys", "value", "told"),
    [
        (("host", "flags_s"), 1.0, "unknown field host.flags_s"),
        (("host", "call_s"), None, "host.call_s must be a number"),
        (("host", "call_s"), True, "host.call_s must be a number"),
        (("host", "call_s"), -1.0, "HostCalibration.call_s must be a finite number >= 0, got -1.0"),
        (("host", "call_s"), float("nan"), "HostCalibration.call_s must be a finite number >= 0, got nan"),
        (("host", "cores"), 1.5, "host.cores must be a whole number"),
        (("host", "copy"), [], "HostCalibration.copy must have at least one rate"),
        (
            ("host", "copy", 1, "bytes_per_s"),
            0,
            r"host.copy\[1\]: Rate.bytes_per_s must be a finite number > 0",
        ),
        (("host", "per_op_s", "bridge"), float("inf"), r"HostCalibration.per_op_s\['bridge'\]"),
        (("link", "classes", 1, "up_to_bytes"), 9, "only the last has up_to_bytes None"),
        (("step", "times", 0, "ready_s"), [0.2, 0.1], "StepTimes.ready_s must be >= 0 and must not fall"),
        (("host", "operations", 0, "factor"), 0.0, "OperationFactor.factor must be a finite number > 0"),
        (("step", "bucket_bytes"), [1], "1 ranks have 2 times ready_s for 1 buckets"),
        (("version",), 2, "not a calibration of version 3"),
    ],
)
def test_a_damaged_file_is_refused_by_the_name_of_the_field(
    tmp_path: Path, keys: tuple[Any, ...], value: object, told: str
) -> None:
    path = tmp_path / "machine.json"
    CALIBRATION.save(path)
    found = json.loads(path.read_text())
    *outer, last = keys
    inner = found
    for key in outer:
        inner = inner[key]
    inner[last] = value
    path.write_text(json.dumps(found))
    with pytest.raises(InvalidArgumentError, match=told):
        Calibration.load(path)


def test_a_missing_field_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    CALIBRATION.save(path)
    found = json.loads(path.read_text())
    del found["host"]["flag_s"]
    path.write_text(json.dumps(found))
    with pytest.raises(InvalidArgumentError, match=r"the field host\.flag_s is missing"):
        Calibration.load(path)
    with pytest.raises(InvalidArgumentError, match="torchestra calibrate"):
        Calibration.load(tmp_path / "none.json")


def test_rates_between_the_measured_ones() -> None:
    assert HOST.copy_bytes_per_s(1 << 8) == 20e9  # beyond an end: the end
    assert HOST.copy_bytes_per_s(1 << 30) == 10e9
    assert HOST.copy_bytes_per_s(1 << 15) == pytest.approx(1 / (0.5 / 20e9 + 0.5 / 10e9))  # half way
    assert HOST.copy_bytes_per_s(1 << 20, ranks=4) == 2.5e9
    assert HOST.copy_bytes_per_s(1 << 20, ranks=9) == 2.5e9
    assert HOST.copy_bytes_per_s(1 << 20, ranks=2) == pytest.approx(1 / (2 / 3 / 10e9 + 1 / 3 / 2.5e9))


def test_slowdowns_between_the_measured_ones() -> None:
    assert HOST.work_slowdown(1 << 10, ranks=1) == 2.0  # beyond an end: the end
    assert HOST.work_slowdown(1 << 15, ranks=2) == pytest.approx(1.5)
    assert HOST.work_slowdown(1 << 10, ranks=3) == pytest.approx(3.0)
    assert HOST.call_slowdown(3) == 1.0  # none was measured


def test_factors_of_operations_between_the_measured_ones() -> None:
    known = [
        OperationFactor("scan", ranks, nbytes, 4.0 if ranks == 2 else 1.0)
        for ranks in (2, 8)
        for nbytes in (4, 64)
    ]
    known += [OperationFactor("scan", 2, 1024, 1.0), OperationFactor("barrier", 2, 0, 3.0)]
    assert factor_at(known, "scan", 16, ranks=2) == pytest.approx(4.0)
    assert factor_at(known, "scan", 256, ranks=2) == pytest.approx(2.0)  # half way of both logarithms
    assert factor_at(known, "scan", 4, ranks=4) == pytest.approx(2.0)
    assert factor_at(known, "scan", 1 << 20, ranks=64) == 1.0  # beyond an end: the end
    assert factor_at(known, "barrier", 0, ranks=2) == pytest.approx(3.0)
    assert factor_at(known, "reduce", 16, ranks=2) == 1.0  # none was measured


def test_the_class_of_a_message_and_the_nearest_number_of_ranks() -> None:
    assert LINK.of(65536) is LINK.classes[0]
    assert LINK.of(65537) is LINK.classes[1]
    four = replace(STEP.times[0], ranks=4)
    step = replace(STEP, times=(*STEP.times, four))
    assert step.at(3) is four
    assert step.at(16) is four
