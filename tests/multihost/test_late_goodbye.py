"""What a rank has sent before it ended its connections may come later than the end of the other connection.

Between two ranks there is one connection each way, and the network may delay either.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from torchestra.transport.endpoint import EndpointRecord
from torchestra.transport.listener import IncomingConnection, Listener
from torchestra.transport.message import Message
from torchestra.transport.pair import ENDED_SECONDS, PairConnection
from torchestra.transport.transport import Transport

SECONDS = 60.0
HEARTBEAT = 30.0
TEXT = b"the last message"


class Relay:
    """Forwards one TCP connection, and holds what it gets, the end included, for as long as it is told to.

    Attributes:
        may_forward: it does not hold what it gets.
        is_cut: it ends the connection when it gets something.
    """

    def __init__(self, to: str) -> None:
        host, _, port = to.removeprefix("tcp://").rpartition(":")
        self._to = host, int(port)
        self.is_cut = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.may_forward = threading.Event()
        self.may_forward.set()
        self._thread = threading.Thread(target=self._forward)
        self._thread.start()

    def _forward(self) -> None:
        with (
            contextlib.suppress(OSError),  # an end was closed while the other one sent
            self._listening,
            self._listening.accept()[0] as sender,
            socket.create_connection(self._to) as receiver,
            selectors.DefaultSelector() as selector,
        ):
            selector.register(sender, selectors.EVENT_READ, receiver)
            selector.register(receiver, selectors.EVENT_READ, sender)
            while True:
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    data = key.fileobj.recv(1 << 16)
                    assert self.may_forward.wait(SECONDS)
                    if not data or self.is_cut:
                        return
                    key.data.sendall(data)

    def join(self) -> None:
        self._thread.join(SECONDS)


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def relayed(endpoint: EndpointRecord) -> tuple[Relay, EndpointRecord]:
    relay = Relay(endpoint.address)
    return relay, EndpointRecord(relay.address, endpoint.key)


class Pair:
    """Rank 0, which stays, and rank 1, which leaves: each sends to the other through a relay."""

    def __init__(self, heartbeat: float) -> None:
        self.arrived: list[bytes] = []
        self.staying = Transport("staying", "127.0.0.1", None, heartbeat, self._arrive)
        self.leaving = Transport("leaving", "127.0.0.1", None, HEARTBEAT, lambda _: None)
        self.to_staying, staying = relayed(self.staying.endpoint)
        self.to_leaving, leaving = relayed(self.leaving.endpoint)
        joining = threading.Thread(target=self.leaving.join, args=({0: staying}, {0: "rank 0"}, SECONDS))
        joining.start()
        self.staying.join({1: leaving}, {1: "rank 1"}, SECONDS)
        joining.join()

    @property
    def connection(self) -> PairConnection:
        """Rank 0's view of rank 1."""
        return self.staying._loop.peer(1)

    def _arrive(self, message: Message) -> None:
        self.arrived.append(bytes(message.text))


@contextlib.contextmanager
def pair(heartbeat: float = HEARTBEAT) -> Iterator[Pair]:
    made = Pair(heartbeat)
    try:
        yield made
    finally:
        made.leaving.close()
        made.to_staying.may_forward.set()
        made.staying.close()
        made.to_staying.join()
        made.to_leaving.join()


def test_who_has_ended_well_is_not_taken_for_dead_while_its_last_words_are_on_their_way() -> None:
    with pair() as ranks:
        ranks.to_staying.may_forward.clear()
        ranks.leaving.post_text(0, 0, 0, TEXT)
        ranks.leaving.close()
        wait_until(lambda: ranks.connection._since_end > 4 * ENDED_SECONDS or ranks.staying.lost())
        assert ranks.staying.lost() == {}
        ranks.to_staying.may_forward.set()
        wait_until(ranks.staying.lost)
        assert ranks.arrived == [TEXT]
        assert ranks.staying.lost() == {1: "has shut down"}


def test_who_ends_one_connection_and_keeps_the_other_is_given_up_after_a_heartbeat() -> None:
    with pair(heartbeat=1.0) as ranks:
        ranks.to_leaving.is_cut = True
        ranks.staying.post_text(1, 0, 0, TEXT)
        wait_until(ranks.staying.lost)
        assert ranks.connection._since_end >= 1.0
        assert ranks.staying.lost() == {1: "died (its connection has ended)"}


def test_a_connection_has_ended_though_its_descriptor_is_used_again() -> None:
    one, other = socket.socketpair()
    with other, socket.socket() as another:
        connection = IncomingConnection(one.fileno())
        assert not connection.has_ended
        descriptor = one.fileno()
        one.close()
        assert connection.has_ended
        with open("/dev/null") as file, socket.socket() as reused:
            assert descriptor in (file.fileno(), reused.fileno(), another.fileno())
            assert connection.has_ended


def test_a_listener_that_is_closed_replaces_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has closed its own, and their numbers may be those of others now."""
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox:
        listener = Listener(inbox, "127.0.0.1", None)
        listener.close()
        one, other = socket.socketpair()
        replaced: list[int] = []
        with one, other, monkeypatch.context() as patches:
            patches.setattr(os, "dup2", lambda _, to, **named: replaced.append(to))
            assert not listener.prove(one.fileno(), 1).has_ended
        assert replaced == []
