"""Measured thresholds: used by all ranks alike, and a file that cannot be believed changes nothing."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.cli import main
from torchestra.engine import tuned_thresholds
from torchestra.engine.kernels.selection import Choices
from torchestra.monitor import threshold_timing
from torchestra.monitor.threshold_timing import measure_thresholds
from torchestra.system.cache_directories import Directory
from worlds import run

BUFFER = 1 << 20
MEASURED = Choices(direct=4096, chunk=8192, share=16384, stream_above=1 << 20)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache directory that is empty, and nothing remembered of another."""
    directory = Directory(tmp_path, "a test")
    monkeypatch.setattr(tuned_thresholds, "candidates", lambda: iter([directory]))
    monkeypatch.setattr(tuned_thresholds, "choose", lambda: (directory, []))
    table = tuned_thresholds.table
    table.cache_clear()
    yield tmp_path
    table.cache_clear()


def test_what_was_measured_is_used_by_groups_of_as_many_ranks() -> None:
    tuned_thresholds.keep({2: MEASURED})
    tuned_thresholds.keep({4: replace(MEASURED, direct=0)})
    assert tuned_thresholds.choices_for_group(2, BUFFER) == MEASURED
    assert tuned_thresholds.choices_for_group(4, BUFFER).direct == 0
    assert tuned_thresholds.choices_for_group(3, BUFFER) == Choices.for_group(3, BUFFER)
    assert main(["tune", "--forget"]) == 0
    assert tuned_thresholds.choices_for_group(2, BUFFER) == Choices.for_group(2, BUFFER)


def of(numbers: dict[str, Any]) -> str:
    return json.dumps({"2": {**asdict(MEASURED), **numbers}})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_text(""), "is ignored: Expecting value"),
        (lambda path: path.write_text("[1]"), "it has no table"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "can't decode"),
        (lambda path: path.write_text(of({"chunk": "8192"})), "not a whole number"),
        (lambda path: path.write_text(of({"chunk": True})), "not a whole number"),
        (lambda path: path.write_text(of({"speed": 1})), "and nothing else"),
        (
            lambda path: path.write_text(of({"chunk": 1 << 40})),
            "chunk is 1099511627776 bytes",
        ),
        (lambda path: path.chmod(0o666), "others can write it"),
        (lambda path: path.parent.chmod(0o777), "can be written by others"),
        pytest.param(
            lambda path: os.chown(path, 4711, 4711),
            "belongs to another user",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user"),
        ),
    ],
)
def test_a_file_that_cannot_be_believed_is_ignored_with_a_word(
    spoil: Callable[[Path], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned_thresholds.say_once.cache_clear()
    spoil(tuned_thresholds.keep({2: MEASURED}))
    assert tuned_thresholds.choices_for_group(2, BUFFER) == Choices.for_group(2, BUFFER)
    assert said in capsys.readouterr().err


def own_choices() -> Choices:
    group = dist.group.WORLD
    assert group is not None
    tensor = torch.ones(10_000)
    dist.all_reduce(tensor)
    assert bool((tensor == dist.get_world_size()).all())
    choices: Choices = group.communicator.engine.choices
    return choices


def test_all_ranks_have_the_thresholds_of_whoever_made_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank that read a file would find another here."""
    directs = itertools.count(1000)
    monkeypatch.setattr(tuned_thresholds, "table", lambda: {3: replace(MEASURED, direct=next(directs))})
    assert run("threads", 3, own_choices) == [replace(MEASURED, direct=1000)] * 3


def measured_here() -> Choices:
    group = dist.group.WORLD
    assert group is not None
    return measure_thresholds(group.communicator.engine, 0.01)


def test_every_rank_measures_the_same_thresholds_and_they_can_be_used() -> None:
    first, second = run("threads", 2, measured_here)
    assert first == second
    first.check(BUFFER)


@pytest.mark.parametrize(
    ("fastest", "expected"),
    [(200_000, (256 << 10) - 1), (0, (32 << 10) - 1), (1 << 30, MEASURED.single_copy)],
)
def test_pieces_are_read_where_they_lie_from_the_size_on_that_is_faster(
    fastest: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One way takes no longer with longer pieces; the other is twice as fast from a size on."""

    def times(timing: Any, variants: Sequence[Choices], call: Any) -> list[float]:
        piece = call.args[0].nbytes // timing.ranks
        return [1.0, 0.5 if piece >= fastest else 1.0]

    monkeypatch.setattr(threshold_timing._Timing, "times", times)
    engine: Any = SimpleNamespace(size=2)
    timing = threshold_timing._Timing(engine, 0.01)
    assert threshold_timing._single_copy(timing, MEASURED) == expected


@pytest.mark.parametrize("wrong", [["-n", "1"], ["-n", "2,x"], ["--seconds", "0"], ["--seconds", "nan"]])
def test_wrong_arguments_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *wrong]) == 2
    assert "torchestra tune: --" in capsys.readouterr().err
