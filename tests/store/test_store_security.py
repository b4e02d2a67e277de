"""Who is let in: other hosts, other users, other jobs, and strangers by the thousand."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forking import Child
from torchestra.errors import DistNetworkError
from torchestra.store import PrefixStore, TCPStore, TCPStoreServer
from torchestra.store.tcp import locality, protocol
from torchestra.store.tcp import server as server_module
from torchestra.store.tcp.peer import Peer
from torchestra.store.tcp.protocol import HELLO_SIZE, REFUSAL, Hello
from torchestra.system.authentication import NONCE_BYTES, PROOF_BYTES, proof

LONG = 60.0
ELSEWHERE = "198.51.100.1"
NOBODY = 65534
SECRET = b"between us"
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user too")


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHESTRA_SECRET", raising=False)


@pytest.fixture
def own_address() -> str:
    """An address of this host that others can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ELSEWHERE, 9))
        except OSError:
            pytest.skip("this host has no address but loopback")
        return str(probe.getsockname()[0])


# Which interface -------------------------------------------------------------------------------------------


def test_without_a_secret_a_name_of_this_host_is_its_loopback_interface(own_address: str) -> None:
    """Ranks on one host may call it by its name, and yet nobody outside can connect."""
    master = TCPStore(own_address, 0, is_master=True)
    assert (master.host, str(master)) == (own_address, f"TCPStore({own_address}:{master.port})")
    TCPStore(own_address, master.port).set("k", "1")
    assert TCPStore("localhost", master.port).get("k") == b"1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((own_address, master.port)).close()


def test_with_a_secret_the_interface_named_is_listened_on(own_address: str) -> None:
    with TCPStoreServer(own_address, 0, secret=SECRET) as server:
        socket.create_connection((own_address, server.port)).close()
        assert TCPStore(own_address, server.port, secret=SECRET).num_keys() == 0


def test_a_name_that_means_loopback_here_only_is_listened_for_everywhere(
    own_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian has a host's own name as 127.0.1.1; other hosts look for it at its real address."""
    known = {"this-host": "127.0.1.1", "localhost": "127.0.0.1"}
    look_up = socket.getaddrinfo

    def as_debian(host: str, *rest: Any, **options: Any) -> Any:
        return look_up(known.get(host, host), *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", as_debian)
    with TCPStoreServer("this-host", 0, secret=SECRET) as server:
        assert TCPStore(own_address, server.port, secret=SECRET).num_keys() == 0
        assert TCPStore("this-host", server.port, secret=SECRET).num_keys() == 0
    for options in ({"host": "this-host"}, {"host": "localhost", "secret": SECRET}):
        with TCPStoreServer(**options) as server, pytest.raises(ConnectionRefusedError):  # type: ignore[arg-type]
            socket.create_connection((own_address, server.port)).close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_interface_needs_a_secret(host: str) -> None:
    with pytest.raises(DistNetworkError, match=r"every interface, without a secret; set TORCHESTRA_SECRET"):
        TCPStore(host, 0, is_master=True)


def test_every_interface_with_a_secret() -> None:
    with TCPStoreServer("0.0.0.0", 0, secret=SECRET) as server:
        assert TCPStore("127.0.0.1", server.port, secret=SECRET).num_keys() == 0


def test_a_socket_handed_in_is_not_listened_on_openly() -> None:
    for secret in (None, SECRET):
        listener = socket.socket()
        listener.bind(("0.0.0.0", 0))
        port = listener.getsockname()[1]
        if secret is None:
            with pytest.raises(DistNetworkError, match=r"other hosts can reach, .*set TORCHESTRA_SECRET"):
                TCPStoreServer("127.0.0.1", port, listen_fd=listener.detach())
        else:
            TCPStoreServer("127.0.0.1", port, listen_fd=listener.detach(), secret=secret).close()


def test_without_a_secret_another_hosts_store_is_not_asked() -> None:
    """It is said at once, and not after the time-out, that a start on several hosts needs a secret."""
    words = rf"TCPStore\({ELSEWHERE}:29500\) is on another host, .*set TORCHESTRA_SECRET to the same"
    with pytest.raises(DistNetworkError, match=words):
        TCPStore(ELSEWHERE, 29500, timeout=LONG)


@pytest.mark.parametrize(
    ("address", "own"), [("127.0.0.1", True), ("127.8.0.1", True), ("0.0.0.0", True), (ELSEWHERE, False)]
)
def test_what_is_this_host(address: str, own: bool) -> None:
    assert locality.is_own(socket.AF_INET, (address, 1)) is own


def test_an_ipv4_address_in_an_ipv6_one_is_known() -> None:
    assert locality.is_loopback(("::ffff:127.0.0.1", 1))
    assert not locality.is_loopback((f"::ffff:{ELSEWHERE}", 1))


# Which user ------------------------------------------------------------------------------------------------


def as_nobody(work: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        return work()

    return run


def first_words(host: str, port: int, data: bytes) -> bytes:
    """Return what a server answers, up to its first hundred bytes."""
    with socket.create_connection((host, port), LONG) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data)
        return connection.recv(100)
    return b""


@needs_root
def test_without_a_secret_another_users_process_is_turned_away(caplog: pytest.LogCaptureFixture) -> None:
    hello = Hello(0, bytes(NONCE_BYTES)).encode(from_client=True)
    with TCPStoreServer() as server:
        assert len(first_words(server.host, server.port, hello)) == HELLO_SIZE
        answer = Child(as_nobody(lambda: first_words(server.host, server.port, hello))).result()
        assert Hello.decode(answer, from_client=False).method == protocol.AuthMethod.OTHER_USER

        def join() -> str:
            with pytest.raises(DistNetworkError) as caught:
                TCPStore(server.host, server.port, timeout=LONG)
            return str(caught.value)

        assert "the server is another user's, and there is no secret" in Child(as_nobody(join)).result()
        assert TCPStore(server.host, server.port).list_keys() == []
    assert f"a process of another user (number {NOBODY})" in caplog.text


@needs_root
def test_with_a_secret_it_is_the_secret_that_counts() -> None:
    with TCPStoreServer(secret=SECRET) as server:

        def join() -> int:
            return TCPStore(server.host, server.port, secret=SECRET).add("n", 1)

        assert Child(as_nobody(join)).result() == 1


@needs_root
def test_a_server_of_another_user_is_not_trusted() -> None:
    """The port of a job that has ended, or not begun, may be taken by anybody."""
    say, hear = os.pipe()[::-1]
    end, go = os.pipe()

    def serve() -> None:
        os.close(go)
        with socket.create_server(("127.0.0.1", 0)) as impostor:
            os.write(say, str(impostor.getsockname()[1]).encode())
            connection, _ = impostor.accept()
            connection.sendall(Hello(0, bytes(NONCE_BYTES)).encode(from_client=False))
            os.read(end, 1)
            connection.close()

    child = Child(as_nobody(serve))
    port = int(os.read(hear, 10))
    with pytest.raises(
        DistNetworkError, match=rf"server is another user's \(number {NOBODY}\), .*another job's"
    ):
        TCPStore("127.0.0.1", port, timeout=LONG)
    os.close(go)
    child.result()
    for descriptor in (say, hear, end):
        os.close(descriptor)


def test_a_kernel_that_does_not_tell_users_apart_turns_nobody_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locality, "_owner", lambda *_: None)
    with TCPStoreServer() as server:
        assert TCPStore(server.host, server.port).num_keys() == 0


# Which job -------------------------------------------------------------------------------------------------


def greeted(server: TCPStoreServer, nonce: bytes) -> tuple[socket.socket, bytes]:
    """A connection that has sent its hello, and the server's nonce."""
    connection = socket.create_connection((server.host, server.port), LONG)
    connection.sendall(Hello(1, nonce).encode(from_client=True))
    return connection, Hello.decode(connection.recv(HELLO_SIZE), from_client=False).nonce


def test_a_proof_is_good_for_one_connection_only() -> None:
    """Who has listened in on a handshake cannot say the same again."""
    nonce = b"n" * NONCE_BYTES
    with TCPStoreServer(secret=SECRET) as server:
        first, challenge = greeted(server, nonce)
        heard = proof(SECRET, "store client", nonce, challenge)
        with first:
            first.sendall(heard)
            assert first.recv(PROOF_BYTES) == proof(SECRET, "store server", nonce, challenge)
        second, other = greeted(server, nonce)
        assert other != challenge
        with second:
            second.sendall(heard)
            assert second.recv(100) == REFUSAL
            assert second.recv(100) == b""


def test_a_proof_is_not_good_for_the_other_side() -> None:
    """An impostor that sends back what it hears proves nothing."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def reflect() -> None:
            connection, _ = impostor.accept()
            with connection:
                theirs = Hello.decode(connection.recv(HELLO_SIZE), from_client=True)
                connection.sendall(Hello(1, theirs.nonce).encode(from_client=False))
                connection.sendall(connection.recv(PROOF_BYTES))

        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(DistNetworkError, match="does not know this process's secret, though it took its"):
            TCPStore("127.0.0.1", impostor.getsockname()[1], timeout=LONG, secret=SECRET)
        thread.join()


def test_a_server_too_busy_for_a_proof_is_asked_again() -> None:
    """It drops connections when there are too many, and that must not be taken for a wrong secret."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        served: list[TCPStoreServer] = []

        def drop_then_serve() -> None:
            connection, _ = busy.accept()
            connection.recv(HELLO_SIZE)
            connection.sendall(Hello(1, bytes(NONCE_BYTES)).encode(from_client=False))
            connection.recv(PROOF_BYTES)
            busy.close()
            connection.close()
            served.append(TCPStoreServer("127.0.0.1", port, secret=SECRET))

        thread = threading.Thread(target=drop_then_serve)
        thread.start()
        assert TCPStore("127.0.0.1", port, timeout=LONG, secret=SECRET).add("n", 1) == 1
        thread.join()
        served[0].close()


def test_the_log_says_who_was_refused_but_does_not_fill_up(caplog: pytest.LogCaptureFixture) -> None:
    with TCPStoreServer(secret=SECRET) as server:
        for _ in range(20):
            with pytest.raises(DistNetworkError, match="different secrets"):
                TCPStore(server.host, server.port, secret="wrong")
    lines = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.getMessage().partition(" at 127.0.0.1:")[0] for line in lines] == [
        f"{server!r} refused a client"
    ]
    assert "it has another secret" in caplog.text
    assert SECRET.decode() not in caplog.text


def test_a_store_knows_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    with TCPStoreServer(secret=SECRET) as server:
        store = TCPStore(server.host, server.port, secret=SECRET)
        inner = PrefixStore("inner", PrefixStore("outer", store))
        monkeypatch.setenv("TORCHESTRA_SECRET", "the environment's")
        assert (store.secret, inner.secret) == (SECRET, SECRET)
        inner.secret = "its own"
        assert (inner.secret, store.secret) == (b"its own", SECRET)


# Strangers -------------------------------------------------------------------------------------------------


def test_of_a_stranger_no_more_is_read_than_the_handshake_has() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        peer = Peer(ours, SECRET)
        theirs.sendall(Hello(1, bytes(NONCE_BYTES)).encode(from_client=True) + bytes(100_000))
        peer.receive()
        assert len(peer._decoder) == HELLO_SIZE
        assert peer.shake_hands()
        peer.receive()
        assert len(peer._decoder) == PROOF_BYTES


def test_a_stranger_that_sends_byte_by_byte_has_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.1)
    hello = Hello(1, bytes(NONCE_BYTES)).encode(from_client=True)
    dropped = threading.Event()
    with TCPStoreServer(secret=SECRET) as server:
        trickle = socket.create_connection((server.host, server.port), LONG)
        with trickle, contextlib.suppress(ConnectionError):
            trickle.sendall(hello[:-1])
            while trickle.recv(1):
                pass
            dropped.set()
        assert dropped.is_set()
        assert server._unauthenticated == {}


def approaches() -> Iterator[bytes]:
    """Yield what strangers say before they fall silent, over and over."""
    hello = Hello(1, os.urandom(NONCE_BYTES)).encode(from_client=True)
    while True:
        yield from (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            hello[:10],
            hello,
            hello + bytes(PROOF_BYTES - 1),
            hello + os.urandom(PROOF_BYTES),
            Hello(0, bytes(NONCE_BYTES)).encode(from_client=True),
            struct.pack(">BI", 1, 2**32 - 1),
            os.urandom(2000),
        )


def test_ten_thousand_strangers_disturb_nobody() -> None:
    """While they come, up to 400 at a time, clients are served and new ones get in."""
    descriptors = len(os.listdir("/proc/self/fd"))
    crowd: list[socket.socket] = []
    words = approaches()
    with TCPStoreServer(secret=SECRET) as server:
        client = TCPStore(server.host, server.port, secret=SECRET, timeout=LONG)
        for number in range(10_000):
            stranger = socket.socket()
            # Hanging up with a reset leaves no port behind for a minute.
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(ConnectionError):
                stranger.connect((server.host, server.port))
                stranger.sendall(next(words))
            crowd.append(stranger)
            if number % 200 == 0:
                assert client.add("served", 1) == number // 100 + 1
                newcomer = TCPStore(server.host, server.port, secret=SECRET, timeout=LONG)
                assert newcomer.add("served", 1) == number // 100 + 2
                newcomer.close()
                assert len(server._unauthenticated) <= server_module.MAX_UNAUTHENTICATED
            if len(crowd) > 400:
                crowd.pop(number % 7 * 50).close()
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 400 + server_module.MAX_UNAUTHENTICATED + 20
        for stranger in crowd:
            stranger.close()
        assert client.list_keys() == ["served"]
        client.close()
