"""Test what torch knows of backends and debug levels, and code asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchestra
import torchestra.compat as dist
from torchestra.compat.distributed_c10d import _compute_bucket_assignment_by_size
from torchestra.compat.optim.zero_redundancy_optimizer import _broadcast_object
from worlds import run


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that the test registers are forgotten after it."""
    monkeypatch.setattr(dist.Backend, "_plugins", dict(dist.Backend._plugins))
    monkeypatch.setattr(dist.Backend, "backend_list", list(dist.Backend.backend_list))
    monkeypatch.setattr(dist.Backend, "backend_capability", dict(dist.Backend.backend_capability))
    known = dict(dist.Backend.default_device_backend_map)
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", known)
    monkeypatch.setattr(dist.Backend, "DUMMY", "dummy", raising=False)


@pytest.fixture
def level() -> Iterator[None]:
    before = dist.get_debug_level()
    yield
    dist.set_debug_level(before)


def test_what_there_is() -> None:
    assert dist.is_available()
    assert dist.is_gloo_available()
    nccl = torch.distributed.is_nccl_available()
    assert dist.is_nccl_available() is nccl
    names = ["gloo", "GLOO", "cpu:gloo", "fake", "nccl", "cpu:gloo,cuda:nccl", "nonsense"]
    assert [dist.is_backend_available(name) for name in names] == [True] * 4 + [nccl] * 2 + [False]


def test_without_a_group_there_is_nothing_to_destroy() -> None:
    """torch has an AssertionError here, which tear-downs of tests expect, and a ValueError elsewhere."""
    for kind in (AssertionError, ValueError):
        with pytest.raises(kind, match="there is nothing to destroy"):
            dist.destroy_process_group()


def test_a_backend_is_its_name_in_lower_case() -> None:
    assert dist.Backend("NCCL") == dist.Backend.NCCL == "nccl"
    assert dist.Backend("Own") == "own"
    with pytest.raises(ValueError, match="string-ish"):
        dist.Backend(3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchanged")
def test_a_registered_backend_is_known() -> None:
    dist.Backend.register_backend("Dummy", lambda: None, devices=["hpu"])
    assert dist.is_backend_available("dummy")
    assert "dummy" in dist.Backend.backend_list
    assert dist.Backend._plugins["DUMMY"].extended_api is False
    assert dist.get_default_backend_for_device("hpu:1") == "dummy"
    assert repr(dist.BackendConfig("dummy")) == "hpu:dummy"


def test_which_backend_serves_which_device() -> None:
    assert dist.get_default_backend_for_device("cpu") == "gloo"
    assert dist.get_default_backend_for_device(torch.device("cuda", 1)) == "gloo"
    with pytest.raises(ValueError, match="Default backend not registered for device : hpu"):
        dist.get_default_backend_for_device("hpu")
    assert dist.BackendConfig("cpu:gloo,cuda:nccl").get_device_backend_map() == {
        "cpu": "gloo",
        "cuda": "nccl",
    }
    assert repr(dist.BackendConfig("undefined")) == "cpu:gloo,cuda:gloo"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cpu:gloo,nccl", "Invalid device:backend pairing"),
        ("cpu:gloo:1", "Invalid device:backend pairing"),
        ("cpu:gloo,cpu:nccl", "Duplicate device type cpu"),
    ],
)
def test_a_malformed_configuration_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dist.BackendConfig(text)


@pytest.mark.usefixtures("level")
def test_the_debug_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in [("detail", dist.DebugLevel.DETAIL), ("INFO", dist.DebugLevel.INFO)]:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", text)
        dist.set_debug_level_from_env()
        assert dist.get_debug_level() == expected
        assert str(expected) == f"DebugLevel.{expected.name}"
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "much")
    with pytest.raises(RuntimeError, match="must be one of `OFF`, `INFO`, or `DETAIL`"):
        dist.set_debug_level_from_env()
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG")
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() == dist.DebugLevel.OFF


def test_buckets_with_torchs_arguments() -> None:
    tensors = [torch.empty(100), torch.empty(100), torch.empty(50, dtype=torch.double)]
    assert _compute_bucket_assignment_by_size(tensors, [400]) == ([[0], [1], [2]], [400, 400, 400])
    assert _compute_bucket_assignment_by_size(tensors, [800], logger=None)[0] == [[0, 1], [2]]


def test_a_rendezvous_is_iterated(tmp_path: Path) -> None:
    store, rank, world_size = next(dist.rendezvous(f"file://{tmp_path}/met", 0, 1))
    store.set("key", "value")
    assert (store.get("key"), rank, world_size) == (b"value", 0, 1)


def mismatch_later() -> None:
    """At the level DETAIL, and in a wrapped group, a mismatch is raised by the call; else by wait()."""
    rank = torchestra.get_rank()

    def begin(group: Any) -> Any:
        return torchestra.all_reduce(torch.ones(1 + rank), group=group, async_op=True)

    plain, wrapped = (
        torchestra.new_group(),
        dist.distributed_c10d._create_process_group_wrapper(
            torchestra.new_group(), "prefix", torchestra.HashStore(), rank, 2
        ),
    )
    work = begin(plain)
    with pytest.raises(torchestra.CollectiveMismatchError):
        work.wait()
    with pytest.raises(torchestra.CollectiveMismatchError):
        begin(wrapped)
    again = torchestra.new_group()
    total = torch.ones(2)
    assert torchestra.all_reduce(total, group=again, async_op=True).wait()
    torchestra.barrier()
    if rank == 0:
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # of the process, so of both ranks
    torchestra.barrier()
    work = torchestra.all_reduce(total, group=again, async_op=True)
    assert work.is_completed()
    assert work.wait()
    assert total.tolist() == [4.0, 4.0]
    with pytest.raises(torchestra.CollectiveMismatchError):
        begin(again)


@pytest.mark.usefixtures("level")
def test_at_the_level_detail_a_mismatch_is_raised_by_the_call() -> None:
    run("threads", 2, mismatch_later)


def broadcast_state() -> Any:
    state = {"lr": 0.5, "of": torch.ones(2)} if torchestra.get_rank() == 1 else None
    return _broadcast_object(state, 1, torchestra.group.WORLD, torch.device("cpu"))


def test_an_optimizers_state_is_broadcast() -> None:
    for state in run("threads", 2, broadcast_state):
        assert (state["lr"], state["of"].tolist()) == (0.5, [1.0, 1.0])
