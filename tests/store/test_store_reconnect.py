"""A TCPStore whose connection breaks while the server lives."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchestra.errors import DistNetworkError
from torchestra.store import TCPStore
from torchestra.store.tcp.client import _fields_again
from torchestra.store.tcp.peer import Peer
from torchestra.store.tcp.protocol import Request
from torchestra.store.tcp.server import TCPStoreServer

LONG = 30.0


class Router:
    """Stands between a client and a server, and can lose what is under way.

    Attributes:
        target: the port of the server to which new connections lead.
        answers: whether what the server sends is passed on.
        dropped: set when something that the server sent was not passed on.
    """

    def __init__(self, target: int) -> None:
        self.target, self.answers, self.dropped = target, True, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target))
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                self._threads.append(threading.Thread(target=self._pass_on, args=(source, sink)))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                if self.answers or source.getpeername()[1] != self.target:
                    sink.sendall(data)
                else:
                    self.dropped.set()
        except OSError:
            pass

    def reset(self) -> None:
        """Reset all connections, at both ends."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):  # its other end has reset it already
                # Wakes the thread that reads: only then does close() send something.
                each.shutdown(socket.SHUT_RD)
            each.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join(LONG)


@pytest.fixture
def router(server: TCPStoreServer) -> Iterator[Router]:
    between = Router(server.port)
    yield between
    between.close()


@pytest.fixture
def server() -> Iterator[TCPStoreServer]:
    with TCPStoreServer() as made:
        yield made


@pytest.fixture
def store(router: Router) -> Iterator[TCPStore]:
    made = TCPStore("127.0.0.1", router.port, timeout=LONG)
    yield made
    made.close()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def client_of(server: TCPStoreServer) -> contextlib.closing[TCPStore]:
    """Return a client whose connection leads past the router."""
    return contextlib.closing(TCPStore("127.0.0.1", server.port))


def waiting_peers(server: TCPStoreServer) -> list[Peer]:
    return [peer for peer in list(server._peers) if peer.wait is not None]


def reset_waiter(server: TCPStoreServer, router: Router) -> None:
    """Reset the connection of a client when the server knows that it waits."""
    until(lambda: waiting_peers(server))
    (former,) = waiting_peers(server)
    router.reset()
    until(lambda: former not in server._peers)


def test_a_wait_goes_on(server: TCPStoreServer, router: Router, store: TCPStore) -> None:
    with ThreadPoolExecutor(1) as threads:
        for count in range(5):
            waiting = threads.submit(store.get, f"key{count}")
            reset_waiter(server, router)
            with client_of(server) as direct:
                direct.set(f"key{count}", "value")
            assert waiting.result(LONG) == b"value"


def test_a_wait_that_goes_on_has_the_time_that_is_left() -> None:
    assert _fields_again(Request.WAIT, [b"30000", b"k"], 1.5) == [b"1500", b"k"]
    assert _fields_again(Request.CHECK, [b"k"], 1.5) == [b"k"]


@pytest.mark.parametrize("request_name", ["set", "add", "check", "get"])
def test_a_connection_that_broke_while_nobody_used_it_costs_nothing(
    server: TCPStoreServer, router: Router, store: TCPStore, request_name: str
) -> None:
    store.add("number", 1)
    (idle,) = store._pool._idle
    router.reset()
    assert select.select([idle._socket], [], [], LONG)[0]
    requests: dict[str, Callable[[], object]] = {
        "set": lambda: store.set("number", "2"),
        "add": lambda: store.add("number", 1),
        "check": lambda: store.check(["number"]),
        "get": lambda: store.get("number"),
    }
    requests[request_name]()
    assert store.get("number") == (b"2" if request_name in ("set", "add") else b"1")


@pytest.mark.parametrize("request_name", ["set", "add", "append", "compare_set", "queue_push"])
def test_a_change_is_not_made_twice(
    server: TCPStoreServer, router: Router, store: TCPStore, request_name: str
) -> None:
    """Its answer is lost."""
    router.answers = False
    arguments = {"add": (1,), "compare_set": ("", "1")}.get(request_name, ("1",))
    with ThreadPoolExecutor(1) as threads, client_of(server) as direct:
        changing = threads.submit(getattr(store, request_name), "k", *arguments)
        until(lambda: direct.check(["k"]))
        assert router.dropped.wait(LONG)
        router.answers = True
        router.reset()
        with pytest.raises(DistNetworkError, match="lost the connection to the server"):
            changing.result(LONG)
        if request_name == "queue_push":
            assert direct.queue_len("k") == 1
        else:
            assert direct.get("k") == b"1"
    assert store.check(["k"]), "the store is usable"


def test_another_server_at_the_same_address_is_not_asked(
    server: TCPStoreServer, router: Router, store: TCPStore
) -> None:
    with TCPStoreServer() as another, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.get, "k")
        until(lambda: waiting_peers(server))
        router.target = another.port
        router.reset()
        with pytest.raises(DistNetworkError, match="lost the connection to the server"):
            waiting.result(LONG)
        assert not waiting_peers(another)
