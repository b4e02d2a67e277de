"""Whatever comes in at the server's port, the clients are served."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchestra.store import TCPStore, TCPStoreServer
from torchestra.store.tcp import protocol
from torchestra.store.tcp import server as server_module
from torchestra.store.tcp.protocol import Decoder, Hello, ProtocolError, Request, encode
from torchestra.system.authentication import NONCE_BYTES, PROOF_BYTES

HELLO = Hello(0, bytes(NONCE_BYTES)).encode(from_client=True)
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHESTRA_SECRET", raising=False)


@pytest.fixture(scope="module")
def server() -> Iterator[TCPStoreServer]:
    with TCPStoreServer() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: TCPStoreServer) -> Iterator[TCPStore]:
    """Connected before and after whatever happens."""
    store = TCPStore(server.host, server.port, timeout=20.0)
    store.set("precious", "1")
    yield store
    store.close()


def still_serves(client: TCPStore) -> None:
    before = client.add("served", 0)
    assert client.add("served", 1) == before + 1
    assert client.get("precious") == b"1"
    newcomer = TCPStore(client.host, client.port, timeout=20.0)
    assert newcomer.get("precious") == b"1"
    newcomer.close()


def send(server: TCPStoreServer, data: bytes, *, wait: bool) -> None:
    """Sends bytes as they are, then hangs up; with ``wait`` only after the server has taken them in."""
    connection = socket.create_connection((server.host, server.port))
    # Who is hung up on while it still talks may also be told so as "not connected", by shutdown.
    with connection, contextlib.suppress(OSError):
        connection.sendall(data)
        if wait:
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass


def await_no_wait(server: TCPStoreServer) -> None:
    """Wait until the server knows that whoever waited for something is gone."""
    deadline = time.monotonic() + 20.0
    while any(peer.wait is not None for peer in list(server._peers)):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def message(code: int, *fields: bytes) -> bytes:
    return b"".join(bytes(buffer) for buffer in encode(code, fields))


def harmless(code: int) -> bool:
    """Requests that change keys are sent for keys of their own only, see below."""
    return code in (Request.CHECK, Request.LIST, Request.QUEUE_LENGTH, Request.GET, Request.WAIT)


codes = st.sampled_from([*Request, 0, 13, 255])
fields = st.one_of(
    st.binary(max_size=40),
    st.integers().map(lambda number: str(number).encode()),
    st.just(b""),
    st.just(b"\xff"),
)
messages = st.builds(lambda code, extra: message(code, b"fuzz", *extra), codes, st.lists(fields, max_size=4))


@FUZZ
@given(data=st.binary(max_size=200), wait=st.booleans())
def test_garbage_from_strangers(server: TCPStoreServer, client: TCPStore, data: bytes, wait: bool) -> None:
    send(server, data, wait=wait)
    assert client.get("precious") == b"1"


@FUZZ
@given(data=st.lists(messages, max_size=4).map(b"".join), cut=st.integers(0, 60), wait=st.booleans())
def test_wrong_and_truncated_requests(
    server: TCPStoreServer, client: TCPStore, data: bytes, cut: int, wait: bool
) -> None:
    """A proper greeting, then requests that have wrong fields, stop halfway, or come too early."""
    send(server, HELLO + data[: max(0, len(data) - cut)], wait=wait)
    assert client.get("precious") == b"1"


@FUZZ
@given(
    data=st.lists(messages, min_size=1, max_size=3).map(b"".join),
    flip=st.integers(0, 2**31),
    bit=st.integers(0, 7),
)
def test_requests_with_a_flipped_bit(
    server: TCPStoreServer, client: TCPStore, data: bytes, flip: int, bit: int
) -> None:
    mutated = bytearray(data)
    mutated[flip % len(mutated)] ^= 1 << bit
    send(server, HELLO + bytes(mutated), wait=True)
    assert client.get("precious") == b"1"


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">BI", Request.SET, 2**32 - 1),
        struct.pack(">BI", Request.SET, protocol.MAX_MESSAGE + 1) + b"x" * 100,
        struct.pack(">BII", Request.SET, 4, 2**32 - 1),
        struct.pack(">BII", Request.SET, 100, 2**31) + b"x" * 96,
        struct.pack(">BIH", Request.SET, 2, 7),
        message(Request.GET, b"9" * 41, b"k"),
        message(Request.GET, b"-" * 10, b"k"),
        message(Request.ADD, b"k", b"1_0" * 20),
        message(Request.WAIT, b"100", b"never") + message(Request.LIST),
        message(Request.WAIT, b"100", b"never") * 3,
        message(Request.SET, b"\xff\xfe", b"1"),
        message(99),
    ],
)
def test_lies_about_sizes_and_numbers_end_the_connection(
    server: TCPStoreServer, client: TCPStore, data: bytes
) -> None:
    with socket.create_connection((server.host, server.port), timeout=20.0) as connection:
        connection.sendall(HELLO + data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(4096):
                answer += chunk
    assert len(answer) in (0, protocol.HELLO_SIZE)
    still_serves(client)


def test_a_promised_gigabyte_costs_nothing_until_it_comes(server: TCPStoreServer, client: TCPStore) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    connections = [socket.create_connection((server.host, server.port)) for _ in range(20)]
    for connection in connections:
        connection.sendall(HELLO + struct.pack(">BII", Request.SET, protocol.MAX_MESSAGE, 3) + b"key")
    still_serves(client)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    for connection in connections:
        connection.close()
    still_serves(client)


def test_a_huge_wait_does_not_stop_the_clock(server: TCPStoreServer, client: TCPStore) -> None:
    """The selector refuses sleeps of more than some weeks; the server must not hand them on."""
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(HELLO + message(Request.WAIT, b"9" * 30, b"never"))
        still_serves(client)


def test_clients_killed_in_the_midst_of_a_message(server: TCPStoreServer, client: TCPStore) -> None:
    """One with half a head, one with half a value, one that waits at a queue: kill -9 each."""
    program = textwrap.dedent(
        """
        import socket, sys
        connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
        connection.sendall(bytes.fromhex(sys.argv[3]))
        print(len(connection.recv(1000)), flush=True)
        sys.stdin.read()
        """
    )
    half_head = message(Request.SET, b"half", b"v" * 100)[:3]
    half_value = message(Request.SET, b"half", b"v" * 10_000)[:5000]
    waiting = message(Request.POP, b"60000", b"queue")
    for data in (half_head, half_value, waiting):
        arguments = [server.host, str(server.port), (HELLO + data).hex()]
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdin is not None
        assert int(process.stdout.readline()) == protocol.HELLO_SIZE
        still_serves(client)
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()
        still_serves(client)
        await_no_wait(server)
    assert not client.check(["half"])
    client.queue_push("queue", "for the living")
    assert client.queue_pop("queue", block=False) == b"for the living"


def test_a_crowd_of_silent_strangers_leaves_room_for_clients(
    server: TCPStoreServer, client: TCPStore
) -> None:
    crowd = [socket.create_connection((server.host, server.port)) for _ in range(300)]
    still_serves(client)
    crowd[0].settimeout(20.0)
    assert crowd[0].recv(1) == b"", "the oldest should have had to go"
    crowd[-1].sendall(HELLO)
    crowd[-1].settimeout(20.0)
    assert len(crowd[-1].recv(100)) == protocol.HELLO_SIZE
    for connection in crowd:
        connection.close()
    still_serves(client)


def test_thousands_of_connections_that_say_nothing(server: TCPStoreServer, client: TCPStore) -> None:
    for number in range(3000):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex((server.host, server.port))
        connection.close()
        if number % 500 == 0:
            still_serves(client)
    still_serves(client)


def test_strangers_have_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.05)
    with TCPStoreServer() as server, socket.create_connection((server.host, server.port), 20.0) as stranger:
        stranger.sendall(HELLO[:10])
        assert stranger.recv(1) == b""


def test_a_secret_keeps_strangers_from_every_request() -> None:
    with TCPStoreServer(secret="s") as server:
        store = TCPStore(server.host, server.port, secret="s")
        hello = Hello(1, bytes(NONCE_BYTES)).encode(from_client=True)
        for start in (HELLO, hello, hello + bytes(PROOF_BYTES)):
            send(server, start + message(Request.SET, b"k", b"1"), wait=True)
        assert store.list_keys() == []
        store.close()


def test_a_server_out_of_descriptors_recovers(server: TCPStoreServer, client: TCPStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    crowd: list[socket.socket] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 16, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(8):
            os.close(taken.pop())
        with contextlib.suppress(OSError):
            while True:
                crowd.append(socket.create_connection((server.host, server.port)))
        assert 4 <= len(crowd) <= 8
        assert client.get("precious") == b"1"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
        for connection in crowd:
            connection.close()
    still_serves(client)


@given(
    code=st.integers(0, 255),
    given=st.lists(st.binary(max_size=100_000), max_size=5),
    pieces=st.integers(1, 50),
)
@settings(max_examples=50, deadline=None)
def test_messages_survive_the_way_in_any_pieces(code: int, given: list[bytes], pieces: int) -> None:
    data = message(code, *given) * 2
    decoder = Decoder()
    step = -(-len(data) // pieces)
    seen = []
    for start in range(0, len(data), step):
        decoder.feed(data[start : start + step])
        while (found := decoder.message()) is not None:
            seen.append(found)
    assert seen == [(code, given)] * 2


def test_a_message_too_large_is_refused_from_its_head() -> None:
    decoder = Decoder()
    decoder.feed(struct.pack(">BI", 1, protocol.MAX_MESSAGE + 1))
    with pytest.raises(ProtocolError, match="larger than"):
        decoder.message()
