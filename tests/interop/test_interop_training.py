"""PyTorch's own parallel training on torchestra's engine gives what training in one process gives."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from small_transformer import train, transformer
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch_worlds import SECONDS, run

# Of other names before torch 2.13, which warns of those.
gather_pieces = getattr(functional, "all_gather_single", functional.all_gather_tensor)
reduce_pieces = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)


def mean_losses(losses: list[float]) -> torch.Tensor:
    mean = torch.tensor(losses)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean


def check(losses: torch.Tensor) -> None:
    torch.testing.assert_close(losses, torch.tensor(train(transformer())))


def by_ddp(**options: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(transformer(), bucket_cap_mb=0.01, **options)
    check(mean_losses(train(model, rank, size)))
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(others, weights)
    assert all(torch.equal(other, weights) for other in others)


def in_many_ways() -> None:
    by_ddp()
    by_ddp(find_unused_parameters=True)
    by_ddp(static_graph=True, gradient_as_bucket_view=True)


@pytest.mark.parametrize("size", [2, 3])
def test_distributed_data_parallel(size: int) -> None:
    run(size, in_many_ways)


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = transformer()
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_fsdp() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = sharded(init_device_mesh("cpu", (size,)))
    assert isinstance(next(model.parameters()), DTensor)
    check(mean_losses(train(model, rank, size)))
    if size > 2 or not hasattr(model, "set_allocate_memory_from_process_group_for_comm"):
        return
    model = sharded(init_device_mesh("cpu", (size,)))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
    group = dist.group.WORLD
    with mock.patch.object(
        type(group), "allocate_tensor", autospec=True, side_effect=group.allocate_tensor.__func__
    ) as allocate:
        check(mean_losses(train(model, rank, size)))
    assert allocate.called


@pytest.mark.parametrize("size", [2, 3])
def test_fully_sharded(size: int) -> None:
    run(size, by_fsdp)


def parallelized(mesh: DeviceMesh) -> nn.Module:
    model = transformer()
    for block in model:
        plan = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {"up": ColwiseParallel(), "down": RowwiseParallel(), "attention.out": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def by_tensor_parallel() -> None:
    model = parallelized(init_device_mesh("cpu", (dist.get_world_size(),)))
    check(torch.tensor(train(model)))


def by_both() -> None:
    """Tensor parallel within rows of a mesh, sharded across them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "within"))
    model = fully_shard(parallelized(mesh["within"]), mesh=mesh["across"])
    losses = torch.tensor(train(model, mesh["across"].get_local_rank(), 2))
    dist.all_reduce(losses, dist.ReduceOp.AVG, group=mesh["across"].get_group())
    check(losses)


def test_tensor_parallel() -> None:
    run(2, by_tensor_parallel)


def test_tensor_parallel_and_fully_sharded_over_a_mesh() -> None:
    run(4, by_both)


def move_dtensors() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(20.0).reshape(5, 4)  # which no two ranks can share evenly
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.full_tensor(), whole)
    columns = rows.redistribute(placements=[Shard(1)])
    assert torch.equal(columns.to_local(), whole.tensor_split(size, 1)[dist.get_rank()])
    product = columns @ distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    assert product.placements == (Partial(),)
    torch.testing.assert_close(product.redistribute(placements=[Replicate()]).to_local(), whole @ whole.t())
    torch.testing.assert_close(product.redistribute(placements=[Shard(0)]).full_tensor(), whole @ whole.t())
    torch.testing.assert_close(rows.sum().full_tensor(), whole.sum())


def test_dtensors() -> None:
    run(2, move_dtensors)


def save_and_load() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    path = os.path.join(os.environ["WORLD_DIRECTORY"], "checkpoint")
    mesh = init_device_mesh("cpu", (size,))
    model = sharded(mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, rank, size, optimizer)
    states, optimizer_states = get_state_dict(model, optimizer)
    checkpoint.save({"model": states, "optimizer": optimizer_states}, checkpoint_id=path)

    other = sharded(mesh)
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.01)
    states, optimizer_states = get_state_dict(other, other_optimizer)
    loaded = {"model": states, "optimizer": optimizer_states}
    checkpoint.load(loaded, checkpoint_id=path)
    set_state_dict(
        other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    for saved, restored in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(saved.full_tensor(), restored.full_tensor())
    assert not torch.equal(next(transformer().parameters()), next(other.parameters()).full_tensor())

    checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=f"{path}-2").result(SECONDS)
    blank = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    checkpoint.load({"model": blank}, checkpoint_id=f"{path}-2")
    for name, saved in model.state_dict().items():
        assert torch.equal(saved.full_tensor(), blank[name].full_tensor())


def test_distributed_checkpoint() -> None:
    run(2, save_and_load)


def compile_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD

    def step(tensor: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(tensor * 2, "sum", group)
        gathered = gather_pieces(total + rank, 0, group)
        mine = reduce_pieces(gathered, "avg", 0, group)
        swapped = functional.all_to_all_single(mine.flatten(), None, None, group)
        return functional.broadcast(swapped, 1, group)

    tensor = torch.arange(4.0) + rank
    plain = step(tensor)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(tensor)
    assert torch.equal(plain, compiled)
    first, second = (sum(torch.arange(4.0) + peer for peer in range(size)) * 2 + other for other in (0, 1))
    expected = torch.cat([first[2:], second[2:]])
    assert torch.equal(plain, expected)


def test_functional_collectives_compiled_and_not() -> None:
    run(2, compile_collectives)
