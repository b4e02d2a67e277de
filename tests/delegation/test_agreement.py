"""Test whether a group delegates: what the ranks say of their devices, and what follows for all of them."""

from __future__ import annotations

import json

import pytest
import torch

import torchestra as dist
from torchestra.communicator.host_staging import POSSIBLE
from torchestra.engine.device import agreement
from torchestra.engine.device.agreement import Agreement, DeviceRecord, DeviceRequest, agree, announce
from torchestra.errors import DistBackendError, InvalidArgumentError
from torchestra.process_group.starting import choose_backend, device_request, requires_nccl
from torchestra.store import HashStore, Store
from worlds import run


def record(index: int, identity: str) -> DeviceRecord:
    return DeviceRecord(torch.device("cuda", index), identity, "")


def told(*cards: DeviceRecord | None) -> Store:
    """A store into which these ranks have put their cards."""
    store = HashStore()
    for rank, each in enumerate(cards):
        if each is not None:
            store.append("devices", json.dumps([rank, each.identity, each.reason]) + "\n")
    return store


REQUIRED = DeviceRequest(required=True)


def test_ranks_with_devices_of_their_own_delegate() -> None:
    cards = [record(0, "a"), record(1, "b"), record(0, "c")]
    store = told(*cards)
    for each in cards:
        assert agree(store, 3, "g", each, DeviceRequest()) == Agreement(each.device, ["a", "b", "c"])
    among = Agreement(torch.device("cuda", 0), ["a", "b", "c"], True).among([2, 0])
    assert among == Agreement(torch.device("cuda", 0), ["c", "a"], True)


@pytest.mark.parametrize(
    ("cards", "reason"),
    [
        ([record(0, "a"), record(0, "a"), record(1, "b")], r"ranks \[0, 1\] share device a: .*set_device"),
        (
            [record(0, "a"), DeviceRecord(None, "", "there is no CUDA device"), record(1, "b")],
            "rank 1: there is no CUDA",
        ),
        ([record(0, "a"), record(1, "b"), None], r"ranks \[2\] have not asked for it"),
    ],
)
def test_else_all_go_through_the_host_or_hear_why(cards: list[DeviceRecord | None], reason: str) -> None:
    store = told(*cards)
    for each in cards:
        if each is not None:
            assert agree(store, 3, "g", each, DeviceRequest()) is None
            with pytest.raises(DistBackendError, match=f"group 'g': backend \"nccl\" .*{reason}"):
                agree(store, 3, "g", each, REQUIRED)


def test_a_rank_without_devices_asks_nothing_of_the_store() -> None:
    assert agree(HashStore(), 2, "g", None, DeviceRequest()) is None


class _Properties:
    def __init__(self, uuid: str) -> None:
        self.uuid = uuid


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A torch with NCCL and two GPUs, and whether CUDA has been used."""
    used = [False]
    monkeypatch.setattr(agreement, "why_no_nccl", lambda: "")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used[0])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: _Properties(f"GPU-{index}"))
    return used


def test_a_rank_names_the_device_that_the_program_has_chosen(
    two_gpus: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has not used CUDA names none, unless NCCL is asked for: then that of its local rank."""
    store = HashStore()
    assert announce(store, 0, DeviceRequest(), 1) is None
    assert store.num_keys() == 0
    assert announce(store, 0, REQUIRED, 0) == record(0, "GPU-0")
    assert announce(store, 0, REQUIRED, 3) == record(1, "GPU-1")
    assert announce(store, 0, DeviceRequest(torch.device("cuda", 0)), 1) == record(0, "GPU-0")
    two_gpus[0] = True
    assert announce(store, 0, DeviceRequest(), 0) == record(1, "GPU-1")
    monkeypatch.setenv(agreement.ENGINE_VARIABLE, "staging")
    assert announce(store, 0, DeviceRequest(), 0) is None
    assert announce(store, 0, REQUIRED, 0) == DeviceRecord(
        None, "", "TORCHESTRA_DEVICE_ENGINE=staging is set"
    )
    monkeypatch.setenv(agreement.ENGINE_VARIABLE, "smoke")
    with pytest.raises(InvalidArgumentError, match="TORCHESTRA_DEVICE_ENGINE must be staging"):
        announce(store, 0, DeviceRequest(), 0)


@pytest.mark.skipif(POSSIBLE, reason="torch was built with CUDA")
def test_without_cuda_nccl_is_refused_before_ranks_meet() -> None:
    for backend in ("nccl", "cuda:nccl", "cpu:native,cuda:nccl", "NCCL"):
        assert requires_nccl(backend)
        with pytest.raises(DistBackendError, match="Distributed package doesn't have NCCL built in: torch"):
            dist.init_process_group(backend)
    assert not dist.is_nccl_available()
    assert not dist.is_backend_available("nccl")
    with pytest.raises(InvalidArgumentError, match="not bound to a device"):
        device_request(None, 0)
    store = HashStore()
    assert announce(store, 0, DeviceRequest(), 0) is None
    assert store.num_keys() == 0


def test_nccl_is_for_cuda_only() -> None:
    assert choose_backend("cpu:native") == "native"
    assert not requires_nccl(None)
    for wrong in ("cpu:nccl", "cpu:nccl,cuda:nccl", "xpu:native", "native,threads"):
        with pytest.raises(InvalidArgumentError):
            choose_backend(wrong)


def make_groups() -> tuple[bool, str]:
    communicator = dist.group.WORLD.communicator
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    return communicator.delegation is group.communicator.delegation is None, dist.get_backend_config()


def test_groups_that_do_not_delegate_have_nothing_of_it() -> None:
    assert run("processes", 2, make_groups) == [(True, "cpu:native")] * 2
