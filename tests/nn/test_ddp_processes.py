"""With ranks that are processes: training, a peer that dies during backward, and Ctrl-C."""

from __future__ import annotations

import hashlib
import os
import signal

import torch
from ddp_models import batch, convolutions, loss, mlp, share

import torchestra as dist
from torchestra.errors import RankFailedError
from torchestra.nn.parallel import DistributedDataParallel
from worlds import await_arrival, await_note, leave_note, processes, run, store_barrier

TINY_BUCKETS_MB = 100 / 2**20


def train() -> str:
    """A digest of the weights after some steps."""
    torch.manual_seed(dist.get_rank())
    wrapped = DistributedDataParallel(convolutions(), bucket_cap_mb=TINY_BUCKETS_MB)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        optimizer.zero_grad()
        loss(wrapped(share(batch(3, step), dist.get_rank(), dist.get_world_size()))).backward()
        optimizer.step()
    weights = torch.cat([each.detach().flatten() for each in wrapped.parameters()])
    assert bool(weights.isfinite().all())
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def test_processes_stay_bit_identical_while_they_train() -> None:
    assert len(set(run("processes", 3, train))) == 1


def die_or_backward() -> tuple[str, tuple[int, ...]]:
    """Rank 1 is killed between two of its gradients; how the backward of the others ended."""
    model = mlp()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=TINY_BUCKETS_MB)
    loss(wrapped(batch(1))).backward()
    store_barrier()
    if dist.get_rank() == 1:
        model[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    try:
        loss(wrapped(batch(1))).backward()
    except RankFailedError as error:
        return str(error), error.ranks
    return "no error", ()


def test_a_peer_that_is_killed_during_backward_is_named_by_the_others_backward() -> None:
    with processes(3, die_or_backward) as world:
        zero, one, two = world.finish()
    assert one.exit_code == -signal.SIGKILL
    for survivor in (zero, two):
        assert survivor.error is None, survivor.error
        message, ranks = survivor.value
        assert ranks == (1,)
        assert "rank 1 died" in message


def backward_while_the_other_is_late() -> str:
    wrapped = DistributedDataParallel(mlp(), bucket_cap_mb=TINY_BUCKETS_MB)
    if dist.get_rank() == 1:
        await_arrival(0)
        leave_note("rank 0 waits")
        await_note("over")
        return "late"
    try:
        loss(wrapped(batch(1))).backward()
    except KeyboardInterrupt:
        return "interrupted"
    return "no error"


def test_ctrl_c_ends_a_backward_that_waits_for_another_rank() -> None:
    with processes(2, backward_while_the_other_is_late) as world:
        world.await_file("rank 0 waits")
        world.signal(0, signal.SIGINT)
        assert world.wait(0).value == "interrupted"
        with open(world.path("over"), "w"):
            pass
        assert world.wait(1).value == "late"
