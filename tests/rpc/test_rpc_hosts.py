"""Remote calls between hosts: who is let in, how messages are cut, and which addresses are used."""

from __future__ import annotations

import contextlib
import pickle
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import zmq
import zmq.utils.monitor
from hypothesis import given, settings
from hypothesis import strategies as st

import rpc_workers
import torchestra.transport.message
import torchestra.transport.pair
import worlds
from torchestra import rpc
from torchestra.engine.p2p import endpoint
from torchestra.errors import DistNetworkError, InvalidArgumentError, RpcError, WorkerFailedError
from torchestra.rpc.current import current_agent
from torchestra.rpc.host_connections import ADDRESS_VARIABLE, PORTS_VARIABLE, given_ports, listening_address
from torchestra.store import HashStore
from torchestra.transport.addresses import INTERFACE_VARIABLE, own_address
from torchestra.transport.endpoint import EndpointRecord, read_endpoint
from torchestra.transport.framing import LARGEST_FRAME, PIECE_BYTES, MessageAssembler, frames
from torchestra.transport.message import Message
from torchestra.transport.transport import Transport

HERE = "127.0.0.1"


def echo(value):
    return value


# -- frames


def parts_of(arrays: list[np.ndarray]) -> list[tuple[int, int]]:
    return [(array.ctypes.data, array.nbytes) for array in arrays]


LENGTHS = st.sampled_from([0, 1, 100, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7])


@given(text=LENGTHS, storages=st.lists(LENGTHS, max_size=3), tag=st.integers(0, 2**62))
@settings(max_examples=40, deadline=None)
def test_a_message_of_any_size_comes_out_of_its_frames_as_it_was(text, storages, tag) -> None:
    arrays = [
        np.random.default_rng(length).integers(0, 256, length, np.uint8) for length in (text, *storages)
    ]
    assembly = MessageAssembler(3)
    pieces = [bytes(frame) for frame in frames(7, tag, parts_of(arrays), arrays)]
    assert max(map(len, pieces)) <= LARGEST_FRAME
    found = [assembly.feed(piece) for piece in pieces]
    assert found[:-1] == [None] * (len(found) - 1)
    message = found[-1]
    assert (message.source, message.kind, message.tag) == (3, 7, tag)
    assert bytes(message.text) == arrays[0].tobytes()
    found = [
        torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes() for storage in message.storages
    ]
    assert found == [array.tobytes() for array in arrays[1:]]
    assert not assembly.under_way


@pytest.mark.parametrize(
    "rubbish",
    [[b"short"], [b"\1" * 60], [struct.pack("=HqIQQ", 1, 1, 0, 5, 1), b"123456"]],
    ids=["short", "long", "piece"],
)
def test_frames_that_are_no_message_are_refused(rubbish: list[bytes]) -> None:
    assembly = MessageAssembler(0)
    *before, last = rubbish
    for frame in before:
        assembly.feed(frame)
    with pytest.raises(ValueError, match=r"frame|piece"):
        assembly.feed(last)


# -- trust


def test_an_endpoint_record_is_believed_from_who_knows_the_secret_only() -> None:
    record = EndpointRecord("tcp://10.0.0.1:4000", b"k" * 40)
    text = record.encode(b"secret", "meeting/1")
    assert read_endpoint(text, b"secret", "meeting/1", "worker 'worker1'") == record
    forged = text.replace(b"10.0.0.1", b"10.0.0.2")
    for wrong in (
        (forged, b"secret", "meeting/1"),
        (text, b"other", "meeting/1"),
        (text, b"secret", "meeting/2"),
        (text, b"secret", "another/1"),
        (b"rubbish", b"secret", "meeting/1"),
    ):
        with pytest.raises(DistNetworkError, match=r"'worker1'.*job's secret, and is not trusted.*TORCH"):
            read_endpoint(*wrong, "worker 'worker1'")


_exploded = threading.Event()


def explode() -> None:
    _exploded.set()


class Explosive:
    def __reduce__(self):
        return explode, ()


def strangers(address: str, key: bytes) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the ways in which a stranger's socket may be set up."""
    public, private = zmq.curve_keypair()
    other, _ = zmq.curve_keypair()
    yield "no key", {}
    yield "an unknown key", {"curve_serverkey": key, "curve_publickey": public, "curve_secretkey": private}
    yield (
        "a wrong server key",
        {"curve_serverkey": other, "curve_publickey": public, "curve_secretkey": private},
    )


def knock(address: str, key: bytes) -> None:
    """Try all that a stranger can at a port; each must be turned away, and hear nothing."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as rubbish:
        rubbish.sendall(b"GET / HTTP/1.0\r\n\r\n" * 200)
        while True:  # the other side ends it
            try:
                if not rubbish.recv(1000):
                    break
            except ConnectionError:
                break
    text = np.frombuffer(bytes(8) + pickle.dumps((Explosive(), (), None), 5), np.uint8)
    with zmq.Context() as context:
        for who, options in strangers(address, key):
            with context.socket(zmq.PUSH) as stranger:
                stranger.linger = 0
                stranger.reconnect_ivl = -1
                for name, value in options.items():
                    setattr(stranger, name, value)
                with stranger.get_monitor_socket(zmq.EVENT_ALL) as events:
                    stranger.connect(address)
                    try_to_send(stranger, text) if who == "no key" else None
                    seen = []
                    while not seen or seen[-1] not in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                        assert events.poll(20_000), f"{who} is let in: {seen}"
                        seen.append(zmq.utils.monitor.recv_monitor_message(events)["event"])
                    assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in seen, who
                    stranger.disable_monitor()


def try_to_send(stranger: zmq.Socket, text: np.ndarray) -> None:
    with contextlib.suppress(zmq.Again):  # it has been turned away already
        for frame in frames(1, 1, [(text.ctypes.data, text.nbytes)], text):
            stranger.send(frame, zmq.NOBLOCK)


@contextlib.contextmanager
def wires_that_meet(arrived, between) -> Iterator[tuple[Transport, Transport]]:
    """Two ends; ``between`` is called with the first, which already looks for the second."""
    wires = [Transport(f"w{rank}", HERE, None, 30.0, arrived) for rank in range(2)]
    failed = []

    def join(rank: int) -> None:
        try:
            wires[rank].join({1 - rank: wires[1 - rank].endpoint}, {0: "w0", 1: "w1"}, 30)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    try:
        threads[0].start()
        between(wires[0])
        threads[1].start()
        for thread in threads:
            thread.join()
        assert not failed
        yield wires[0], wires[1]
    finally:
        for wire in wires:
            wire.close()


def await_tags(came: list[int], tags: list[int]) -> None:
    deadline = time.monotonic() + 30
    while came != tags:
        assert time.monotonic() < deadline, came
        time.sleep(0.01)


def is_shut(address: str) -> bool:
    """Return whether nobody can connect there any more; that is seen to by another thread."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), timeout=0.2).close()
        except TimeoutError:
            return True
        time.sleep(0.01)
    return False


def test_strangers_on_the_port_are_dropped_and_nothing_of_them_is_read() -> None:
    came: list[int] = []
    with wires_that_meet(
        lambda message: came.append(message.tag), lambda wire: knock(*wire.endpoint)
    ) as wires:
        deadline = time.monotonic() + 30
        while not wires[0].refused_connections:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert all(is_shut(wire.endpoint.address) for wire in wires), "the port is open though all have come"
        text = np.zeros(10, np.uint8)
        wires[1].send(0, 1, 7, parts_of([text]), text)
        await_tags(came, [7])


FLOOD = 1500


def flood(wire: Transport, held: list[socket.socket], most: list[int]) -> None:
    """Connect very often, say nothing, or a little, and go away."""
    host, port = wire.endpoint.address.removeprefix("tcp://").rsplit(":", 1)
    before = len(worlds.descriptors())
    for number in range(FLOOD):
        stranger = socket.socket()
        held.append(stranger)
        stranger.setblocking(False)
        stranger.connect_ex((host, int(port)))
        with contextlib.suppress(OSError):
            stranger.send(b"12345678" if number % 2 else b"")
        if number % 50 == 0:
            most.append(len(worlds.descriptors()) - before - len(held))
            time.sleep(0.001)
    for stranger in held:
        stranger.close()


def test_a_flood_of_strangers_takes_few_descriptors_and_those_expected_still_come_in() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * FLOOD)), hard))
    came: list[int] = []
    held: list[socket.socket] = []
    most: list[int] = []
    try:
        with wires_that_meet(
            lambda message: came.append(message.tag), lambda wire: flood(wire, held, most)
        ) as wires:
            assert max(most) < FLOOD / 4, most
            text = np.zeros(10, np.uint8)
            wires[1].send(0, 1, 7, parts_of([text]), text)
            await_tags(came, [7])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def begin_with(secrets: list[str | None]) -> None:
    from torchestra.engine.thread_ranks import current_thread_rank

    rpc_workers.begin(secret=secrets[current_thread_rank().rank])


@pytest.mark.parametrize(
    ("secrets", "kind", "message"),
    [
        (["one", "another"], RpcError, "does not know this job's secret"),
        ([None, None], InvalidArgumentError, "on different hosts and have no secret"),
    ],
)
def test_workers_on_two_hosts_need_one_secret(monkeypatch, secrets, kind, message) -> None:
    monkeypatch.delenv("TORCHESTRA_SECRET", raising=False)
    before = set(threading.enumerate())
    for ended in worlds.outcomes("threads", 2, begin_with, secrets, hosts=["here", "there"]):
        assert isinstance(ended.error, kind)
        assert message in ended.message
    deadline = time.monotonic() + 20
    while left := [
        each for each in set(threading.enumerate()) - before if each.name.startswith("transport of")
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


# -- messages that cannot be received


class _LittleMemory:
    """In place of torch, where messages are put together."""

    @staticmethod
    def UntypedStorage(length: int) -> torch.UntypedStorage:
        if length > 1 << 14:
            raise RuntimeError("can't allocate memory")
        return torch.UntypedStorage(length)


def send_too_much(rank: int, length: int) -> None:
    other, much = 1 - rank, [torch.zeros(length), torch.zeros(length), torch.zeros(1)]
    with pytest.raises(RpcError, match=rf"there is no memory here for the {length * 4} bytes of a tensor"):
        rpc.rpc_sync(other, echo, (much,))
    with pytest.raises(RpcError, match=rf"result of .*give_two.* no memory here for the {length * 4}"):
        rpc.rpc_sync(other, give_two, (length,))
    assert rpc.rpc_sync(other, echo, (3,)) == 3


@pytest.mark.parametrize(("kind", "length"), [("hosts", 1 << 18), ("threads", 6000)])
def test_a_tensor_that_there_is_no_memory_for_is_the_end_of_its_call_only(
    monkeypatch: pytest.MonkeyPatch, kind: str, length: int
) -> None:
    monkeypatch.setattr(torchestra.transport.message, "torch", _LittleMemory)
    rpc_workers.run(kind, 2, send_too_much, length)


class _LittleMemoryForText:
    """In place of numpy, where a text is received."""

    def __getattr__(self, name: str) -> object:
        return getattr(np, name)

    @staticmethod
    def empty(length: int, dtype: type) -> np.ndarray:
        if length > 1 << 19:
            raise MemoryError
        return np.empty(length, dtype=dtype)


def send_too_much_text(rank: int) -> None:
    other = 1 - rank
    with pytest.raises(RpcError, match=r"there is no memory here for the \d+ bytes of the text"):
        rpc.rpc_sync(other, echo, ((bytes(1 << 20), torch.zeros(1 << 16)),))
    with pytest.raises(RpcError, match=r"result of .*bytes.* no memory here for the \d+ bytes of the text"):
        rpc.rpc_sync(other, bytes, (1 << 20,))
    assert rpc.rpc_sync(other, echo, (3,)) == 3


def test_a_text_that_there_is_no_memory_for_is_the_end_of_its_call_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "np", _LittleMemoryForText())
    rpc_workers.run("threads", 2, send_too_much_text)


def say_nonsense(meeting: threading.Barrier) -> None:
    """Worker 2 sends a message that is well formed, and its content is not."""
    rank = rpc_workers.begin(secret=rpc_workers.SECRET)
    agent = current_agent()
    try:
        meeting.wait(30)
        text = np.frombuffer(b"no pickle", np.uint8)
        if rank == 2:
            agent.endpoint.send(1, 4, 0, parts_of([text]), text)
        if rank == 1:
            deadline = time.monotonic() + 30
            while 2 not in agent.liveness.gone:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with pytest.raises(WorkerFailedError, match=r"'worker2' .* sent a message that cannot be read"):
                rpc.rpc_sync(2, echo, (1,))
        if rank < 2:
            assert rpc.rpc_sync(1 - rank, echo, (3,)) == 3
        meeting.wait(30)
    finally:
        rpc.shutdown(graceful=False)


def test_a_worker_that_sends_what_cannot_be_read_is_given_up_alone() -> None:
    worlds.run("threads", 3, say_nonsense, threading.Barrier(3), hosts=["here", "there", "elsewhere"])


# -- routes


def take_both_routes(rank: int) -> list[int]:
    router = current_agent().router
    large = torch.arange(1 << 18)
    for peer in range(4):
        assert torch.equal(rpc.rpc_sync(peer, echo, (large,)), large)
        assert rpc.rpc_sync(peer, ask_onwards, (3 - peer, rank)) == rank
    assert [router.buffers_to(peer) is not None for peer in range(4)] == [
        peer != rank and peer % 2 == rank % 2 for peer in range(4)
    ]
    return router.remote_ranks()


def ask_onwards(peer: int, value: int) -> int:
    return rpc.rpc_sync(peer, echo, (value,))


def test_two_hosts_of_two_workers_use_the_arena_within_and_the_wire_between() -> None:
    assert rpc_workers.run("hosts", 4, take_both_routes) == [[1, 3], [0, 2], [1, 3], [0, 2]]


def give_two(length: int) -> list[torch.Tensor]:
    return [torch.zeros(length), torch.zeros(1)]


def give_much(number: float) -> torch.Tensor:
    return torch.full((1 << 15,), number)


@rpc.functions.async_execution
def ask_for_much(peer: int, number: int) -> torch.futures.Future:
    """Return what the answer is sent from is the thread that completes the future."""
    return rpc.rpc_async(peer, give_much, (number,)).then(lambda future: future.value() + 1)


def exchange_much(rank: int) -> None:
    other = 1 - rank
    futures = [rpc.rpc_async(other, ask_for_much, (rank, number)) for number in range(60)]
    for number, future in enumerate(futures):
        assert torch.equal(future.wait(), give_much(number + 1))


def test_workers_whose_answers_wait_for_room_still_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchestra.transport.pair, "_MAX_QUEUED", 1 << 18)
    rpc_workers.run("hosts", 2, exchange_much)


# -- connections


def two_wires(arrived) -> contextlib.AbstractContextManager[tuple[Transport, Transport]]:
    """Two ends; messages that come are given to ``arrived``."""
    return wires_that_meet(arrived, lambda _: None)


def test_senders_wait_when_the_receiver_does_not_take_what_they_send() -> None:
    taken, came = threading.Event(), []

    def arrived(message: Message) -> None:
        taken.wait(30)
        came.append(message.tag)

    text, large = np.zeros(10, np.uint8), np.zeros(1 << 24, np.uint8)
    sent = []

    def send(wire: Transport) -> None:
        for tag in range(12):
            wire.send(1, 1, tag, parts_of([text, large]), None)
            sent.append(tag)

    with two_wires(arrived) as (wire, _):
        sender = threading.Thread(target=send, args=(wire,))
        sender.start()
        sender.join(0.5)
        assert len(sent) < 12
        taken.set()
        sender.join(30)
        assert sent == list(range(12))
        await_tags(came, sent)


def test_the_last_messages_arrive_although_the_sender_closes() -> None:
    came = []
    text = np.zeros(10, np.uint8)
    with two_wires(lambda message: came.append(message.tag)) as (wire, other):
        for tag in range(500):
            wire.send(1, 1, tag, parts_of([text]), None)
        wire.close()
        deadline = time.monotonic() + 30
        while other.lost() != {0: "has shut down"}:
            assert time.monotonic() < deadline, other.lost()
            time.sleep(0.01)
    assert came == list(range(500))


def test_an_address_where_nobody_listens_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchestra.transport.pair, "RETRY_SECONDS", 0.1)
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    wire = Transport("lonely", HERE, None, 30.0, print, advice="Ask.")
    public, _ = zmq.curve_keypair()
    try:
        with pytest.raises(DistNetworkError, match=r"^lonely cannot reach other.*nobody listens.* Ask\.$"):
            wire.join({0: EndpointRecord(f"tcp://{HERE}:{port}", public)}, {0: "other"}, 20)
    finally:
        wire.close()


def test_ports_and_address_are_those_that_are_given(monkeypatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "10.1.2.3")
    assert listening_address(HashStore()) == "10.1.2.3"
    monkeypatch.delenv(ADDRESS_VARIABLE)
    monkeypatch.setenv(INTERFACE_VARIABLE, "lo")
    assert listening_address(HashStore()) == own_address(HashStore()) == HERE
    monkeypatch.setenv(INTERFACE_VARIABLE, "no-such")
    with pytest.raises(InvalidArgumentError, match=r"GLOO_SOCKET_IFNAME is 'no-such'"):
        own_address(HashStore())
    monkeypatch.delenv(INTERFACE_VARIABLE)
    monkeypatch.setenv("MASTER_ADDR", "unix:@" + 100 * "x")
    socket.inet_pton(
        socket.AF_INET6 if ":" in own_address(HashStore()) else socket.AF_INET, own_address(HashStore())
    )
    assert given_ports() is None
    for text, ports in (("4000", (4000, 4000)), ("4000-4010", (4000, 4010))):
        monkeypatch.setenv(PORTS_VARIABLE, text)
        assert given_ports() == ports
    for text in ("many", "0", "10-x", "70000", "5-4"):
        monkeypatch.setenv(PORTS_VARIABLE, text)
        with pytest.raises(InvalidArgumentError, match=PORTS_VARIABLE):
            given_ports()
    with pytest.raises(InvalidArgumentError, match="ports must be"):
        rpc.RpcBackendOptions(ports=(5, 4))
    with pytest.raises(InvalidArgumentError, match="heartbeat_timeout"):
        rpc.RpcBackendOptions(heartbeat_timeout=0)
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DistNetworkError, match=rf"cannot listen at {HERE}, port {port}-{port}"):
            Transport("w", HERE, (port, port), 30.0, print)
    before = worlds.descriptors()
    with pytest.raises(DistNetworkError, match="cannot listen"):
        Transport("w", "203.0.113.1", None, 30.0, print)
    assert worlds.descriptors() - before == set()
