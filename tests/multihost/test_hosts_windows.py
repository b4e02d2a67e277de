"""Windows on tensors of ranks on other hosts."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch
from simulated import host_processes, on_processes, on_threads
from test_hosts_messages import link_of, shut_down_connections_to

import torchestra as dist
from torchestra.collectives.windows import Window
from torchestra.engine.multihost.exposed_memory import ExposedMemory
from torchestra.engine.multihost.heartbeat_bound import HEARTBEAT_VARIABLE
from torchestra.engine.multihost.p2p_request import P2PRequest
from torchestra.engine.multihost.packets import Packet, PacketType
from torchestra.engine.multihost.point_to_point import PointToPoint
from torchestra.errors import InvalidArgumentError, RankFailedError
from torchestra.transport.message import Message
from worlds import await_note, leave_note

LARGE = 700_000
"""Elements of float32: in many frames."""


def a_signal_comes_after_what_was_put() -> None:
    """Whether the put was waited for or not, however large it is, and on the same host as well."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.zeros(size, LARGE)
    window = Window(mine)
    works = []
    for turn, length in enumerate((1, 50_000, LARGE, 0, 7), start=1):
        for peer in range(size):
            values = torch.full((length,), 10.0 * turn + rank)
            works.append(window.put(values, peer, LARGE * rank + (LARGE - length), async_op=bool(turn % 2)))
            window.signal(peer)
        for peer in range(size):
            window.wait_signal(peer)
            assert (mine[peer, LARGE - length :] == 10.0 * turn + peer).all()
        dist.barrier()
    assert all(work is None or work.wait() for work in works)
    window.tensor_deregister()


@pytest.mark.parametrize("bridge", ["", "gloo"])
def test_a_signal_comes_after_what_was_put(bridge: str) -> None:
    on_threads((1, 2), a_signal_comes_after_what_was_put, bridge=bridge)


def refused_before_anything_is_sent() -> int:
    rank = dist.get_rank()
    window = Window(torch.zeros(3 + rank))
    peer, room = 1 - rank, 4 - rank
    with pytest.raises(InvalidArgumentError, match=f"elements {room} to {room + 1} are not all in the"):
        window.put(torch.ones(1), peer, room)
    with pytest.raises(InvalidArgumentError, match="elements -1 to 0 are not all in"):
        window.put(torch.ones(1), peer, -1)
    with pytest.raises(InvalidArgumentError, match=r"`tensor` is torch\.int64, and what rank"):
        window.put(torch.ones(1, dtype=torch.int64), peer)
    with pytest.raises(InvalidArgumentError, match="rank 0: a tensor is registered already"):
        window.tensor_register(torch.zeros(1))
    window.put(torch.ones(room), peer)  # into what stays registered
    dist.barrier()
    return int(window.map_remote_tensor(rank).sum())


def test_what_does_not_fit_is_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    begin_put = PointToPoint.begin_put

    def noted(self: PointToPoint, tensor: torch.Tensor, *others: Any) -> P2PRequest:
        sent.append(tensor.numel())
        return begin_put(self, tensor, *others)

    monkeypatch.setattr(PointToPoint, "begin_put", noted)
    assert on_threads((1, 1), refused_before_anything_is_sent) == [3, 4]
    assert sorted(sent) == [3, 4]  # the last ones


@pytest.mark.parametrize(
    ("tag", "dtype", "offset", "storages"),
    [(8, 6, 0, 1), (7, 5, 0, 1), (7, 6, 9, 1), (7, 6, 1 << 63, 1), (7, 6, 0, 0), (7, 6, 0, 2)],
)
def test_what_the_others_send_is_checked_again(tag: int, dtype: int, offset: int, storages: int) -> None:
    """As of a rank of another version: nothing is written outside of what is registered."""
    exposed, tensor = ExposedMemory(), torch.zeros(3)
    exposed.expose(7, tensor)
    sent = [torch.ones(1).untyped_storage()] * storages
    answer = exposed.write(Message(1, 2, tag, b"", sent), Packet(PacketType.put, 1, dtype, offset))
    assert answer is PacketType.lost
    assert not tensor.any()


def put_into_one_that_does_nothing(is_there: threading.Event) -> float:
    mine = torch.zeros(1)
    window = Window(mine)
    if dist.get_rank() == 0:
        window.put(torch.ones(1), 1)
        is_there.set()
    else:
        assert is_there.wait(30.0)
    return mine.item()


def test_the_targets_program_takes_no_part() -> None:
    assert on_threads((1, 1), put_into_one_that_does_nothing, threading.Event()) == [0, 1]


def put_over_a_connection_that_breaks() -> float:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    mine = torch.zeros(60)
    window = Window(mine)
    if rank == 0:
        window.put(torch.zeros(1), last)  # now they are connected
        address = link_of(dist.group.WORLD)._loop.peers[last].endpoint.address
        works = []
        for number in range(60):
            works.append(window.put(torch.ones(1), last, number, async_op=True))
            if number == 30:
                shut_down_connections_to(int(address.rpartition(":")[2]))
        window.signal(last)
        assert all(work is not None and work.wait() for work in works)
    elif rank == last:
        window.wait_signal(0)
        assert mine.all()
    dist.barrier()
    return mine.sum().item()


def test_a_connection_that_breaks_loses_no_put(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "2")
    assert on_threads((1, 1), put_over_a_connection_that_breaks) == [0, 60]


def put_until_the_other_dies() -> None:
    rank = dist.get_rank()
    window = Window(torch.zeros(4))
    if rank:
        await_note("never")
    window.put(torch.ones(4), 2)
    leave_note("put")
    while True:
        window.put(torch.ones(4), 2)


def test_a_dead_target_ends_the_call_and_is_named() -> None:
    with host_processes((1, 2), put_until_the_other_dies) as world:
        world.await_file("put")
        world.signal(2, signal.SIGKILL)
        error = world.wait(0).error
    assert isinstance(error, RankFailedError)
    assert error.ranks == (2,)
    assert "rank 2 on host h1" in str(error)


def put_much() -> None:
    window = Window(torch.zeros(LARGE))
    if dist.get_rank() == 0:
        for _ in range(5):
            window.put(torch.ones(LARGE), 1)
        kept = link_of(dist.group.WORLD)._loop.peer(1)._unconfirmed
        assert sum(each.size for each in kept) < 4 * LARGE
    dist.barrier()


def test_what_was_put_is_not_kept_for_longer_than_until_it_is_there() -> None:
    on_threads((1, 1), put_much)


def test_windows_among_processes() -> None:
    on_processes((2, 1), a_signal_comes_after_what_was_put)
