"""TCPStore: who serves, who may connect, what happens when one side goes."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from forking import Child
from ports import free_port
from torchestra.errors import (
    DistNetworkError,
    DistStoreError,
    InvalidArgumentError,
    StoreTimeoutError,
)
from torchestra.store import HashStore, Store, TCPStore, TCPStoreServer
from torchestra.store.tcp import client as client_module
from torchestra.store.tcp import connection as connection_module
from torchestra.store.tcp import protocol
from torchestra.system.authentication import NONCE_BYTES, PROOF_BYTES

LONG = 60.0


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHESTRA_SECRET", raising=False)


@pytest.fixture
def server() -> Iterator[TCPStoreServer]:
    with TCPStoreServer() as server:
        yield server


def client_of(server: TCPStoreServer, **options: object) -> TCPStore:
    return TCPStore(server.host, server.port, **options)  # type: ignore[arg-type]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_master_chooses_a_port_and_tells_it() -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True)
    assert (master.host, str(master)) == ("127.0.0.1", f"TCPStore(127.0.0.1:{master.port})")
    TCPStore("localhost", master.port).set("k", "1")
    assert master.get("k") == b"1"


def test_a_listening_socket_may_be_handed_in() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    master = TCPStore("127.0.0.1", port, 1, is_master=True, master_listen_fd=listener.detach())
    assert master.port == port
    assert TCPStore("127.0.0.1", port).add("n", 1) == 1


def test_a_handed_in_socket_must_be_one_and_have_the_port() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    with pytest.raises(InvalidArgumentError, match="which does not match port 1"):
        TCPStore("127.0.0.1", 1, is_master=True, master_listen_fd=listener.detach())
    end, other = os.pipe()
    with pytest.raises(InvalidArgumentError, match=f"master_listen_fd {end} is not a socket"):
        TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=end)
    os.close(end)
    os.close(other)


def test_only_the_interface_asked_for_is_listened_on(server: TCPStoreServer) -> None:
    """A server for 127.0.0.1 is not reached at another address of the same host."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port)).close()


def test_a_port_in_use_is_said_with_what_to_do(server: TCPStoreServer) -> None:
    with pytest.raises(
        DistNetworkError,
        match=rf"127\.0\.0\.1:{server.port}: .* in use, .*choose a free port \(MASTER_PORT\)",
    ):
        TCPStore("127.0.0.1", server.port, is_master=True)


def test_a_host_elsewhere_is_refused_without_a_secret() -> None:
    with pytest.raises(DistNetworkError, match=r"not an address of this host; .*TORCHESTRA_SECRET"):
        TCPStoreServer("192.0.2.1", 0)
    with TCPStoreServer("192.0.2.1", 0, secret="s") as server:
        assert TCPStore("127.0.0.1", server.port, secret="s").num_keys() == 0


@pytest.mark.parametrize(
    ("host", "port", "master", "words"),
    [
        ("127.0.0.1", 65536, True, "from 0 to 65535, got 65536"),
        ("127.0.0.1", -1, False, "from 0 to 65535, got -1"),
        ("127.0.0.1", "29500", False, "`port` must be an int, got '29500'"),
        ("127.0.0.1", 0, False, "a client needs the port"),
        ("", 1, False, "must be a name or an address, got ''"),
        (None, 1, True, "`host_name` must be a str, got None"),
    ],
)
def test_a_wrong_address_is_refused_at_once(host: str, port: int, master: bool, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        TCPStore(host, port, is_master=master)


def test_a_master_waits_for_its_workers() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as threads:
        # The clients come first and try until there is a master.
        clients = [threads.submit(TCPStore, "127.0.0.1", port, 3) for _ in range(2)]
        master = TCPStore("127.0.0.1", port, 3, is_master=True, timeout=LONG)
        assert master.num_keys() == 0
        assert [client.result(LONG).port for client in clients] == [port, port]
        master.close()


def test_a_master_says_how_many_workers_came(server: TCPStoreServer) -> None:
    with pytest.raises(StoreTimeoutError, match=r"after 0\.05 seconds .* 1/4 clients joined"):
        TCPStore("127.0.0.1", 0, 4, is_master=True, timeout=0.05)
    TCPStore("127.0.0.1", 0, 4, is_master=True, timeout=0.05, wait_for_workers=False).close()


def test_masters_may_share_a_server_and_the_last_ends_it() -> None:
    first = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True)
    second = TCPStore("127.0.0.1", first.port, is_master=True, multi_tenant=True)
    first.set("k", "1")
    first.close()
    assert second.get("k") == b"1"
    port = second.port
    with pytest.raises(InvalidArgumentError, match="with another secret"):
        TCPStore("127.0.0.1", port, is_master=True, multi_tenant=True, secret="s")
    del second
    gc.collect()
    TCPStoreServer("127.0.0.1", port).close()


def test_a_collected_master_leaves_no_thread_port_or_descriptor() -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True)
    master.close()
    gc.collect()
    descriptors, threads = open_descriptors(), threading.active_count()
    for _ in range(5):
        master = TCPStore("127.0.0.1", 0, is_master=True)
        others = [TCPStore("127.0.0.1", master.port) for _ in range(5)]
        others[0].set("k", "1")
        del master, others
        gc.collect()
    # Fewer, where something of an earlier test has ended meanwhile.
    assert open_descriptors() <= descriptors
    assert threading.active_count() <= threads


def test_a_store_whose_first_try_failed_is_freed_like_any_other() -> None:
    """An error that is kept keeps its traceback, and with it the store and the connection."""
    port = free_port()
    with ThreadPoolExecutor(1) as threads:
        gc.disable()
        try:
            trying = threads.submit(TCPStore, "127.0.0.1", port, timeout=LONG)
            assert not wait([trying], 0.05).done
            with TCPStoreServer("127.0.0.1", port):
                store = weakref.ref(trying.result(LONG))
                del trying
                threads.submit(int).result(LONG)
                assert store() is None
        finally:
            gc.enable()


def test_threads_that_come_and_go_leave_no_connections(server: TCPStoreServer) -> None:
    store = client_of(server)
    store.set("k", "1")
    descriptors = open_descriptors()
    for _ in range(30):
        thread = threading.Thread(target=store.get, args=("k",))
        thread.start()
        thread.join()
    assert open_descriptors() <= descriptors


def test_nobody_there_is_an_error_that_names_the_place() -> None:
    port = free_port()
    with pytest.raises(
        DistNetworkError,
        match=rf"no store answered at 127\.0\.0\.1:{port} within 0\.1 s \(Connection refused\)",
    ):
        TCPStore("127.0.0.1", port, timeout=0.1)


def test_an_unknown_host_is_an_error_that_names_it() -> None:
    with pytest.raises(DistNetworkError, match=r"nowhere\.invalid:29500"):
        TCPStore("nowhere.invalid", 29500, timeout=0.1)


def test_a_server_that_ends_is_noticed_by_those_who_wait(server: TCPStoreServer) -> None:
    store = client_of(server)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.get, "never")
        client_of(server).close()
        server.close()
        with pytest.raises(DistNetworkError, match=r"lost the connection to the server|no store answered"):
            waiting.result(LONG)


def test_a_closed_store_ends_its_waits_and_says_so(server: TCPStoreServer) -> None:
    store = client_of(server)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.get, "never")
        store.close()
        with pytest.raises((DistNetworkError, DistStoreError)):
            waiting.result(LONG)
    with pytest.raises(DistStoreError, match="is closed"):
        store.set("k", "1")


class Impostor:
    """Listens, answers each connection with fixed bytes, and keeps it open."""

    def __init__(self, answer: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.heard = b""
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connections = []
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            self.heard += connection.recv(4096)
            connection.sendall(self._answer)
            connections.append(connection)
        for connection in connections:
            connection.close()

    def __enter__(self) -> Impostor:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def hello(**options: int) -> bytes:
    fields = {"method": 0, "nonce": bytes(NONCE_BYTES), **options}
    return protocol.Hello(**fields).encode(from_client=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not a torchestra store; is the port another program's?"),
        (
            hello(version=9),
            "speaks version 9 of the protocol, this process version 2; use the same torchestra",
        ),
        (hello(method=1), "the server has a secret and this process has none"),
        (b"", "no store answered at .* within 0.1 s .the server did not answer."),
    ],
    ids=["another program", "another version", "a secret", "silence"],
)
def test_what_is_not_our_server_is_told_apart(answer: bytes, words: str) -> None:
    with Impostor(answer) as impostor, pytest.raises(DistNetworkError, match=words):
        TCPStore("127.0.0.1", impostor.port, timeout=LONG if answer else 0.1)


def test_a_server_that_stops_answering_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "GRACE_SECONDS", 0.05)
    with Impostor(hello()) as impostor:
        store = TCPStore("127.0.0.1", impostor.port, timeout=LONG)
        with pytest.raises(DistNetworkError, match=r"gave no answer within 0\.1 s; its process is stopped"):
            store.wait(["k"], 0.05)


def test_the_secret_never_travels() -> None:
    with Impostor(hello(method=1) + bytes(PROOF_BYTES)) as impostor:
        with pytest.raises(DistNetworkError, match="have different secrets"):
            TCPStore("127.0.0.1", impostor.port, timeout=LONG, secret="between us")
        assert len(impostor.heard) >= protocol.HELLO_SIZE
        assert b"between us" not in impostor.heard


def test_the_secret_must_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with TCPStoreServer(secret="right") as server:
        client_of(server, secret=b"right").set("k", "1")
        for wrong in ("wrong", "right "):
            with pytest.raises(DistNetworkError, match="the server and this process have different secrets"):
                client_of(server, secret=wrong)
        with pytest.raises(
            DistNetworkError, match=r"the server has a secret .* give both .*TORCHESTRA_SECRET"
        ):
            client_of(server)
        monkeypatch.setenv("TORCHESTRA_SECRET", "right")
        assert client_of(server).get("k") == b"1"


def test_a_client_with_a_secret_does_not_talk_to_a_server_without(server: TCPStoreServer) -> None:
    """Or a stranger could stand in for the server by claiming that there is no secret."""
    with pytest.raises(DistNetworkError, match="this process has a secret and the server has none"):
        client_of(server, secret="s")


def test_a_secret_is_not_empty(server: TCPStoreServer) -> None:
    with pytest.raises(InvalidArgumentError, match="not empty"):
        client_of(server, secret="")


def test_a_unix_socket_leaves_no_file_and_frees_its_name() -> None:
    name = f"unix:@torchestra-test-{os.getpid()}"
    for value in ("1", "2"):
        master = TCPStore(name, 0, is_master=True)
        assert str(master) == f"TCPStore({name})"
        TCPStore(name, 0).set("k", value)
        assert master.get("k") == value.encode()
        with pytest.raises(DistNetworkError, match="already in use"):
            TCPStore(name, 0, is_master=True)
        master.close()


def interrupt_soon(store: Store, ready: str) -> None:
    store.wait([ready], LONG)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("attempt", ["get", "queue_pop"])
@pytest.mark.parametrize("kind", ["tcp", "hash"])
def test_ctrl_c_gets_through_a_wait(kind: str, attempt: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True) if kind == "tcp" else HashStore()
    store.set_timeout(LONG)
    helper = threading.Thread(target=interrupt_soon, args=(store, "ready"))
    helper.start()

    def say_ready_and_wait() -> None:
        store.set("ready", "1")
        getattr(store, attempt)("never")

    with pytest.raises(KeyboardInterrupt):
        say_ready_and_wait()
    helper.join()
    # The wait that was broken off takes nothing that comes now.
    store.queue_push("never", "kept")
    assert store.queue_pop("never") == b"kept"
    store.close()


def test_ctrl_c_gets_through_while_connecting() -> None:
    helper = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))

    def connect() -> None:
        helper.start()
        TCPStore("127.0.0.1", free_port(), timeout=LONG)

    with pytest.raises(KeyboardInterrupt):
        connect()
    helper.join()


def test_a_forked_child_has_connections_of_its_own(server: TCPStoreServer) -> None:
    """On a shared socket, parent and child would read each other's answers."""
    store = client_of(server)
    store.set("k", "1")

    def ask(who: str) -> list[bytes]:
        answers = []
        for number in range(200):
            store.set(f"{who}/{number}", f"{who} {number}")
            answers.append(store.get(f"{who}/{number}"))
        return answers

    child = Child(lambda: ask("child"))
    assert ask("parent") == [f"parent {number}".encode() for number in range(200)]
    assert child.result() == [f"child {number}".encode() for number in range(200)]


def test_a_forked_child_holds_neither_port_nor_connection() -> None:
    """A child that inherits the listening socket would keep the port from the next master."""
    master = TCPStore("127.0.0.1", 0, is_master=True)
    other = TCPStore("127.0.0.1", master.port)
    master.set("k", "1")
    go, let_go = os.pipe()
    up, say_up = os.pipe()

    def live_on() -> bytes:
        os.close(let_go)
        os.write(say_up, b"x")
        return os.read(go, 1)

    child = Child(live_on)
    assert os.read(up, 1) == b"x"
    port = master.port
    master.close()
    with TCPStoreServer("127.0.0.1", port), pytest.raises(DistNetworkError):
        other.get("k")
    os.write(let_go, b"x")
    assert child.result() == b"x"
    for descriptor in (go, let_go, up, say_up):
        os.close(descriptor)


def test_a_childs_end_does_not_end_the_parents_server() -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True)
    assert Child(lambda: (master.set("from child", "1"), master.close())).result() == (None, None)
    assert master.get("from child") == b"1"
    master.close()


def test_hundreds_of_clients(server: TCPStoreServer) -> None:
    count = 300
    met = threading.Barrier(count)

    def run(rank: int) -> bytes:
        store = client_of(server, timeout=LONG)
        met.wait(LONG)
        store.set(f"k{rank}", str(rank))
        store.barrier("all", count)
        value = store.get(f"k{(rank + 1) % count}")
        store.close()
        return value

    with ThreadPoolExecutor(count) as threads:
        values = list(threads.map(run, range(count)))
    assert values == [str((rank + 1) % count).encode() for rank in range(count)]


def test_a_value_beyond_the_limit_is_refused_before_it_is_sent(
    server: TCPStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_MESSAGE", 1000)
    store = client_of(server)
    store.set("k", "v" * 900)
    with pytest.raises(InvalidArgumentError, match=r"10\d\d bytes are more than a message may have \(1000\)"):
        store.set("k", "v" * 1000)
    assert store.get("k") == b"v" * 900


def test_an_answer_beyond_the_limit_is_an_error_and_not_the_end(
    server: TCPStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_MESSAGE", 1000)
    store = client_of(server)
    for _ in range(3):
        store.append("k", "v" * 400)
    with pytest.raises(InvalidArgumentError, match="ask for fewer keys"):
        store.get("k")
    assert store.queue_len("k") == 0


def test_large_values_and_small_requests_at_once(server: TCPStoreServer) -> None:
    large = os.urandom(1 << 20) * 24

    def move(number: int) -> bool:
        store = client_of(server)
        if number:
            return [store.add(f"n{number}", 1) for _ in range(50)] == list(range(1, 51))
        store.set("large", large)
        return store.get("large") == large

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(move, range(4)))


def test_a_silent_connection_is_retried_within_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is too busy to greet may drop a client; the client must come again."""
    monkeypatch.setattr(connection_module, "_HANDSHAKE_SECONDS", 0.05)
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as deaf, ThreadPoolExecutor(1) as threads:
        client = threads.submit(TCPStore, "127.0.0.1", port, timeout=LONG)
        deaf.accept()[0].close()
        deaf.close()
        with TCPStoreServer("127.0.0.1", port):
            assert client.result(LONG).add("n", 1) == 1


def test_the_server_runs_by_itself(nothing_left: Callable[[], None]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "torchestra.store.tcp"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    host, _, port = process.stdout.readline().strip().rpartition(":")
    store = TCPStore(host, int(port))
    store.set("k", "1")
    assert TCPStore(host, int(port)).get("k") == b"1"
    process.terminate()
    assert process.wait(LONG) == 0
    process.stdout.close()
    nothing_left()
