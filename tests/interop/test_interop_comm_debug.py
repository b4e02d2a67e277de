"""torch's CommDebugMode counts the collectives of torchestra as those of other backends."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor.debug import CommDebugMode
from torch_worlds import run

import torchestra
from torchestra.functional import all_gather_tensor, all_reduce, all_reduce_coalesced
from torchestra.testing import spawn_threads_and_init_comms


def empty(size: int) -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(size)]


def call_everything(group: Any) -> None:
    """Call every collective that the mode knows once, and a few as parts of others."""
    size, root = dist.get_world_size(group), dist.get_rank(group) == 0
    tensor, pieces = torch.ones(2), empty(size)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    dist.reduce(tensor, 0, group=group)
    dist.broadcast(tensor, 0, group=group)
    dist.all_gather(pieces, tensor, group=group)
    dist.all_gather_into_tensor(torch.zeros(size * 2), tensor, group=group)
    dist.gather(tensor, pieces if root else None, 0, group=group)
    dist.scatter(tensor, pieces if root else None, 0, group=group)
    dist.reduce_scatter(tensor, pieces, group=group)
    dist.reduce_scatter_tensor(tensor, torch.ones(size * 2), group=group)
    dist.all_to_all_single(torch.zeros(size * 2), torch.ones(size * 2), group=group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they will be deprecated
        dist.all_reduce_coalesced([tensor], group=group)
        dist.all_gather_coalesced([[piece] for piece in pieces], [tensor], group=group)
    with dist._coalescing_manager(group):
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=group)
    functional.all_reduce(tensor, "sum", group).sum()
    dist.barrier(group)


def train(group: Any) -> None:
    """Have the reducer, in C++, call the group."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()


def counted(step: Any, group: Any) -> tuple[dict[str, int], str]:
    """Return how often each collective was counted, and the table of modules."""
    with CommDebugMode() as mode:
        step(group)
    counts = {str(operator): number for operator, number in mode.get_comm_counts().items()}
    return counts, mode.generate_comm_debug_tracing_table(noise_level=0)


def count_on_both() -> Sequence[Any]:
    gloo = dist.new_group(backend="gloo")
    return [(counted(step, dist.group.WORLD), counted(step, gloo)) for step in (call_everything, train)]


def test_every_collective_is_counted_as_on_gloo() -> None:
    """Operations of functions, of functional collectives and of the reducer, by module."""
    for everything, training in run(2, count_on_both):
        ours, gloos = everything
        assert ours == gloos
        assert ours[0]["c10d.allreduce_"] == 2
        assert ours[0]["c10d_functional.all_reduce"] == 1
        assert len(ours[0]) >= 13
        ours, gloos = training
        assert ours == gloos
        assert ours[0]["c10d.allreduce_"] == 1


@spawn_threads_and_init_comms(world_size=2)
def count_calls() -> None:
    """Twice: the second call of each goes without Python where no mode is on."""
    tensor, pieces, whole = torch.ones(2), empty(2), torch.ones(4)
    for _ in range(2):
        torchestra.all_reduce(tensor)
        torchestra.all_gather_into_tensor(whole, tensor)
    with CommDebugMode() as mode:
        torchestra.all_reduce(tensor)
        torchestra.all_reduce(tensor, async_op=True).wait()  # type: ignore[union-attr]
        torchestra.all_gather_into_tensor(whole, tensor)
        torchestra.all_gather(pieces, tensor)
        torchestra.reduce_scatter_tensor(tensor, whole)
        torchestra.all_to_all_single(torch.empty(4), whole)
        torchestra.broadcast(tensor, 0)
        torchestra.all_reduce_coalesced([tensor, torch.ones(1)])
        torchestra.all_gather_coalesced([pieces[:1], pieces[1:]], [tensor])
        torchestra.barrier()
        torchestra.all_reduce(torch.empty(2, device="meta"))
    torchestra.all_reduce(tensor)
    assert {str(operator): number for operator, number in mode.get_comm_counts().items()} == {
        "c10d.allreduce_": 3,
        "c10d._allgather_base_": 1,
        "c10d.allgather_": 1,
        "c10d._reduce_scatter_base_": 1,
        "c10d.alltoall_base_": 1,
        "c10d.broadcast_": 1,
        "c10d.allreduce_coalesced_": 1,
        "c10d.allgather_coalesced_": 1,
    }


def test_torchestras_own_functions_are_counted() -> None:
    count_calls()


@spawn_threads_and_init_comms(world_size=1)
def count_torchestras() -> None:
    group = torchestra.group.WORLD
    tensor = torch.ones(2)
    all_reduce(tensor, "sum", group)
    with CommDebugMode() as mode:
        all_reduce(tensor, "sum", group).sum()
        all_gather_tensor(tensor, 0, group).sum()
        for result in all_reduce_coalesced([tensor, tensor], "sum", group):
            result.sum()
    assert mode.get_total_counts() == 3
    assert {str(operator) for operator in mode.get_comm_counts()} == {
        "c10d_functional.all_reduce",
        "c10d_functional.all_gather_into_tensor",
        "c10d_functional.all_reduce_coalesced",
    }


def test_torchestras_own_functional_collectives_are_counted() -> None:
    count_torchestras()
