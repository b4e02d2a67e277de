"""Modules on the CPU and on GPUs: the same tests for both, the second where there is one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ddp_models import Branches, batch, expected_gradients, gradients, loss, mlp, share
from torch import nn

import torchestra as dist
from devices import DEVICES, gpus, kind_for
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.nn.parallel.coalesced import broadcast_coalesced
from torchestra.sharded import Shard, ShardMetadata, init_from_local_shards
from worlds import run

SIZE = 2


def ids_of(device: str, form: str) -> list[Any] | None:
    """Return ``device_ids``: nothing on the CPU; the number of the GPU, or the device itself."""
    if device == "cpu" or form == "none":
        return None
    return [0] if form == "number" else [torch.device("cuda", 0)]


def close(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return torch.allclose(found.cpu(), expected, rtol=1e-4, atol=1e-6)


def train_as_one_process(model: nn.Module, device: str, form: str, as_views: bool) -> None:
    """Inputs come from the CPU: with ``device_ids`` they are moved to the module."""
    rank = dist.get_rank()
    wrapped = DistributedDataParallel(
        copy.deepcopy(model).to(device), ids_of(device, form), gradient_as_bucket_view=as_views
    )
    assert wrapped.join_device.type == wrapped.device.type == device
    data = wrapped._get_ddp_logging_data()
    assert data["device_ids"] == ("" if ids_of(device, form) is None else "0")
    assert data["is_multi_device_module"] == 0
    for seed in range(3):
        samples = batch(SIZE, seed)
        expected = expected_gradients(model, samples, SIZE)
        wrapped.zero_grad()
        own = share(samples, rank, SIZE)
        loss(wrapped(own.to(device) if form == "none" else own)).backward()
        found = gradients(wrapped)
        assert all(each is not None and each.device.type == device for each in found)
        assert all(map(close, found, expected))


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("form", ["number", "device", "none"])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_one_process(device: str, form: str, as_views: bool) -> None:
    run(kind_for(device), SIZE, train_as_one_process, mlp(), device, form, as_views)


class OverDevices(nn.Module):
    """A layer on each of some devices."""

    def __init__(self, devices: list[str]) -> None:
        super().__init__()
        self.devices = devices
        self.layers = nn.ModuleList(nn.Linear(6, 6).to(device) for device in devices)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, device in zip(self.layers, self.devices, strict=True):
            x = layer(x.to(device)).tanh()
        return x


def train_over_devices(devices: list[str], static: bool) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = OverDevices(devices)
    on_cpu = copy.deepcopy(model).cpu()
    on_cpu.devices = ["cpu"] * len(devices)
    wrapped = DistributedDataParallel(copy.deepcopy(model), static_graph=static)
    for seed in range(3):
        samples = batch(SIZE, seed)
        wrapped.zero_grad()
        loss(wrapped(share(samples, rank, SIZE))).backward()
        assert all(map(close, gradients(wrapped), expected_gradients(on_cpu, samples, SIZE)))
    with pytest.raises(ValueError, match="device_ids names cuda:0, but"):
        DistributedDataParallel(model, [0])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "devices",
    [
        pytest.param(["cpu", "cuda:0"], marks=gpus(1)),
        pytest.param(["cuda:0", "cuda:1"], marks=gpus(2)),
        pytest.param(["cuda:0", "cuda:1", "cuda:2", "cuda:3"], marks=gpus(4)),
    ],
    ids=["CPU and GPU", "2 GPUs", "4 GPUs"],
)
def test_a_module_over_several_devices(devices: list[str], static: bool) -> None:
    """A bucket is on one device; hooks run on a thread for each."""
    run("processes", SIZE, train_over_devices, devices, static)


def leave_unused(device: str, options: dict[str, bool]) -> list[bool]:
    """Rank r uses branch r of three; which have gradients afterwards."""
    wrapped = DistributedDataParallel(
        Branches().to(device), ids_of(device, "number"), find_unused_parameters=True, **options
    )
    for _ in range(2):
        wrapped.zero_grad()
        loss(wrapped(batch(1), dist.get_rank())).backward()
    return [branch.weight.grad is not None for branch in wrapped.module.branches]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_used_by_some_get_the_average_used_by_none_stay_none(device: str, options: dict[str, bool]) -> None:
    assert run(kind_for(device), SIZE, leave_unused, device, options) == [[True, True, False]] * SIZE


def use_all_on_one_rank(device: str) -> list[bool]:
    wrapped = DistributedDataParallel(
        Branches(2).to(device), ids_of(device, "number"), find_unused_parameters=True
    )
    loss(wrapped(batch(1), *([0, 1] if dist.get_rank() == 0 else [1]))).backward()
    return [branch.weight.grad is not None for branch in wrapped.module.branches]


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_that_uses_all_parameters_still_hears_of_those_that_do_not(device: str) -> None:
    assert run(kind_for(device), SIZE, use_all_on_one_rank, device) == [[True, True]] * SIZE


def pass_futures(device: str) -> None:
    """A hook's future, and what is chained to it, is what gradients become."""
    wrapped = DistributedDataParallel(mlp().to(device), ids_of(device, "number"))

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert bucket.buffer().device.type == device
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.ones_like(bucket.buffer()))
        return future.then(lambda done: done.value() * 2)

    wrapped.register_comm_hook(None, hook)
    loss(wrapped(batch(1))).backward()
    assert all(bool((each.grad == 2).all()) for each in wrapped.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_futures_of_hooks(device: str) -> None:
    run(kind_for(device), SIZE, pass_futures, device)


def train_with_a_built_in_hook(model: nn.Module, device: str) -> None:
    wrapped = DistributedDataParallel(copy.deepcopy(model).to(device), ids_of(device, "number"))
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    samples = batch(SIZE)
    loss(wrapped(share(samples, dist.get_rank(), SIZE))).backward()
    assert all(map(close, gradients(wrapped), expected_gradients(model, samples, SIZE)))


@pytest.mark.parametrize("device", DEVICES)
def test_built_in_hooks(device: str) -> None:
    run(kind_for(device), SIZE, train_with_a_built_in_hook, mlp(), device)


class WithShards(nn.Module):
    """A layer, and a parameter of which every rank has a part."""

    def __init__(self, device: str) -> None:
        super().__init__()
        rank = dist.get_rank()
        about = ShardMetadata([rank * 5, 0], [5, 10], f"rank:{rank}/{device}")
        shards = init_from_local_shards([Shard(torch.randn(5, 10, device=device), about)], [5 * SIZE, 10])
        self.layer = nn.Linear(6, 6, device=device)
        self.table = nn.Parameter(shards)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def ignore_shards(device: str) -> None:
    module = WithShards(device)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, {"table"})
    wrapped = DistributedDataParallel(
        module, gradient_as_bucket_view=True, broadcast_buffers=False, static_graph=True
    )
    for _ in range(2):
        loss(wrapped(batch(1).to(device))).backward()
    assert module.layer.weight.grad is not None


@pytest.mark.parametrize("device", DEVICES)
def test_sharded_parameters_are_ignored(device: str) -> None:
    run(kind_for(device), SIZE, ignore_shards, device)


def sum_up_sparse(device: str, as_views: bool) -> None:
    rank = dist.get_rank()
    table = nn.EmbeddingBag(10, 3, sparse=True)
    nn.init.ones_(table.weight)
    wrapped = DistributedDataParallel(
        table.to(device), ids_of(device, "number"), gradient_as_bucket_view=as_views
    )
    wrapped(torch.tensor([[rank, 9]])).sum().backward()
    expected = torch.zeros(10, 3)
    expected[0] = expected[1] = 0.25
    expected[9] = 0.5
    assert torch.equal(table.weight.grad.to_dense().cpu(), expected)


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_sparse_gradients(device: str, as_views: bool) -> None:
    run(kind_for(device), SIZE, sum_up_sparse, device, as_views)


def broadcast_all(device: str) -> None:
    rank = dist.get_rank()
    dtypes = (torch.float16, torch.float32, torch.float16, torch.float64, torch.float32)
    target = [part for dtype in dtypes for part in torch.arange(60).to(device, dtype).chunk(5)]
    for root in range(SIZE):
        tensors = [each.clone() if rank == root else torch.zeros_like(each) for each in target]
        broadcast_coalesced(tensors, dist.group.WORLD, root, most_bytes=256)
        assert all(torch.equal(found, right) for found, right in zip(tensors, target, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_many_tensors_are_broadcast_together(device: str) -> None:
    run("threads", SIZE, broadcast_all, device)


def join_uneven(device: str) -> list[float]:
    wrapped = DistributedDataParallel(nn.Linear(1, 1, bias=False).to(device), ids_of(device, "number"))
    nn.init.zeros_(wrapped.module.weight)
    found = []
    with wrapped.join():
        for _ in range(1 + dist.get_rank()):
            wrapped.zero_grad()
            wrapped(torch.ones(1, 1)).sum().backward()
            found.append(wrapped.module.weight.grad.item())
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_uneven_inputs(device: str) -> None:
    """A rank without inputs contributes zeros, and the sums are divided by all ranks."""
    assert run(kind_for(device), SIZE, join_uneven, device) == [[1.0], [1.0, 0.5]]
