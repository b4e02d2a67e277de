"""Messages between ranks of several hosts."""

from __future__ import annotations

import pytest
import torch
from simulated import LAYOUTS, Layout, on_processes, on_threads

import torchestra as dist
from torchestra.errors import CollectiveTimeoutError, DistBackendError

SMALL, LARGE = 5, 50_000


def everybody_to_everybody() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = [peer for peer in range(size) if peer != rank]
    for length in (0, SMALL, LARGE):
        sends = [dist.isend(torch.full((length,), float(rank)), peer, tag=3) for peer in peers]
        tensors = {peer: torch.empty(length) for peer in peers}
        receives = [dist.irecv(tensors[peer], peer, tag=3) for peer in peers]
        for work in [*sends, *receives]:
            work.wait()
        assert all((tensor == peer).all() for peer, tensor in tensors.items())


def from_anybody() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for length in (SMALL, LARGE):
        for root in (0, size - 1):
            if rank != root:
                dist.send(torch.full((length,), float(rank)), root, tag=length)
                continue
            tensor = torch.empty(length)
            senders = []
            for _ in range(size - 1):
                senders.append(dist.recv(tensor, tag=length))
                assert (tensor == senders[-1]).all()
            assert sorted([*senders, root]) == list(range(size))


def posted_before_and_out_of_order() -> None:
    """Receives by tag take what they are for, whatever came first; several from any take each one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.barrier()
        for tag in (2, 1):
            dist.send(torch.tensor([tag]), size - 1, tag=tag)
        for number in range(3):
            dist.send(torch.tensor([10 + number]), size - 1, tag=5)
    elif rank == size - 1:
        anything = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
        waiting = [dist.irecv(tensor, tag=5) for tensor in anything]
        dist.barrier()
        first, second = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        dist.recv(first, 0, tag=1)
        dist.recv(second, 0, tag=2)
        assert (first.item(), second.item()) == (1, 2)
        for work in waiting:
            work.wait()
        assert [tensor.item() for tensor in anything] == [10, 11, 12]
    else:
        dist.barrier()


def refused_and_late() -> None:
    """What does not fit is thrown away; who waits in vain is told; the group goes on in both cases."""
    rank, size = dist.get_rank(), dist.get_world_size()
    last = size - 1
    for length in (SMALL, LARGE):
        if rank == 0:
            dist.send(torch.zeros(length), last)
        elif rank == last:
            with pytest.raises(DistBackendError, match=r"rank 0 sent \d+ bytes of float32"):
                dist.recv(torch.zeros(length + 1), 0)
    group = dist.new_group(timeout=0.3)
    if rank == last:
        with pytest.raises(CollectiveTimeoutError, match="the group stays usable") as caught:
            dist.recv(torch.zeros(1), 0, group=group, tag=77)
        assert caught.value.missing == (0,)
        assert "host h0:\n  rank 0 " in str(caught.value)
    dist.barrier()
    dist.destroy_process_group(group)
    everybody_to_everybody()


EVERYTHING = (everybody_to_everybody, from_anybody, posted_before_and_out_of_order, refused_and_late)


def all_of_it() -> None:
    for each in EVERYTHING:
        each()
        dist.barrier()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_messages(layout: Layout) -> None:
    on_threads(layout, all_of_it)


def test_messages_over_gloo() -> None:
    on_threads((1, 2), all_of_it, gloo=True)


def test_messages_among_processes() -> None:
    on_processes((2, 1), all_of_it)
