"""The functions of the package on shapes and roots that the grids leave out, and what groups leave alone."""

from __future__ import annotations

import logging

import pytest
import torch

import torchestra as dist
from torchestra.nn.parallel.coalesced import broadcast_coalesced
from torchestra.world.registry import thread_rank
from worlds import KINDS, run


def allocate() -> None:
    group = dist.group.WORLD
    tensor = group.allocate_tensor(3, dtype=torch.float64, device=torch.device("cpu"))
    tensor.fill_(dist.get_rank() + 1)
    assert group.communicator.engine.is_in_heap(tensor.data_ptr())
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3] * 3
    assert group.supports_tensor_alloc("cpu")
    assert not group.supports_tensor_alloc(torch.device("cuda", 0))
    with pytest.raises(dist.InvalidArgumentError, match="`device` the CPU, got 3 and 'meta'"):
        group.allocate_tensor(3, dtype=torch.float32, device="meta")


def test_tensors_are_allocated_as_by_torchs_backends() -> None:
    run("threads", 2, allocate)


def use_shapes() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.full((2, 3, 4), float(rank))
    joined, stacked = torch.zeros(2 * size, 3, 4), torch.zeros(size, 2, 3, 4)
    dist.all_gather_into_tensor(joined, own)
    dist.all_gather_into_tensor(stacked, own)
    expected = torch.stack([torch.full((2, 3, 4), float(peer)) for peer in range(size)])
    assert torch.equal(stacked, expected)
    assert torch.equal(joined, expected.flatten(0, 1))
    piece = torch.zeros(2, 3, 4)
    for whole in (joined, stacked):
        dist.reduce_scatter_tensor(piece, whole)
        assert torch.equal(piece, own * size)
    uneven = [torch.zeros(peer, 2) for peer in range(size)]
    dist.all_gather(uneven, torch.full((rank, 2), rank + 0.5))
    assert all(torch.equal(each, torch.full((peer, 2), peer + 0.5)) for peer, each in enumerate(uneven))
    mine = torch.zeros(rank, 2)
    dist.reduce_scatter(mine, uneven)
    assert torch.equal(mine, torch.full((rank, 2), size * (rank + 0.5)))
    scalar = torch.tensor(float(rank))
    scalars = torch.zeros(size)
    dist.all_gather_into_tensor(scalars, scalar)
    assert scalars.tolist() == list(range(size))


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_of_any_dimensions_and_uneven_lists(kind: str) -> None:
    run(kind, 3, use_shapes)


def use_group_ranks() -> None:
    """Global rank g is number g - 1 of the group."""
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return
    rank, size = group.rank(), group.size()
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, group=group, group_src=2)
    assert tensor.item() == 2
    dist.broadcast(tensor, src=2, group=group)
    assert tensor.item() == 2
    dist.reduce(tensor, group=group, group_dst=1)
    assert tensor.item() == (6 if rank == 1 else 2)
    outputs = [torch.zeros(1) for _ in range(size)] if rank == 2 else None
    dist.gather(torch.tensor([float(rank)]), outputs, group=group, group_dst=2)
    assert outputs is None or [each.item() for each in outputs] == [0, 1, 2]
    inputs = [torch.tensor([peer * 2.0]) for peer in range(size)] if rank == 2 else None
    dist.scatter(tensor, inputs, group=group, group_src=2)
    assert tensor.item() == rank * 2
    if rank == 0:
        dist.send(tensor, group=group, group_dst=1)
        dist.isend(tensor, dst=2, group=group, tag=1).wait()
    if rank == 1:
        assert dist.recv(tensor, group=group, group_src=0) == 1
        work = dist.irecv(tensor, group=group, tag=1, group_src=0)
        work.wait()
        assert work.source_rank() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_roots_and_peers_as_numbers_within_the_group(kind: str) -> None:
    run(kind, 4, use_group_ranks)


def broadcast_many_dtypes() -> None:
    kinds = (torch.float16, torch.float32, torch.float16, torch.float64, torch.float16, torch.float32)
    target = [chunk for dtype in kinds for chunk in torch.arange(60, dtype=dtype).chunk(5)]
    for root in range(dist.get_world_size()):
        here = dist.get_rank() == root
        tensors = [each.clone() if here else torch.zeros_like(each) for each in target]
        broadcast_coalesced(tensors, dist.group.WORLD, root, 256)
        assert all(torch.equal(each, wanted) for each, wanted in zip(tensors, target, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_coalesced_broadcast_of_many_dtypes_in_small_buffers(kind: str) -> None:
    run(kind, 3, broadcast_many_dtypes)


def test_starting_a_group_leaves_the_programs_logging_as_it_was() -> None:
    before, level = list(logging.root.handlers), logging.root.level
    with thread_rank(0, 1, dist.HashStore()):
        dist.init_process_group()
        dist.all_reduce(torch.ones(1))
        assert (logging.root.handlers, logging.root.level) == (before, level)


def test_a_group_of_the_fake_world_has_the_methods_too() -> None:
    group = dist.ProcessGroup(dist.HashStore(), 3, 1000, dist.GroupOptions(backend="fake"))
    meta = torch.ones(2, 2, device="meta")
    assert group.allreduce([meta, meta]).result() == [meta, meta]
    pair = [torch.tensor([2.0]), torch.tensor([3.0])]
    group.allreduce(pair).wait()
    assert [each.item() for each in pair] == [5.0, 5.0]
    outputs = [[torch.zeros(1) for _ in range(2000)] for _ in range(2)]
    group.allgather(outputs, [torch.tensor([1.0]), torch.tensor([2.0])]).wait()
    assert [each.item() for each in outputs[1][:4]] == [1.0, 2.0, 1.0, 2.0]
    lists = [torch.ones(3), torch.ones(2)]
    group.allreduce_coalesced(lists).wait()
    group.barrier().wait()
