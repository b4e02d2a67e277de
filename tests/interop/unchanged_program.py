"""A program that says torch.distributed only, and nothing of torchestra.

It trains the same small transformer by DistributedDataParallel, FSDP2, tensor parallel and a pipeline, saves
and loads a checkpoint, and has the functions find what they look for by name. On rank 0 it writes its losses
into the file that its argument names.
"""

import contextlib
import json
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from small_transformer import batch, train, transformer
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def mean(losses):
    total = torch.tensor(losses)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def by_ddp():
    return mean(train(DistributedDataParallel(transformer()), dist.get_rank(), dist.get_world_size()))


def by_fsdp(mesh):
    model = transformer()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = mean(train(model, dist.get_rank(), dist.get_world_size()))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    states = get_model_state_dict(model)
    checkpoint.save({"model": states}, checkpoint_id=folder[0])
    loaded = {"model": {name: torch.zeros_like(value) for name, value in states.items()}}
    checkpoint.load(loaded, checkpoint_id=folder[0])
    for name, value in states.items():
        assert torch.equal(loaded["model"][name].full_tensor(), value.full_tensor())
    return losses


def by_tensor_parallel(mesh):
    model = transformer()
    for block in model:
        plan = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {"up": ColwiseParallel(), "down": RowwiseParallel(), "attention.out": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return train(model)


def by_pipeline():
    rank, size = dist.get_rank(), dist.get_world_size()
    model = transformer()
    stage = PipelineStage(model[rank], rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=mse_loss)
    optimizer = torch.optim.Adam(model[rank].parameters(), lr=0.01)
    steps = []
    for step in range(3):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        losses = []
        given = [inputs] if rank == 0 else []
        wanted = {"target": targets, "losses": losses} if rank == size - 1 else {}
        schedule.step(*given, **wanted)
        optimizer.step()
        steps.append(torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros(()))
    total = torch.stack(steps)
    dist.all_reduce(total)
    return total.tolist()


def ask_by_name():
    assert dist.get_backend() == "gloo"
    assert isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    other = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    assert dist.get_backend(other) == "gloo"
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": dist.get_rank()}, group=other)
    assert gathered == [{"rank": rank} for rank in range(dist.get_world_size())]
    tensor = torch.full((3,), float(dist.get_rank()))
    right = (dist.get_rank() + 1) % dist.get_world_size()
    sent = dist.isend(tensor.clone(), right, tag=3)
    dist.recv(tensor, tag=3)
    sent.wait()
    return tensor.tolist()


def main(path):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = {
        "ddp": by_ddp(),
        "fsdp": by_fsdp(mesh),
        "tensor parallel": by_tensor_parallel(mesh),
        "pipeline": by_pipeline(),
        "by name": ask_by_name(),
    }
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            json.dump(results, file)
    with contextlib.suppress(AttributeError):
        torch._dynamo.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
