"""What people do with torch.distributed, each as a function for all ranks that says nothing of a backend.

The default group exists. What a function returns, a list of numbers, is to be the same on every backend.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from small_transformer import batch, train, transformer
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

Numbers = list[float]


def mean(losses: Numbers) -> Numbers:
    total = torch.tensor(losses)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def trained(model: nn.Module, **options: Any) -> Numbers:
    return mean(train(model, dist.get_rank(), dist.get_world_size(), **options))


# -- sharded training


def fsdp1(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, **options: Any) -> Numbers:
    policy = ModuleWrapPolicy({type(transformer()[0])})
    model = FullyShardedDataParallel(
        transformer(),
        auto_wrap_policy=policy,
        sharding_strategy=strategy,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        **options,
    )
    losses = trained(model)
    norm = model.clip_grad_norm_(1.0)
    with FullyShardedDataParallel.summon_full_params(model):
        total = sum(parameter.double().abs().sum().item() for parameter in model.parameters())
    return [*losses, float(norm), total]


def fsdp1_sharding_gradients_only() -> Numbers:
    return fsdp1(ShardingStrategy.SHARD_GRAD_OP)


def fsdp1_hybrid() -> Numbers:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fsdp1(ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)


def sharded(mesh: Any, **options: Any) -> nn.Sequential:
    model = transformer()
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def norm_and_sum(model: nn.Module) -> Numbers:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    whole = [parameter.full_tensor().double().abs().sum().item() for parameter in model.parameters()]
    return [norm.item(), sum(whole)]


def fsdp2() -> Numbers:
    model = sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    return [*trained(model), *norm_and_sum(model)]


def hsdp() -> Numbers:
    """Sharded within rows of a mesh, replicated across them."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh, reshard_after_forward=False)
    return [*trained(model), *norm_and_sum(model)]


# -- pipelines


def pipeline(schedule: Callable[..., Any], stages_of_each: int = 1) -> Numbers:
    """Three steps of a model of one layer for each stage; the losses of the last."""
    rank, size = dist.get_rank(), dist.get_world_size()
    number = size * stages_of_each
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(number)]
    mine = [layers[rank + size * turn] for turn in range(stages_of_each)]
    stages = [
        PipelineStage(layer, rank + size * turn, number, torch.device("cpu"))
        for turn, layer in enumerate(mine)
    ]
    work = schedule(
        stages if stages_of_each > 1 else stages[0],
        n_microbatches=2 * size,
        loss_fn=nn.functional.mse_loss,
    )
    optimizer = torch.optim.SGD([each for layer in mine for each in layer.parameters()], lr=0.1)
    inputs, targets = torch.randn(16, 8), torch.randn(16, 8)
    steps = []
    for _ in range(3):
        losses: list[torch.Tensor] = []
        last = {"target": targets, "losses": losses} if rank == size - 1 else {}
        work.step(*([inputs] if rank == 0 else []), **last)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(float(sum(loss.item() for loss in losses)))
    total = torch.tensor(steps)
    dist.all_reduce(total)
    return total.tolist()


def pipeline_gpipe() -> Numbers:
    return pipeline(ScheduleGPipe)


def pipeline_1f1b() -> Numbers:
    return pipeline(Schedule1F1B)


def pipeline_interleaved() -> Numbers:
    return pipeline(ScheduleInterleaved1F1B, 2)


# -- tensors over meshes


def redistribution() -> Numbers:
    """Every way from one placement to another on a mesh of two dimensions, of sizes that do not divide."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("rows", "columns"))
    whole = torch.arange(35.0).reshape(5, 7)
    placements = [Shard(0), Shard(1), Replicate()]
    pairs = [(first, second) for first in placements for second in placements]
    found = []
    for source in pairs:
        tensor = distribute_tensor(whole, mesh, source)
        for target in pairs:
            moved = tensor.redistribute(placements=target)
            assert torch.equal(moved.full_tensor(), whole)
            found.append(moved.to_local().sum().item())
    product = distribute_tensor(whole, mesh, [Shard(1), Replicate()]) @ distribute_tensor(
        whole.t().contiguous(), mesh, [Shard(0), Replicate()]
    )
    assert product.placements[0] == Partial()
    torch.testing.assert_close(product.full_tensor(), whole @ whole.t())
    return [*found, product.redistribute(placements=[Shard(0), Shard(0)]).to_local().sum().item()]


def meshes_and_functional_collectives() -> Numbers:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
    found = []
    for group in (mesh["outer"], mesh["inner"], mesh._flatten() if size > 2 else mesh["outer"]):
        tensor = torch.arange(4.0) + rank
        number = group.size()
        found += functional.all_reduce(tensor, "sum", group).tolist()
        found += functional.all_gather_tensor(tensor, 0, group).tolist()
        found += functional.reduce_scatter_tensor(tensor.repeat(number), "max", 0, group).tolist()
        even = [4 // number] * number if 4 % number == 0 else None
        if even:
            found += functional.all_to_all_single(tensor, even, even, group).tolist()
        found += functional.broadcast(tensor, 0, group).tolist()
        found += group.get_coordinate()
    return [float(each) for each in found]


# -- checkpoints


def shared_folder() -> str:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    assert folder[0] is not None
    return folder[0]


def checkpoint_and_reshard() -> Numbers:
    """Save sharded over all ranks, at once and in the background; load into another division of the ranks."""
    size = dist.get_world_size()
    model = sharded(init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trained(model, optimizer=optimizer)
    names = ("model", "optimizer")
    folders = [shared_folder(), shared_folder()]
    state = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    checkpoint.save(state, checkpoint_id=folders[0])
    checkpoint.async_save(copy.deepcopy(state), checkpoint_id=folders[1]).result()
    losses = trained(model, optimizer=optimizer)
    for folder in folders:
        other = sharded(init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
        again = torch.optim.Adam(other.parameters(), lr=0.01)
        loaded = dict(zip(names, get_state_dict(other, again), strict=True))
        checkpoint.load(loaded, checkpoint_id=folder)
        set_state_dict(
            other,
            again,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        torch.testing.assert_close(trained(other, optimizer=again), losses)
    return losses


def objects_and_uneven_batches() -> Numbers:
    """Join, DistributedSampler, gathered objects and a monitored barrier: what training loops are made of."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    inputs = batch(0)[0].flatten()[: 4 * (3 + rank)].reshape(-1, 4)
    losses = []
    with torch.distributed.algorithms.Join([model]):
        for line in inputs:
            loss = model(line).square().sum()
            loss.backward()
            losses.append(loss.item())
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, losses)
    dist.monitored_barrier()
    return [each for losses in gathered for each in losses]
