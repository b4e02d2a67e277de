"""Messages between ranks of several hosts."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from simulated import LAYOUTS, Layout, on_processes, on_threads

import torchestra as dist
from torchestra.engine.multihost.group_transport import Channel, GroupTransport
from torchestra.engine.multihost.heartbeat_bound import HEARTBEAT_VARIABLE
from torchestra.engine.multihost.p2p_request import P2PRequest
from torchestra.engine.multihost.point_to_point import PointToPoint
from torchestra.engine.multihost.wait_policy import WaitPolicy
from torchestra.errors import CollectiveTimeoutError, DistBackendError, GroupAbortedError
from torchestra.transport.control_frames import HELLO, HELLO_ACK, number_of, numbered
from torchestra.transport.endpoint import EndpointRecord
from torchestra.transport.framing import MessageAssembler
from torchestra.transport.message import Message
from torchestra.transport.pair import PairConnection
from torchestra.transport.sockets import await_confirmed
from torchestra.transport.transport import Transport

SMALL, LARGE, HUGE = 5, 50_000, 700_000
"""Elements of float32: in one frame, in several, and more than goes before it is asked for."""

MEGABYTE = 1 << 20


def everybody_to_everybody() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = [peer for peer in range(size) if peer != rank]
    for length in (0, SMALL, LARGE, HUGE):
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
    """A receive takes a message with its tag, whichever arrived first; those from any rank take one each."""
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
    """A message that does not fit is thrown away, a receive in vain times out, and the group goes on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    last = size - 1
    for length in (SMALL, LARGE):
        if rank == 0:
            dist.send(torch.zeros(length), last)
        elif rank == last:
            with pytest.raises(DistBackendError, match=r"rank 0 sent \d+ bytes of float32"):
                dist.recv(torch.zeros(length + 1), 0)
    group = dist.new_group()
    group.set_timeout(0.3)  # type: ignore[union-attr]
    if rank == last:
        with pytest.raises(CollectiveTimeoutError, match="the group stays usable") as caught:
            dist.recv(torch.zeros(1), 0, group=group, tag=77)
        assert caught.value.missing == (0,)
        assert "host h0:\n  rank 0 " in str(caught.value)
    dist.barrier()
    dist.destroy_process_group(group)
    everybody_to_everybody()


def order_of_all_sizes() -> None:
    """Messages arrive in their order, whichever way they take."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = [SMALL, LARGE, 0, SMALL, HUGE, SMALL, LARGE, 40_000, HUGE, SMALL] * 2
    if rank == 0:
        works = [
            dist.isend(torch.full((length,), float(number)), size - 1)
            for number, length in enumerate(lengths)
        ]
        for work in works:
            work.wait()
    elif rank == size - 1:
        for number, length in enumerate(lengths):
            dist.recv(tensor := torch.full((length,), -1.0), 0)
            assert (tensor == number).all()


def survive_their_sender() -> None:
    """A message is received though its sender has left; sending to a rank that has left is an error."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group = dist.new_group([0, last])
    if rank == 0:
        exchange_one(last, group)
        for number in range(20):
            dist.send(torch.full((number * 2000,), number), last, group=group)
        dist.destroy_process_group(group)
    elif rank == last:
        exchange_one(0, group)
    dist.barrier()
    if rank == last:
        for number in range(20):
            dist.recv(tensor := torch.zeros(number * 2000, dtype=torch.int64), 0, group=group)
            assert (tensor == number).all()
        with pytest.raises(GroupAbortedError, match=r"rank 0 on host h0.* destroyed the group"):
            dist.send(torch.zeros(1), 0, group=group)
        with pytest.raises(GroupAbortedError, match="rank 0 on host h0 destroyed the group"):
            dist.recv(torch.zeros(1), 0, group=group)
        dist.destroy_process_group(group)


def ahead_of_their_receiver() -> None:
    """Of what nobody waits for, only some megabytes are on their way; the others wait for their receiver."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    tensors = [torch.full((MEGABYTE,), number, dtype=torch.uint8) for number in range(7)]
    if rank == 0:
        exchange_one(last)
        works = [dist.isend(tensor, last, tag=9) for tensor in tensors]
        assert [work.is_completed() for work in works] == [True] * 4 + [False] * 3
        dist.barrier()
        for work in works:
            work.wait()
    elif rank == last:
        exchange_one(0)
        dist.barrier()
        for tensor in tensors:
            dist.recv(received := torch.zeros_like(tensor), 0, tag=9)
            assert torch.equal(received, tensor)
    else:
        dist.barrier()


def link_of(group: Any) -> Any:
    """This rank's transport."""
    return group.communicator.engine.mailbox.transport.link


def exchange_one(peer: int, group: Any = None) -> None:
    """Send a message to a rank and receive one, so that the two are connected."""
    dist.send(torch.ones(1), peer, group=group, tag=8)
    dist.recv(torch.zeros(1), peer, group=group, tag=8)


EVERYTHING = (
    everybody_to_everybody,
    from_anybody,
    posted_before_and_out_of_order,
    order_of_all_sizes,
    survive_their_sender,
    ahead_of_their_receiver,
    refused_and_late,
)


def all_of_it() -> None:
    for each in EVERYTHING:
        each()
        dist.barrier()


def fail_within_the_second_host() -> None:
    """Errors of messages that stay within a host have the numbers of ranks in the group."""
    rank = dist.get_rank()
    if rank == 1:
        dist.send(torch.zeros(2), 2)
    elif rank == 2:
        with pytest.raises(DistBackendError, match="rank 2 on host h1: rank 1 on host h1 sent 8 bytes of"):
            dist.recv(torch.zeros(3), 1)
    dist.barrier()
    group = dist.new_group([0, 1, 2])
    group.set_timeout(0.3)  # type: ignore[union-attr]
    if rank == 1:
        late = (
            r"recv of 4 bytes from rank 2 on host h1 \(tag 77\) of group '.*' timed out after .* s on rank 1"
        )
        with pytest.raises(CollectiveTimeoutError, match=late) as caught:
            dist.recv(torch.zeros(1), 2, group=group, tag=77)
        assert caught.value.missing == (2,)
    dist.barrier()
    if rank == 1:
        with pytest.raises(CollectiveTimeoutError):
            dist.send(torch.zeros(HUGE), 2, group=group)
    dist.barrier()
    if rank == 2:
        with pytest.raises(
            GroupAbortedError, match="rank 1 on host h1 left a send to rank 2 on host h1 half"
        ):
            dist.recv(torch.zeros(1), 1, group=group)


def test_errors_of_messages_within_a_host_name_ranks_of_the_group() -> None:
    on_threads((1, 2), fail_within_the_second_host)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_messages(layout: Layout) -> None:
    on_threads(layout, all_of_it)


@pytest.mark.parametrize("bridge", ["curve", "gloo"])
def test_messages_over_sockets(bridge: str) -> None:
    on_threads((1, 2), all_of_it, bridge=bridge)


def test_messages_among_processes() -> None:
    on_processes((2, 1), all_of_it)


def shut_down_connections_to(port: int) -> None:
    """End this process's connections to a port, as a firewall does that forgets them."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            copy = socket.socket(fileno=os.dup(int(name)))
            with copy:
                if copy.family == socket.AF_INET and copy.getpeername()[1] == port:
                    copy.shutdown(socket.SHUT_RDWR)


def break_the_connection() -> int:
    """Messages go on over a new connection; none is lost, arrives twice, or out of order."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank not in (0, last):
        dist.barrier()
        return 0
    peer = last - rank
    exchange_one(peer)
    address = link_of(dist.group.WORLD)._loop.peers[peer].endpoint.address
    for number in range(60):
        dist.isend(torch.tensor([number]), peer)
        if number == 30 and rank == 0:
            shut_down_connections_to(int(address.rpartition(":")[2]))
    for number in range(60):
        dist.recv(received := torch.zeros(1, dtype=torch.int64), peer)
        assert received.item() == number
    everybody_to_everybody_of(peer)
    dist.barrier()
    return 1


def everybody_to_everybody_of(peer: int) -> None:
    for length in (SMALL, HUGE):
        works = [dist.isend(torch.ones(length), peer), dist.irecv(received := torch.zeros(length), peer)]
        for work in works:
            work.wait()
        assert received.all()


@pytest.mark.parametrize("bridge", ["", "gloo"])
def test_a_connection_that_breaks_loses_nothing(bridge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "2")
    assert on_threads((1, 2), break_the_connection, bridge=bridge) == [1, 0, 1]


def send_a_large_one(ports: list[int]) -> bool:
    """Rank 0 sends something large to the last rank; return whether it comes whole. Others come after it."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    numbers = torch.arange(4 * MEGABYTE, dtype=torch.int32)
    received = torch.zeros_like(numbers)
    if rank in (0, last):
        exchange_one(last - rank)
    if rank == 0:
        address = link_of(dist.group.WORLD)._loop.peers[last].endpoint.address
        ports.append(int(address.rpartition(":")[2]))
        dist.send(numbers, last)
        numbers.fill_(-1)  # nothing that is still on its way may be seen
    elif rank == last:
        dist.recv(received, 0)
    if rank in (0, last):
        everybody_to_everybody_of(last - rank)
    dist.barrier()
    return rank != last or torch.equal(received, numbers)


@pytest.mark.parametrize(
    ("owner", "method", "call"), [(PointToPoint, "_send_rest", 1), (MessageAssembler, "_fill", 60)]
)
def test_a_large_message_whose_connection_breaks_is_sent_again(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int
) -> None:
    """The connection breaks when the rest of it is to be sent, or when some pieces of that have come."""
    calls, ports, act = itertools.count(1), list[int](), getattr(owner, method)

    def act_and_break(self: object, *arguments: object) -> None:
        act(self, *arguments)
        if next(calls) == call:
            shut_down_connections_to(*ports)

    monkeypatch.setenv(HEARTBEAT_VARIABLE, "2")
    monkeypatch.setattr(owner, method, act_and_break)
    assert all(on_threads((1, 2), send_a_large_one, ports))
    assert next(calls) > call


def receive_from_one_that_has_left() -> None:
    group = dist.new_group()
    exchange_one(1 - dist.get_rank(), group)
    if dist.get_rank() == 0:
        for tag in range(3):
            dist.send(torch.tensor([tag]), 1, group=group, tag=tag)
        dist.destroy_process_group(group)
    dist.barrier()
    if dist.get_rank() == 1:
        for tag in (2, 0, 1):
            dist.recv(received := torch.zeros(1, dtype=torch.int64), 0, group=group, tag=tag)
            assert received.item() == tag
        dist.destroy_process_group(group)


def test_messages_of_one_that_has_left_are_received_however_slowly_they_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a loaded machine: a message is taken only after its receiver has looked around a few times."""
    looked = threading.Semaphore(0)
    check, deliver = WaitPolicy.check, GroupTransport._deliver

    def counted_check(self: WaitPolicy, request: P2PRequest) -> None:
        looked.release()
        check(self, request)

    def slow_deliver(self: GroupTransport, message: Message) -> None:
        for _ in range(4 * (message.kind == Channel.p2p)):
            assert looked.acquire(timeout=60.0)
        deliver(self, message)

    # The sender no longer waits for a receiver that does not confirm.
    monkeypatch.setattr(Transport, "flush", lambda *_: False)
    monkeypatch.setattr(WaitPolicy, "check", counted_check)
    monkeypatch.setattr(GroupTransport, "_deliver", slow_deliver)
    try:
        on_threads((1, 1), receive_from_one_that_has_left)
    finally:
        looked.release(1000)  # a goodbye comes after the last look, and would be waited with beyond the test


def test_a_rank_is_met_when_the_other_has_received_the_hello_of_its_present_connection() -> None:
    """The hello of an earlier connection, which was shut as a stranger's, may still arrive."""
    peer = PairConnection(1, EndpointRecord("tcp://127.0.0.1:1", b""))
    hellos = []
    for event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED):
        peer._note_event(event, 0.0)
        hellos += [number_of(control, HELLO) for control in peer._controls]
    first, second = hellos
    assert first is not None
    assert second is not None
    peer.handle_control(numbered(HELLO_ACK, first))
    assert not peer.hello_acked
    peer.handle_control(numbered(HELLO_ACK, second))
    assert peer.hello_acked


class LockTakenLate:
    """A lock that does something first, when it is about to be taken."""

    def __init__(self, first: Callable[[], None]) -> None:
        self._first, self._lock = first, threading.RLock()

    def acquire(self, blocking: bool) -> bool:
        self._first()
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()


@pytest.mark.parametrize("change", [{"blocked": True}, {"hello_acked": False}], ids=["blocked", "replaced"])
def test_no_caller_sends_over_a_socket_that_the_transport_has_in_hand(change: dict[str, bool]) -> None:
    """It had looked before it took the lock: two threads were in one socket of ZeroMQ's, which may crash."""
    peer: Any = PairConnection(1, EndpointRecord("tcp://127.0.0.1:1", b""))
    sent: list[object] = []
    peer.socket, peer.hello_acked = SimpleNamespace(send=lambda frame, _: sent.append(frame)), True
    peer.post_text(Channel.p2p, 0, b"text")
    plain, peer._lock = peer._lock, LockTakenLate(lambda: vars(peer).update(change))
    assert not peer.try_flush()
    assert not sent
    peer._lock, peer.blocked, peer.hello_acked = plain, False, True
    assert peer.try_flush()
    assert len(sent) == 1


def test_who_leaves_waits_for_what_it_has_sent_before_and_not_for_later_pings() -> None:
    """Of which there is always another one: groups took seconds to leave."""
    peer = PairConnection(1, EndpointRecord("tcp://127.0.0.1:1", b""), reconnects=True)
    peer.post_text(Channel.p2p, 0, b"bye")

    def send_and_confirm(asked: PairConnection) -> None:
        asked._unconfirmed.append(asked._queue.popleft())
        asked.note_confirmed(1)

    def ping(_: int) -> bool:
        peer.post_text(Channel.control, 0, b"ping")
        return False

    assert await_confirmed({peer: peer.posted}, 20.0, send_and_confirm, ping)
    assert peer.is_owed(peer.posted)
