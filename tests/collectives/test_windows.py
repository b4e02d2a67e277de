"""Windows: one-sided writes into tensors of other ranks, and signals."""

from __future__ import annotations

import gc

import pytest
import torch

import torchestra as dist
import worlds
from torchestra.collectives.windows import Window

ROUNDS = 50


def everyone_puts_into_everyone() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((size, 3), -1.0)
    storage = mine.data_ptr()
    window = Window(mine)
    assert mine.data_ptr() != storage  # moved, and the same object
    for peer in range(size):
        assert window.put(torch.full((3,), 10.0 * rank + peer), peer, 3 * rank) is None
    dist.barrier()
    assert mine.tolist() == [[10.0 * each + rank] * 3 for each in range(size)]
    for peer in range(size):
        seen = window.map_remote_tensor(peer)
        assert seen.shape == (size, 3)
        assert seen[rank].tolist() == [10.0 * rank + peer] * 3
    mapped = window.map_remote_tensor((rank + 1) % size)
    window.tensor_deregister()
    with pytest.raises(dist.InvalidArgumentError, match="no tensor is registered"):
        window.put(torch.ones(1), 0)
    window.tensor_register(torch.zeros(rank))  # other lengths, and none on rank 0
    assert [window.map_remote_tensor(peer).numel() for peer in range(size)] == list(range(size))
    del window, mine
    gc.collect()
    dist.barrier()
    assert mapped.shape == (size, 3)  # memory that is mapped stays so
    assert mapped.isfinite().all()


@pytest.mark.parametrize("kind", worlds.KINDS)
@pytest.mark.parametrize("size", [1, 3])
def test_what_ranks_put_is_in_each_others_tensors(kind: str, size: int) -> None:
    worlds.run(kind, size, everyone_puts_into_everyone)


def ping_pong() -> None:
    """What was put before a signal is there after it, round by round."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    mine, other = torch.zeros(1000, dtype=torch.int64), torch.zeros(4)
    window, second = Window(mine), Window(other)
    for number in range(ROUNDS):
        if rank == 0:
            window.put(torch.full((1000,), number), peer)
            window.signal(peer)
            window.wait_signal(peer)
        else:
            window.wait_signal(peer)
            assert (mine == number).all()
            window.signal(peer)
    work = second.signal(peer, async_op=True)  # of another window: no other waits for it
    assert work is not None
    window.signal(peer)
    window.wait_signal(peer)
    second.wait_signal(peer)
    work.wait()
    for _ in range(20):
        window.signal(peer)  # nobody waits for them yet
    dist.barrier()
    for _ in range(20):
        window.wait_signal(peer)


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_a_signal_comes_after_what_was_put_before_it(kind: str) -> None:
    worlds.run(kind, 2, ping_pong)


def refused() -> None:
    rank = dist.get_rank()
    tensor = torch.zeros(4)
    window = Window(tensor)
    with pytest.raises(dist.InvalidArgumentError, match=r"`tensor` is torch\.int64, and"):
        window.put(torch.ones(1, dtype=torch.int64), 1)
    with pytest.raises(dist.InvalidArgumentError, match="elements 3 to 5 are not all in the 4 that rank 1"):
        window.put(torch.ones(2), 1, 3)
    with pytest.raises(dist.InvalidArgumentError, match="2 is no rank of a group of 2"):
        window.map_remote_tensor(2)
    with pytest.raises(dist.InvalidArgumentError, match="rank 0: a tensor is registered already"):
        window.tensor_register(torch.zeros(1))
    viewed = torch.zeros(8)
    view = viewed[2:4]
    with pytest.raises(dist.InvalidArgumentError, match="rank 1: share_: "):  # on every rank
        Window(view if rank else torch.zeros(2))
    with pytest.raises(dist.InvalidArgumentError, match="rank 0: the tensor must be contiguous"):
        Window(torch.zeros(2) if rank else torch.zeros(2, 2).t())
    assert view.sum() == 0
    Window(torch.zeros(2))  # the group stays usable


def test_what_cannot_be_is_refused_on_every_rank() -> None:
    worlds.run("threads", 2, refused)


def test_ranks_of_several_hosts_put_into_each_others_tensors() -> None:
    worlds.run("threads", 3, puts_over_hosts, hosts=("a", "a", "b"))


def puts_over_hosts() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((size, 3), -1, dtype=torch.int64)
    window = Window(mine)
    for peer in range(size):
        strided = torch.tensor([[10 * rank + peer, 0]] * 3)[:, 0]
        if peer % 2:
            assert window.put(strided, peer, 3 * rank) is None
        else:
            work = window.put(strided, peer, 3 * rank, async_op=True)
            assert work is not None
            strided.zero_()  # it may be changed already
            assert work.wait()
    dist.barrier()
    assert mine.tolist() == [[10 * each + rank] * 3 for each in range(size)]
    with pytest.raises(dist.InvalidArgumentError, match="on another host; write with put"):
        window.map_remote_tensor(0 if rank == 2 else 2)
    assert window.map_remote_tensor(rank)[0, 0] == rank
    if rank < 2:
        assert window.map_remote_tensor(1 - rank)[2, 0] == 21 - rank
