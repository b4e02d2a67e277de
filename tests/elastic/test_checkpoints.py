"""A checkpoint is whole or is not there; the newest whole one is read when no rank has a state."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

import torchestra as dist
from elastic.training import STEPS, alone, digest, go_on, make, train
from torchestra import elastic
from torchestra.elastic import checkpoints as checkpoints_module
from torchestra.elastic import dcp
from torchestra.elastic.checkpoints import Writer
from torchestra.store import HashStore
from torchestra.world.registry import thread_rank
from worlds import WORLD_SECONDS, run

FILE = "__0_0.distcp"


def state_at(step: int, directory: Path, keep: int = 2) -> elastic.State:
    state = elastic.State(
        weights=torch.full((5,), float(step)), checkpoints=elastic.Checkpoints(directory, every=1, keep=keep)
    )
    state.step = step
    return state


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """A group of this rank alone, in which a test may write."""
    with thread_rank(0, 1, HashStore()):
        dist.init_process_group()
        yield


def write(directory: Path, *steps: int) -> None:
    for step in steps:
        state = state_at(step, directory)
        state.save_when_due()
        assert state.checkpoints is not None
        state.checkpoints.wait()


def read(directory: Path) -> tuple[int, float]:
    state = state_at(0, directory)
    assert state.checkpoints is not None
    found = state.checkpoints.load()
    assert found is not None
    state.load_state_dict(found.state)
    return state.step, float(state.parts["weights"].sum()) / 5


def names(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


def test_the_newest_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 12)
    assert names(tmp_path) == ["step-00000002", "step-00000012"]
    assert read(tmp_path) == (12, 12.0)


@pytest.mark.parametrize("harm", ["cut", "changed", "no checksum", "empty"])
def test_of_a_damaged_one_a_warning_tells_and_the_one_before_is_read(tmp_path: Path, harm: str) -> None:
    write(tmp_path, 1, 2)
    newest = tmp_path / "step-00000002"
    content = bytearray((newest / FILE).read_bytes())
    if harm == "no checksum":
        (newest / "checksums").unlink()
    elif harm == "empty":
        (newest / FILE).write_bytes(b"")
    elif harm == "cut":
        (newest / FILE).write_bytes(content[:-7])
    else:
        content[len(content) // 2] ^= 1
        (newest / FILE).write_bytes(content)
    with pytest.warns(UserWarning, match="step-00000002 is damaged"):
        assert read(tmp_path) == (1, 1.0)
    write(tmp_path, 2)
    assert read(tmp_path) == (2, 2.0), "the damaged one is replaced"


def test_without_any_nothing_is_read(tmp_path: Path) -> None:
    assert elastic.Checkpoints(tmp_path / "none").load() is None


def test_training_goes_on_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The state changes before the files are written, and a second one is left out meanwhile."""
    may_write, write_share = threading.Event(), dcp.write_share

    def write_later(*args: Any) -> None:
        assert may_write.wait(WORLD_SECONDS)
        write_share(*args)

    monkeypatch.setattr(dcp, "write_share", write_later)
    state = state_at(1, tmp_path)
    checkpoints = state.checkpoints
    assert checkpoints is not None
    state.save_when_due()
    state.parts["weights"].fill_(99)
    state.step = 2
    state.save_when_due()
    assert "no checkpoint of step 2: the one before is still being written" in caplog.text
    may_write.set()
    checkpoints.wait()
    assert read(tmp_path) == (1, 1.0)


def share_of(directory: Path, rank: int, ranks: int, step: int) -> elastic.Checkpoints:
    """Write the share of one of several ranks, and return its thread's."""
    checkpoints = elastic.Checkpoints(directory)
    parts = {"a": torch.full((3,), float(step)), "b": torch.full((4,), float(step)), "odd": {1: [], "x": {}}}
    checkpoints.save(step, parts, {}, Writer(rank, ranks, "name"))
    return checkpoints


def test_a_checkpoint_is_there_when_all_ranks_have_written_their_shares(tmp_path: Path) -> None:
    first = share_of(tmp_path, 0, 2, 3)
    assert first.load() is None
    assert first.busy
    share_of(tmp_path, 1, 2, 3).wait()
    first.wait()
    found = first.load()
    assert found is not None
    assert found.state["step"] == 3
    assert found.state["parts"]["odd"] == {1: [], "x": {}}, "what DCP does not keep is kept"
    assert found.state["parts"]["b"].tolist() == [3.0] * 4
    assert names(found.path) == [".metadata", FILE, "__1_0.distcp", "checksums"]


@pytest.mark.filterwarnings("ignore:elastic. not all ranks have written their shares")
def test_a_checkpoint_of_which_a_share_does_not_come_is_given_up(tmp_path: Path) -> None:
    share_of(tmp_path, 1, 2, 2).wait()  # rank 0 was killed
    first = share_of(tmp_path, 0, 2, 3)
    first.abandon()
    first.wait()
    assert names(tmp_path) == [], "what was left of step 2 is removed, too"
    share_of(tmp_path, 0, 1, 4).wait()
    assert names(tmp_path) == ["step-00000004"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("early", [True, False])
def test_a_rank_that_cannot_write_its_share_has_rank_0_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(warnings, "warn", lambda message, **_: warned.append(message))
    write = dcp.write_share

    def fail(directory: Path, rank: int, values: dict[str, dcp.Named]) -> None:
        if rank == 1:
            raise OSError("no room")
        write(directory, rank, values)

    monkeypatch.setattr(dcp, "write_share", fail)
    monkeypatch.setattr(checkpoints_module, "_SILENT_S", 1e9)
    ranks = [share_of(tmp_path, rank, 3, 3) for rank in ((1, 0) if early else (0, 1))]
    with pytest.raises(OSError, match="no room"):
        ranks[not early].wait()
    ranks[early].wait()
    assert "of .step-00000003.name, and rank 1 could not: there is no checkpoint of this step" in warned[0]
    assert names(tmp_path) == []


@pytest.mark.filterwarnings("ignore:elastic. not all ranks have written their shares")
def test_a_file_that_another_rank_renames_does_not_disturb_who_waits_for_it(tmp_path: Path) -> None:
    hidden = tmp_path / ".step-00000003.name"
    hidden.mkdir()
    (hidden / ".__1_planned").symlink_to("renamed")  # is listed, and cannot be found
    first = share_of(tmp_path, 0, 2, 3)
    first.abandon()
    first.wait()


def test_torchs_own_loader_reads_it_into_a_model_and_its_optimizer(tmp_path: Path) -> None:
    """Three ranks have written it, with a divided optimizer; torch reads the whole."""

    def body() -> dict[str, Any]:
        checkpoints = elastic.Checkpoints(tmp_path, every=STEPS)
        network, optimizer, scheduler = make(dist.get_rank(), 0.0, zero=True)
        state = elastic.State(
            network=network, optimizer=optimizer, scheduler=scheduler, checkpoints=checkpoints
        )
        go_on(state, 4, STEPS)
        checkpoints.wait()
        return digest(state)

    run("threads", 3, body)
    network, optimizer, _ = make(7, 0.0)
    for each in network.parameters():
        each.grad = torch.ones_like(each)
    network.never.grad = None
    optimizer.step()  # torch loads into what there is
    loaded = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.load(loaded, checkpoint_id=tmp_path / f"step-{STEPS:08}", no_dist=True)
    optimizer.load_state_dict(loaded["optimizer"])
    expected = {name: each for name, each in alone(4).items() if name not in ("mask", "step", "loss", "lr")}
    found = {name: each.numpy().tobytes() for name, each in network.state_dict().items()}
    for index, each in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{name}": value.numpy().tobytes() for name, value in each.items()}
    assert found == expected


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    state = state_at(1, tmp_path / "file")
    state.save_when_due()
    assert state.checkpoints is not None
    with pytest.raises(OSError):
        state.checkpoints.wait()


def test_ranks_must_write_to_one_directory(tmp_path: Path) -> None:
    def body() -> None:
        state = state_at(1, tmp_path / str(dist.get_rank()))
        with pytest.raises(dist.InvalidArgumentError, match="all ranks must give the same directory"):
            state.save_when_due()

    run("threads", 2, body)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep": 0}])
def test_impossible_numbers_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(dist.InvalidArgumentError, match="must be at least 1"):
        elastic.Checkpoints(tmp_path, **wrong)


@pytest.mark.parametrize(("wrote", "reads"), [(False, False), (True, True), (True, False), (False, True)])
def test_a_training_that_has_lost_all_its_ranks_goes_on_from_the_newest(
    tmp_path: Path, wrote: bool, reads: bool
) -> None:
    """On another number of ranks; whether the optimizer is divided may change too."""

    def body(steps: int, zero: bool) -> dict[str, Any]:
        checkpoints = elastic.Checkpoints(tmp_path, every=STEPS - 2)
        told = train(4, steps, checkpoints=checkpoints, zero=zero)[0]
        checkpoints.wait()
        return told

    run("threads", 2, body, STEPS - 1, wrote)
    assert names(tmp_path)[-1] == f"step-{STEPS - 2:08}"
    for told in run("threads", 3, body, STEPS, reads):
        assert told.items() <= alone(4).items()
        assert any(name.endswith(".exp_avg") for name in told)
