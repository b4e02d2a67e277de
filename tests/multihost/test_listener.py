"""Who is shut down at the port of a rank: strangers, and nobody who has proved that the rank expects it."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Iterator

import pytest
import zmq

from torchestra.transport import listener as listeners
from torchestra.transport.listener import Listener


class Told:
    """Stand in for ZeroMQ's socket monitor: deliver the given events."""

    def __init__(self, *events: tuple[int, int]) -> None:
        self._events = deque(struct.pack("=Hi", *event) for event in events)

    def recv_multipart(self, _: int) -> list[bytes]:
        if not self._events:
            raise zmq.Again
        return [self._events.popleft()]

    def poll(self, _: int) -> int:
        return len(self._events)

    def close(self, _: int) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[Listener]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as inbox:
        listener = Listener(inbox, "127.0.0.1", None)
        listener.monitor.close(0)
        listener._port.setblocking(True)
        yield listener
        listener.close()


def connection(listener: Listener) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection to the port: the one that connects, and the accepted one."""
    came = socket.create_connection(listener._port.getsockname(), timeout=10)
    return came, listener._port.accept()[0]


def test_who_has_proved_itself_is_not_taken_for_who_had_its_descriptor(
    listener: Listener,
) -> None:
    """ZeroMQ reports connections later than the messages that arrive over them."""
    rank, accepted = connection(listener)
    stranger, other = connection(listener)
    with rank, accepted, stranger, other:
        listener.prove(accepted.fileno(), 1)
        listener.monitor = Told(
            (zmq.EVENT_ACCEPTED, accepted.fileno()),  # a stranger, that ended
            (zmq.EVENT_DISCONNECTED, accepted.fileno()),
            (zmq.EVENT_ACCEPTED, accepted.fileno()),  # the rank
            (zmq.EVENT_ACCEPTED, other.fileno()),
        )
        listener.check(0)
        assert stranger.recv(1) == b"", "the stranger was not shut down"
        accepted.sendall(b"x")
        assert rank.recv(1) == b"x"


def test_who_was_shut_down_proves_nothing(listener: Listener) -> None:
    """A hello may be on its way from ZeroMQ while its connection is shut down as a stranger's.

    Answered, the rank would be taken for connected, the port shut in time, and its next connection refused.
    """
    rank, accepted = connection(listener)
    later, again = connection(listener)
    with rank, accepted, later, again:
        listener.monitor = Told((zmq.EVENT_ACCEPTED, accepted.fileno()))
        listener._read_events()
        listener._end(accepted.fileno())
        assert rank.recv(1) == b"", "the rank was not shut down"
        assert listener.prove(accepted.fileno(), 1) is None
        assert listener.prove(again.fileno(), 2) is not None


def test_a_connection_that_zeromq_has_closed_proves_nothing(listener: Listener) -> None:
    listener.monitor = Told()
    rank, accepted = connection(listener)
    descriptor = accepted.fileno()
    with rank:
        accepted.close()
        assert listener.prove(descriptor, 1) is None


def connections(listener: Listener, stack: contextlib.ExitStack) -> list[tuple[socket.socket, socket.socket]]:
    """Return many connections, which end with the stack."""
    ends = [connection(listener) for _ in range(20)]
    for end in ends:
        for each in end:
            stack.enter_context(each)
    return ends


def test_who_comes_from_an_expected_ranks_port_is_shut_down_last(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "MAX_UNAUTHENTICATED", 3)
    with contextlib.ExitStack() as stack:
        ends = connections(listener, stack)
        known = ends[:3]
        listener.known_ports = {came.getsockname()[1] for came, _ in known}
        listener.monitor = Told(*((zmq.EVENT_ACCEPTED, accepted.fileno()) for _, accepted in ends))
        listener._read_events()
        assert [is_shut(came) for came, _ in known] == [False] * 3
        assert all(is_shut(came) for came, _ in ends[3:]), "more are there than there may be"


def test_none_of_those_who_may_have_said_hello_is_shut_down(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose the key is that was found right cannot be told before the first message comes.

    Shut down meanwhile, its message may come when another connection has its descriptor: the rank would be
    taken for connected, and the port shut before it can connect again.
    """
    monkeypatch.setattr(listeners, "MAX_UNAUTHENTICATED", 2)
    with contextlib.ExitStack() as stack:
        ends = connections(listener, stack)
        there, later = ends[:2], ends[2:]
        listener.monitor = Told(*((zmq.EVENT_ACCEPTED, accepted.fileno()) for _, accepted in there))
        listener.hold(7)
        listener.monitor = Told(*((zmq.EVENT_ACCEPTED, accepted.fileno()) for _, accepted in later))
        listener._read_events()
        assert [is_shut(came) for came, _ in there] == [False] * 2
        assert [is_shut(came) for came, _ in later] == [True] * len(later)
        assert listener.prove(there[1][1].fileno(), 7) is not None
        assert not listener._held


def is_shut(end: socket.socket) -> bool:
    """Return whether the other end has shut a connection down."""
    end.setblocking(False)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False
