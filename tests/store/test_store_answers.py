"""A server that answers nonsense is an error of the client's, with a reason, and never a hang or a crash."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchestra.errors import DistError, DistNetworkError, InvalidArgumentError
from torchestra.store import TCPStore, TCPStoreServer
from torchestra.store.tcp import protocol
from torchestra.store.tcp.protocol import HELLO_SIZE, Decoder, Hello, ProtocolError, Reply, encode
from torchestra.system.authentication import NONCE_BYTES


@pytest.fixture(autouse=True, scope="module")
def no_secret() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHESTRA_SECRET", raising=False)
        yield


class Liar:
    """Greets as a server does, answers the first request with :attr:`answer`, and hangs up."""

    def __init__(self) -> None:
        self.answer = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(ConnectionError):
                connection.recv(HELLO_SIZE)
                connection.sendall(Hello(0, bytes(NONCE_BYTES)).encode(from_client=False))
                if connection.recv(65536):
                    connection.sendall(self.answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    liar = Liar()
    yield liar
    liar.close()


def told(liar: Liar, request: str, answer: bytes) -> object:
    """Return what a store makes of an answer to its first request."""
    liar.answer = answer
    store = TCPStore("127.0.0.1", liar.port, timeout=20.0)
    try:
        return REQUESTS[request](store)
    finally:
        store.close()


REQUESTS: dict[str, Callable[[TCPStore], object]] = {
    "set": lambda store: store.set("k", "1"),
    "get": lambda store: store.get("k"),
    "multi_get": lambda store: store.multi_get(["k", "l"]),
    "add": lambda store: store.add("k", 1),
    "append": lambda store: store.append("k", "1"),
    "compare_set": lambda store: store.compare_set("k", "", "1"),
    "check": lambda store: store.check(["k"]),
    "wait": lambda store: store.wait(["k"], 10),
    "delete_key": lambda store: store.delete_key("k"),
    "list_keys": lambda store: store.list_keys(),
    "queue_push": lambda store: store.queue_push("k", "1"),
    "queue_pop": lambda store: store.queue_pop("k"),
    "queue_pop now": lambda store: store.queue_pop("k", block=False),
    "queue_len": lambda store: store.queue_len("k"),
}


def message(code: int, *fields: bytes) -> bytes:
    return b"".join(bytes(buffer) for buffer in encode(code, fields))


well_formed = st.builds(
    lambda code, fields: message(code, *fields),
    st.sampled_from([*Reply, 0, 5, 255]),
    st.lists(st.sampled_from([b"", b"1", b"-7", b"\xff\xfe", b"k", b"nan", bytes(100)]), max_size=3),
)
answers = st.one_of(
    st.binary(max_size=60),
    well_formed,
    st.tuples(well_formed, st.integers(0, 20)).map(lambda pair: pair[0][: -pair[1]]),
    st.tuples(well_formed, st.binary(max_size=10)).map(b"".join),
    st.integers(0, 2**32 - 1).map(lambda size: struct.pack(">BI", 1, size) + bytes(20)),
)


@pytest.mark.parametrize("request_name", REQUESTS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(answer=answers)
def test_any_answer_is_a_result_or_an_error_of_torchestra(
    liar: Liar, request_name: str, answer: bytes
) -> None:
    with contextlib.suppress(DistError):
        told(liar, request_name, answer)


@pytest.mark.parametrize(
    ("request_name", "answer", "words"),
    [
        ("set", message(Reply.OK, b"1"), "code 1 with 1 fields"),
        ("get", message(Reply.OK), "code 1 with 0 fields"),
        ("multi_get", message(Reply.OK, b"1"), "code 1 with 1 fields"),
        ("add", message(Reply.OK, b"six"), "b'six' in place of a number"),
        ("list_keys", message(Reply.OK, b"\xff"), "can't decode byte 0xff"),
        ("check", message(Reply.EMPTY), "code 3 with 0 fields"),
        ("queue_len", message(77), "code 77"),
        ("get", struct.pack(">BI", 1, 2**31), "larger than"),
        ("get", struct.pack(">BII", 1, 4, 9), "a field goes beyond its message"),
    ],
)
def test_a_senseless_answer_is_told_as_such(liar: Liar, request_name: str, answer: bytes, words: str) -> None:
    whole = rf"an invalid answer \(.*{words}.*use the same torchestra"
    with pytest.raises(DistNetworkError, match=whole):
        told(liar, request_name, answer)


def test_half_an_answer_is_a_lost_connection(liar: Liar) -> None:
    with pytest.raises(DistNetworkError, match="lost the connection to the server"):
        told(liar, "get", message(Reply.OK, b"value")[:-2])


def test_a_message_has_only_so_many_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty fields of a gigabyte's message would become hundreds of millions of objects."""
    data = message(Reply.OK, *[b""] * 11)
    monkeypatch.setattr(protocol, "MAX_FIELDS", 10)
    decoder = Decoder()
    decoder.feed(data)
    with pytest.raises(ProtocolError, match="more than 10 fields"):
        decoder.message()
    with TCPStoreServer() as server:
        store = TCPStore(server.host, server.port)
        with pytest.raises(InvalidArgumentError, match=r"12 fields are more than a message may have \(10\)"):
            store.multi_set(["k"] * 6, ["v"] * 6)
        assert store.num_keys() == 0
