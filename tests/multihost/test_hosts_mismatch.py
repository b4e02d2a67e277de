"""Where hosts call different operations, all ranks learn it, though some had sent something already."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from simulated import LAYOUTS, Layout, on_threads

import torchestra as dist
from torchestra.errors import CollectiveMismatchError

LARGE = 600_000
"""Elements of 4 bytes that go in several chunks, of which the first are sent early."""


def all_reduce(length: int) -> None:
    tensor = torch.ones(length)
    try:
        dist.all_reduce(tensor)
    finally:
        assert (tensor == 1).all(), "a mismatch has changed the tensor"


def reduce_scatter(length: int) -> None:
    dist.reduce_scatter_tensor(torch.empty(length), torch.ones(length * dist.get_world_size()))


def broadcast(length: int) -> None:
    dist.broadcast(torch.zeros(length), 0)


CALLS: list[tuple[tuple[Callable[[int], None], int], tuple[Callable[[int], None], int]]] = [
    ((all_reduce, LARGE), (all_reduce, 3 * LARGE)),
    ((all_reduce, LARGE), (reduce_scatter, LARGE)),
    ((all_reduce, LARGE), (broadcast, LARGE)),
    ((all_reduce, 60_000), (all_reduce, LARGE)),
    ((reduce_scatter, LARGE), (all_reduce, 3)),
    ((broadcast, 3), (all_reduce, LARGE)),
    ((broadcast, 3), (broadcast, 4)),
    ((all_reduce, 3), (all_reduce, 4)),
]


def mismatches() -> None:
    """One host, and then one rank, calls something else than the others; the group works on."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    assert group.communicator.engine.hosts is not None
    host = group.communicator.engine.hosts.host_of[rank]
    for one, other in CALLS:
        for differs in (host == 1, rank == 0):
            operation, length = other if differs else one
            with pytest.raises(CollectiveMismatchError, match="the group stays usable") as caught:
                operation(length)
            assert all(f"rank {each} on host" in str(caught.value) for each in range(dist.get_world_size()))
            tensor = torch.full((LARGE,), float(rank))
            dist.all_reduce(tensor)
            assert (tensor == sum(range(dist.get_world_size()))).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_sent_early_is_dropped_and_the_group_works_on(layout: Layout) -> None:
    on_threads(layout, mismatches)


@pytest.mark.parametrize("bridge", ["curve", "gloo"])
def test_over_sockets_too(bridge: str) -> None:
    on_threads((2, 2), mismatches, bridge=bridge)
