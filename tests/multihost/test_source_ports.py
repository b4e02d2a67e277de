"""Ranks are known by the ports they connect from, and find room at a port full of strangers."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from torchestra.transport import pair, syn_filter
from torchestra.transport.endpoint import EndpointRecord
from torchestra.transport.message import Message
from torchestra.transport.pair import PairConnection
from torchestra.transport.source_port import Identity, source_ports
from torchestra.transport.syn_filter import SynFilter
from torchestra.transport.transport import Transport

HERE = "127.0.0.1"
ROOM = 16
SYN_SENT = 2


@pytest.fixture
def identity() -> Iterator[Identity]:
    identity = Identity(is_ipv6=False, not_from=None)
    yield identity
    identity.close()


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Return a port with little room in its queue, whose filter is adapted at every look."""
    monkeypatch.setattr(syn_filter, "_HARDER_SECONDS", 0.0)
    monkeypatch.setattr(syn_filter, "_SOFTER_SECONDS", 0.0)
    monkeypatch.setattr(syn_filter, "_LEAST_SHARE", 32)  # none of four billion
    with socket.create_server((HERE, 0), backlog=ROOM) as listening:
        yield listening


def test_the_ports_follow_from_the_key_and_stay_reserved(identity: Identity) -> None:
    assert identity.ports == source_ports(identity.public)
    for port in identity.ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
    other = Identity(is_ipv6=True, not_from=None)
    other.close()
    assert set(other.ports).isdisjoint(identity.ports)


def test_no_port_is_taken_that_others_want_to_listen_at() -> None:
    identity = Identity(is_ipv6=False, not_from=(1024, 65535))
    assert (identity.ports, len(identity.public)) == ((), 40)


def test_ranks_connect_from_their_ports() -> None:
    def arrived(_: Message) -> None:
        pass

    with contextlib.closing(Transport("a", HERE, None, None, arrived)) as one:
        with socket.create_server((HERE, 0)) as other:
            port = other.getsockname()[1]
            _, key = zmq.curve_keypair()
            one.expect({1: EndpointRecord(f"tcp://{HERE}:{port}", key)}, connect=True)
            other.settimeout(30)
            connection, (_, came_from) = other.accept()
            connection.close()
        assert came_from == source_ports(one.endpoint.key)[0]


def test_a_rank_whose_ports_others_listen_at_connects_from_any() -> None:
    """It took that for a peer's death, and RPC removed workers that lived from their group."""
    with contextlib.ExitStack() as stack:
        one, other = (
            stack.enter_context(
                contextlib.closing(Transport(name, HERE, None, 30.0, lambda _: None, grows=True))
            )
            for name in "ab"
        )
        for port in source_ports(one.endpoint.key):
            stack.enter_context(socket.create_server((HERE, port)))
        other.expect({0: one.endpoint})
        one.expect({1: other.endpoint}, connect=True)
        while not one.is_met(1):
            assert one.lost() == {}
            time.sleep(0.01)


class Asked:
    """Stand in for a socket of ZeroMQ, and note where it is to connect."""

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked

    def get_monitor_socket(self, _: int) -> Any:
        return self

    def poll(self, _: int) -> int:
        return 0

    def connect(self, address: str) -> None:
        self._asked.append(address)

    def close(self, _: int = 0) -> None:
        pass

    def disable_monitor(self) -> None:
        pass


def test_attempts_are_from_each_port_in_turn_and_then_from_any(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pair.time, "monotonic", lambda: now[0])
    asked: list[str] = []
    peer = PairConnection(1, EndpointRecord("tcp://10.0.0.1:4000", b"k" * 40))
    patience = []
    for _ in range(4):
        peer.connect(Asked(asked), (40001, 40002))
        began = now[0]
        while not peer.is_to_connect_again(now[0]):
            now[0] += 0.25
        patience.append(now[0] - began)
    to = "10.0.0.1:4000"
    first, second = f"tcp://0.0.0.0:40001;{to}", f"tcp://0.0.0.0:40002;{to}"
    assert asked == [first, second, f"tcp://{to}", first]
    assert patience == sorted(set(patience)), "a distant host gets more time with every attempt"
    peer._note_event(zmq.EVENT_CONNECTED, 0.0)
    assert not peer.is_to_connect_again(now[0] + 1000)
    assert not peer.refused


def test_a_rank_that_waits_does_not_give_up_among_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pair.time, "monotonic", lambda: now[0])
    peer = PairConnection(1, EndpointRecord("tcp://10.0.0.1:4000", b"k" * 40))
    peer.connect(Asked([]))
    peer._note_event(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 0.0)
    now[0] += 1000
    assert peer.is_given_up
    peer.wanted = True
    assert not peer.is_given_up, "whoever joins has a time-out of its own"
    peer.refused = ""
    peer._note_event(zmq.EVENT_HANDSHAKE_FAILED_AUTH, 0.0)
    assert peer.is_given_up


def test_a_crowded_port_lets_known_ranks_in(listening: socket.socket, identity: Identity) -> None:
    known = frozenset(identity.ports)
    keeping = SynFilter(listening)
    with contextlib.ExitStack() as stack:

        def asking(port: int = 0) -> socket.socket:
            asks = stack.enter_context(socket.socket())
            asks.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            asks.bind((HERE, port))
            asks.setblocking(False)
            asks.connect_ex(listening.getsockname())
            return asks

        keeping.adapt(known)
        for _ in range(ROOM // 2 + 2):
            asking()
        for _ in range(syn_filter._LEAST_SHARE):
            keeping.adapt(known)
        stranger, rank = asking(), asking(identity.ports[0])
        # The loopback delivers a request, or drops it, before connect() returns.
        assert state(stranger) == SYN_SENT
        assert state(rank) != SYN_SENT
        came_from, accepted = 0, listening
        while came_from != identity.ports[0]:
            accepted, (_, came_from) = listening.accept()
            stack.enter_context(accepted)
        rank.setblocking(True)
        rank.sendall(b"x")
        assert accepted.recv(1) == b"x", "the connection has the filter of the port"
        for _ in range(syn_filter._LEAST_SHARE + 1):
            keeping.adapt(known)  # now that the queue is empty
        assert state(asking()) != SYN_SENT
        keeping.drop_all()
        assert state(asking(identity.ports[1])) == SYN_SENT


def test_a_filter_has_room_for_many_ranks(listening: socket.socket) -> None:
    SynFilter(listening)._attach(syn_filter._crowded_program(range(1024, 65536), 3))


def state(asks: socket.socket) -> int:
    """Return the state of a connection, as the kernel numbers it."""
    return asks.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
