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
from torchestra.store.tcp import resuming
from torchestra.store.tcp.address import Address
from torchestra.store.tcp.client import _fields_again
from torchestra.store.tcp.peer import Peer
from torchestra.store.tcp.protocol import Outcome, Reply, Request
from torchestra.store.tcp.requests import Waiting
from torchestra.store.tcp.server import TCPStoreServer

LONG = 30.0


class Router:
    """Stands between a client and a server, and can lose what is under way.

    Attributes:
        target: the port of the server to which new connections lead.
        answers: whether what the server sends is passed on.
        dropped: set when something that the server sent was not passed on.
        may_ask: what clients send is passed on; what comes while it is not set is passed on after that.
    """

    def __init__(self, target: int) -> None:
        self.target, self.answers, self.dropped = target, True, threading.Event()
        self.may_ask = threading.Event()
        self.may_ask.set()
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
                is_asked = sink.getpeername()[1] == self.target
                if is_asked:
                    assert self.may_ask.wait(LONG)
                if self.answers or is_asked:
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


def change(store: TCPStore, request_name: str) -> object:
    arguments = {"add": (1,), "compare_set": ("", "1"), "delete_key": ()}.get(request_name, ("1",))
    result: object = getattr(store, request_name)("k", *arguments)
    return result


CHANGES = {"set": None, "add": 1, "append": None, "compare_set": b"1", "queue_push": None}


def check_made_once(store: TCPStore, request_name: str) -> None:
    if request_name == "queue_push":
        assert store.queue_len("k") == 1
    else:
        assert store.get("k") == b"1"


@pytest.mark.parametrize("request_name", CHANGES)
def test_a_change_whose_answer_is_lost_goes_on_and_is_made_once(
    server: TCPStoreServer, router: Router, store: TCPStore, request_name: str
) -> None:
    router.answers = False
    with ThreadPoolExecutor(1) as threads, client_of(server) as direct:
        changing = threads.submit(change, store, request_name)
        until(lambda: direct.check(["k"]))
        assert router.dropped.wait(LONG)
        router.answers = True
        router.reset()
        assert changing.result(LONG) == CHANGES[request_name]
        check_made_once(direct, request_name)


def test_a_deletion_whose_answer_is_lost_says_that_the_key_was_there(
    server: TCPStoreServer, router: Router, store: TCPStore
) -> None:
    store.set("k", "1")
    router.answers = False
    with ThreadPoolExecutor(1) as threads, client_of(server) as direct:
        changing = threads.submit(store.delete_key, "k")
        until(lambda: not direct.check(["k"]))
        assert router.dropped.wait(LONG)
        router.answers = True
        router.reset()
        assert changing.result(LONG) is True


@pytest.mark.parametrize("request_name", CHANGES)
def test_a_change_that_was_lost_on_its_way_goes_on_and_is_made_once(
    server: TCPStoreServer, router: Router, store: TCPStore, request_name: str
) -> None:
    (connection,) = store._pool._idle
    router.may_ask.clear()
    with ThreadPoolExecutor(1) as threads:
        changing = threads.submit(change, store, request_name)
        until(lambda: connection.asked)
        router.reset()
        router.may_ask.set()
        assert changing.result(LONG) == CHANGES[request_name]
        check_made_once(store, request_name)


@pytest.mark.parametrize("request_name", CHANGES)
def test_a_change_is_made_once_though_it_comes_over_both_connections(
    server: TCPStoreServer, router: Router, store: TCPStore, request_name: str
) -> None:
    """The client's connection breaks, while the server's goes on, and the request comes late over that."""
    (connection,) = store._pool._idle
    (former,) = server._peers
    router.may_ask.clear()
    with ThreadPoolExecutor(1) as threads, client_of(server) as direct:
        changing = threads.submit(change, store, request_name)
        until(lambda: connection.asked)
        late = Router(server.port)
        store._pool._address = Address("127.0.0.1", late.port)
        connection.interrupt()
        assert changing.result(LONG) == CHANGES[request_name]
        router.may_ask.set()
        until(lambda: former.closed)
        check_made_once(direct, request_name)
        store.close()
        late.close()


def test_a_change_whose_answer_is_lost_again_and_again_is_made_once(
    server: TCPStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Outcome | Waiting] = []
    reply = server._reply

    def lose(peer: Peer, outcome: Outcome | Waiting) -> None:
        if len(lost) == 3:
            reply(peer, outcome)
            return
        lost.append(outcome)
        with monkeypatch.context() as patches:
            patches.setattr(peer, "send", lambda _: None)
            reply(peer, outcome)
        raise ConnectionResetError

    with client_of(server) as store:
        monkeypatch.setattr(server, "_reply", lose)
        assert store.add("k", 1) == 1
        assert lost == [(Reply.OK, [b"1"])] * 3
        assert store.get("k") == b"1"


def test_who_resumes_a_change_that_the_server_does_not_remember_is_told_so(
    server: TCPStoreServer, router: Router, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "_MAX_REMEMBERED", 0)
    router.answers = False
    with ThreadPoolExecutor(1) as threads, client_of(server) as direct:
        changing = threads.submit(store.add, "k", 1)
        until(lambda: direct.check(["k"]))
        assert router.dropped.wait(LONG)
        router.answers = True
        router.reset()
        with pytest.raises(
            DistNetworkError, match="does not remember whether it had carried the request out"
        ):
            changing.result(LONG)
        assert direct.get("k") == b"1"


def test_a_long_answer_is_not_kept() -> None:
    assert resuming.kept((Reply.OK, [b"x" * 4096])) is not None
    assert resuming.kept((Reply.OK, [b"x" * 4097])) is None


def test_what_no_client_resumes_ends_its_connection(server: TCPStoreServer) -> None:
    change = [str(int(Request.SET)).encode(), b"k", b"2"]
    with client_of(server) as store:
        store.set("k", "1")
        own = store._pool._idle[0].nonce
        for fields in (
            [own, b"1", *change],
            [],
            [b"another", b"one", *change],
            [b"another", b"1", str(int(Request.POP)).encode(), b"", b"k"],
            [own, b"7", *change],
        ):
            with pytest.raises(DistNetworkError, match="lost the connection"):
                store._pool.request(Request.RESUME, fields, LONG)
        assert store.get("k") == b"1"


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
