"""The targets: everything that parses what others send or leave."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import select
import socket
import struct
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tools.fuzzing import Target, store_targets

from torchestra.engine import tuned_thresholds
from torchestra.engine.diagnosis.facts import (
    Call,
    GroupWait,
    LockWait,
    PendingMessage,
    Process,
    Program,
    RankFacts,
    UserFrame,
    from_json,
    to_json,
)
from torchestra.engine.diagnosis.process_counts import read_process
from torchestra.engine.failure.hang_report import HostReport, hang_report, late_elsewhere
from torchestra.engine.failure.program_samples import ProgramSample
from torchestra.engine.hosts import Hosts
from torchestra.engine.kernels.selection import Choices
from torchestra.engine.membership.joining import join
from torchestra.engine.multihost import gloo_store, host_discovery, joining
from torchestra.engine.multihost.abort_notices import AbortNotices
from torchestra.engine.multihost.control_message import ControlMessage
from torchestra.engine.multihost.failure_detector import FailureDetector
from torchestra.engine.multihost.packets import Packet, PacketType, pack, unpack
from torchestra.engine.multihost.peer_values import ranks_in_words, read_proposal
from torchestra.engine.multihost.remote_records import answer, merge_records, understand
from torchestra.engine.recorder.flight_entries import FlightEntry, RankRecord, Tally
from torchestra.engine.recorder.flight_record import FlightRecord
from torchestra.engine.recorder.formats.reading import read_traces
from torchestra.errors import DistBackendError, DistError, DistStoreError, InvalidArgumentError
from torchestra.launcher import channel
from torchestra.rendezvous import gathering
from torchestra.rpc import membership, messages, plain, starting
from torchestra.rpc.agent import Agent
from torchestra.rpc.options import RpcBackendOptions
from torchestra.rpc.router import Router
from torchestra.rpc.rref import RRef
from torchestra.rpc.worker_info import WorkerInfo
from torchestra.rpc.workers import Workers
from torchestra.store import HashStore
from torchestra.store.authenticated_values import open_pieces, prove
from torchestra.store.process import ProcessIdentity
from torchestra.store.tcp.protocol import HELLO_SIZE, Decoder, Hello, ProtocolError, Request, encode
from torchestra.store.unreadable import UNREADABLE
from torchestra.system.authentication import PROOF_BYTES, proof
from torchestra.transport import rendezvous
from torchestra.transport.endpoint import EndpointRecord, read_endpoint
from torchestra.transport.framing import MessageAssembler, text_frames, whole_text
from torchestra.transport.message import Message

SECRET = b"the job's"
_HOSTS = Hosts([[0, 2], [1]], ["first", "second"])
_CLOSED_S = 10.0
_ME = ProcessIdentity.current().encode().encode()


def targets() -> list[Target]:
    """Return all targets."""
    return [*_store(), *store_targets.targets(), *_between_hosts(), *_records(), *_rpc(), *_launcher()]


# -- the store, and values in it


def _store() -> Iterator[Target]:
    hello = Hello(1, bytes(32)).encode(from_client=True)
    yield Target("store: hello", (hello,), _read_hello, (ProtocolError,))
    messages = tuple(
        b"".join(map(bytes, encode(code, fields)))
        for code, fields in ((Request.SET, [b"key", b"value"]), (Request.GET, [b"100", b"a", b"b"]), (1, []))
    )
    yield Target("store: messages", messages, _read_messages, (ProtocolError,))
    pieces = prove(SECRET, "key", b"one") + prove(SECRET, "key", b"two")
    yield Target("store: proved values", (pieces,), lambda data: open_pieces(SECRET, "key", data), ())
    yield Target("rendezvous: generation", (b"0 2", b"17 0"), _read_generation, (DistStoreError,))
    yield Target("rendezvous: process", (_ME,), gathering._identity, (DistStoreError,))


def _read_hello(data: bytes) -> None:
    Hello.could_be(data, from_client=True)
    Hello.decode(data[:HELLO_SIZE].ljust(HELLO_SIZE, b"\0"), from_client=True)


def _read_messages(data: bytes) -> None:
    decoder = Decoder()
    decoder.feed(data)
    assert decoder.bytes_wanted(1 << 20) <= 1 << 20
    while decoder.message() is not None:
        pass


def _read_generation(data: bytes) -> None:
    store = HashStore()
    store.set("current", data)
    gathering._current(store, 2)


# -- between hosts


def _between_hosts() -> Iterator[Target]:
    hosts = (_HOSTS.encode(), Hosts([[0], [1], [2]], ["", "x", "y" * 50]).encode())
    yield Target("hosts: outcome", hosts, _read_outcome, (DistStoreError,))
    yield Target("hosts: failure", (b'[[1], "it died"]', b'[[], "why"]'), _read_failure, (DistStoreError,))
    members = (b'[[1, 0], "here"]', b'[[0], "here"]')
    yield Target("hosts: members", members, _read_members, (DistStoreError,))
    yield Target("hosts: names", (b'["id", "name"]',), _read_names_of_hosts, (DistStoreError,))
    terms = (b"0 gloo 30.0", b"1 curve inf")
    yield Target("hosts: terms", terms, lambda data: joining._read_terms(data, 2), (DistStoreError,))
    yield Target("hosts: Gloo's addresses", (_gloo_addresses(),), _read_gloo_addresses, (DistStoreError,))
    words = (b"3 1 2 ", b"3:1 2:0 ")
    yield Target("peer values: words", words, _expect_ranks, ())
    yield Target("peer values: proposal", (b"[0, 1, 3]",), lambda data: read_proposal(data, 4), ())
    packets = tuple(pack(Packet(PacketType(each), 7, 3, 800, b"12345678")) for each in PacketType)
    yield Target("messages: packets", packets, unpack, (ValueError,))
    for what in ControlMessage:
        if what != ControlMessage.answer:
            yield Target(f"control: {what.name}", _CONTROLS, _control(what), UNREADABLE)
    yield Target("control: where ranks stand", _standing(), _read_standing, ())
    frames = b"".join(map(bytes, text_frames(1, 5, b"a text", 1)))
    storages = struct.pack("=HqIQQQQ", 1, 0, 2, 16, 1, 30, 0)
    yield Target(
        "transport: frames",
        (frames, storages, struct.pack("=HqIQQ", 1, 0, 0, 30, 1)),
        _assemble,
        (ValueError, MemoryError),
        True,
    )
    key = b"k" * 32 + b"tcp://127.0.0.1:4000"
    yield Target("transport: proved endpoint", (key,), _read_proved_endpoint, (DistError,))
    record = EndpointRecord("tcp://10.0.0.1:1", b"0" * 40).encode(SECRET, "key")
    yield Target(
        "transport: endpoint",
        (record,),
        lambda data: read_endpoint(data, SECRET, "key", "rank 1"),
        (DistError,),
    )
    yield Target("transport: endpoints", (b"\3\0abc\2\0de",), rendezvous._split, ())


def _discovery(**values: bytes) -> Any:
    store = HashStore()
    for key, value in values.items():
        store.set(key.replace("_", "/"), value)
    return host_discovery._Discovery(store, 0, 2, "group", 0.01)


def _read_outcome(data: bytes) -> None:
    hosts = _discovery(outcome=data).await_outcome()
    assert len(hosts.host_of) == len(hosts.local_rank_of) == hosts.size
    hosts.describe(0)


def _read_failure(data: bytes) -> None:
    str(_discovery().failure(data))


def _read_members(data: bytes) -> None:
    segment = object.__new__(host_discovery._HostSegment)
    segment._discovery = _discovery(members_0=data)
    segment._discovery.store.add("hosts", 1)
    segment._put_together()


def _read_names_of_hosts(data: bytes) -> None:
    visit = _discovery(here_1=data)
    visit.ask_everybody()


@cache
def _gloo_addresses() -> bytes:
    store = HashStore()
    store.set("a/1", b"address of 1")
    gloo_store._GlooEndpoints(store, 0, 2, 1.0, bool).set("a/0", b"address of 0")
    return store.get("a/" + gloo_store._ALL)


def _read_gloo_addresses(data: bytes) -> None:
    store = HashStore()
    store.set("a/" + gloo_store._ALL, data)
    gloo_store._GlooEndpoints(store, 1, 2, 0.01, bool).set("a/1", b"own")


def _expect_ranks(data: bytes) -> None:
    for ranks in ranks_in_words(data, 1, 4, "a test"):
        assert all(0 <= rank < 4 for rank in ranks)


_CONTROLS = (
    b"[[1], [], [0]]",
    b'[[1], [], [0], "is at train.py:3"]',
    b'["why", [1], "report"]',
    b'["why", [1], "report", [1]]',
    b"null",
    b"[3, 7]",
    b"4",
)


def _control(what: ControlMessage) -> Any:
    def take(data: bytes) -> None:
        detector = SimpleNamespace(
            hosts=_HOSTS, host=0, bound=1.0, _here=frozenset({0, 2}), left=set(), dead=set()
        )
        detector.silent, detector._lock = set(), contextlib.nullcontext()
        detector.notices = AbortNotices(len(_HOSTS), 0, lambda _: 1, lambda *_: None, lambda *_: None)
        detector._changed = _Condition()
        detector._timers = SimpleNamespace(heard_lately=lambda bound: set())
        detector._update = lambda value: FailureDetector._update(detector, value)  # type: ignore[arg-type]
        detector._updates = lambda: [[], [], []]
        detector._site, detector._last_seen = str, {}
        detector._say = detector._say_confirm = detector._abort_aside = lambda *_: None
        detector._do = lambda task: task()
        detector._send_host_report = detector._recount = lambda _, question, *__: question.to_bytes(
            8, "little"
        )
        FailureDetector._take(detector, what, 1, 1, data, 0.0)  # type: ignore[arg-type]

    return take


def _answer_question(rank: int, question: int, *_: object) -> None:
    question.to_bytes(8, "little")


@cache
def _standing() -> tuple[bytes, ...]:
    """Return what a host answers that is asked where its ranks stand."""
    line = UserFrame("train.py", 3, "main", 1, ((1, 5),))
    waits = GroupWait("other", "all_reduce (no. 3)", ("1.2.3",))
    program = Program("is at train.py:3", (line,), "wait", LockWait("lock", "train.py:3"), "", (waits,))
    call = Call(2, "all_reduce(float32[3])", "running", 0.5, ("barrier",), 0)
    message = PendingMessage("recv", 0, 7, "recv from rank 0", 0.5)
    told = (
        RankFacts(1, "second", "1.2.3", call=call, program=program),
        RankFacts(1, "second", "1.2.3", "present", doing="waits", message=message, stack=(line,)),
        RankFacts(1, "second", presence="dead", end_reason="killed", system=Process(0.5, stopped=True)),
    )
    return tuple(json.dumps([[1], "\nrank 1", [asdict(each)]]).encode() for each in told)


def _read_standing(data: bytes) -> None:
    """Put what another host answers into the report of a hang, beside the ranks of this one."""
    detector: Any = SimpleNamespace(hosts=_HOSTS, _others=[1], dead=set(), left=set(), _last_seen={})
    detector._context = SimpleNamespace(global_ranks=())
    detector._ask, detector.begun = lambda *_: {1: (data, 0.0)}, lambda: 2
    detector._silence = lambda host: FailureDetector._silence(detector, host)
    calls = (Call(2, "all_reduce(float32[3])", "running", 0.5), Call(1, "barrier()", "done", 0.5))
    here = tuple(RankFacts(rank, "first", call=call) for rank, call in zip((0, 2), calls, strict=True))
    found = FailureDetector.ask_where_they_are(detector)
    assert len(found) == 1
    hang_report([HostReport("", here), *found], 0)
    late_elsewhere(found)


class _Condition(contextlib.nullcontext[None]):
    def notify_all(self) -> None:
        """Wake nobody."""


def _assemble(data: bytes) -> None:
    """Take a text as the first frame, and the rest, whose length its last byte says, as further ones."""
    whole_text(memoryview(data))
    assembler = MessageAssembler(1)
    assembler.feed(data)
    while data:
        step = data[-1] + 1
        assembler.feed(data[:step])
        data = data[step:]


def _read_proved_endpoint(data: bytes) -> None:
    read_endpoint(proof(SECRET, "endpoint record", b"key", data) + data, SECRET, "key", "rank 1")


# -- what ranks did


@cache
def _record() -> FlightRecord:
    entry = FlightEntry(
        1, "all_reduce", "sum", "float32", None, 3, 12, None, None, True, 1.0, 2.0, "done", 0.5, 1
    )
    tally = Tally("all_reduce", None, 1, 12, 0.5, 0.25)
    ranks = tuple(
        RankRecord(
            rank, 100, "present", (entry,), (entry,), 1, 1, 12, 12, 0.5, 0.0, (0.0,) * 3, None, None, (tally,)
        )
        for rank in range(3)
    )
    return FlightRecord("group", 3, 5.0, 1e9, None, ranks)


def _records() -> Iterator[Target]:
    whole = answer(
        _record(), 3.0, (ProgramSample("at train.py:3, 0.1 s ago", read_process(os.getpid())),) * 3
    )
    yield Target("records: another host's", (answer(_record(), 3.0), whole), _read_answer, UNREADABLE)
    yield Target("records: another host's, unpacked", (_unpacked_answer(),), _read_packed_answer, UNREADABLE)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        _record().save(path)
        trace = path.read_bytes()
    program = Program("is at train.py:3", (UserFrame("train.py", 3, "main"),))
    answers = (to_json(program).encode(),)
    yield Target("records: a stack", answers, lambda data: from_json(Program, data), (ValueError, TypeError))
    table = json.dumps({"2": asdict(Choices.for_group(2, 1 << 20))})
    yield Target("records: thresholds", (table.encode(),), _read_thresholds, (ValueError,))
    yield Target("records: a trace", (trace,), _read_trace, (InvalidArgumentError,))


def _unpacked_answer() -> bytes:
    times, _, packed = answer(_record(), 3.0).partition(b"\n")
    return times + b"\n" + zlib.decompress(packed)


def _read_packed_answer(data: bytes) -> None:
    times, _, words = data.partition(b"\n")
    _read_answer(times + b"\n" + zlib.compress(words))


def _read_answer(data: bytes) -> None:
    found = understand(data, 0.0, 10.0)
    together = merge_records(_record(), 0, {1: found}, _HOSTS)
    assert [rank.rank for rank in together.ranks] == [0, 1, 2]


def _read_thresholds(data: bytes) -> None:
    for size, choices in tuned_thresholds._parsed(data.decode()).items():
        with contextlib.suppress(InvalidArgumentError):
            choices.check(1 << 20)
        assert size >= 0


def _read_trace(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(data)
        file.flush()
        read_traces([Path(file.name)])


# -- remote calls


def _rpc() -> Iterator[Target]:
    yield Target(
        "rpc: names", (b'["worker0", "worker1"]',), lambda data: starting._read_names(data, 2), (DistError,)
    )
    joined = membership.WorkerJoined("worker", 0, "tcp://10.0.0.1:1", "0" * 40, _ME.decode())
    events = [
        membership.encode_event(each, SECRET, "key") for each in (joined, membership.WorkerLeft(3, "died"))
    ]
    yield Target(
        "rpc: membership", tuple(events), lambda data: membership.decode_event(data, SECRET, "key"), ()
    )
    contents = tuple(each[PROOF_BYTES:] for each in events)
    yield Target("rpc: proved membership", contents, _read_proved_event, ())

    yield Target("rpc: messages", _rpc_messages(), _dispatch, ())


def _agent() -> Agent:
    """Return a worker that takes messages of another one and sends its own to itself, to be closed."""
    context = join(HashStore(), 0, 1, "fuzzing", 1.0, threads=False)
    workers = Workers([WorkerInfo("worker0", 0), WorkerInfo("worker1", 1)])
    return Agent(Router(context, 0, [0], 1), workers, RpcBackendOptions(), RRef)


def _rpc_messages() -> tuple[bytes, ...]:
    """Return a kind, a tag and a text: of calls, with and without a header, answers, and the others."""
    numbers = plain.encode_call(print_nothing, (1, "x"), None)
    tensor = plain.encode_tensor_call(print_nothing, (1, torch.ones(2)), None, None, {})
    alone = plain.encode_tensor(torch.ones(3), None, {})
    number = plain.encode_value("an answer")
    whole = messages.encode(
        (print_nothing, ([1],), {}), header=lambda: (None, [((1, 5), 1, (1, 6), False)], None)
    )
    value = messages.encode("an answer")
    found = [(messages.CALL, whole.text), (messages.ANSWER, value.text)]
    found += [(messages.TERMINATION, pickle.dumps(3)), (messages.SCOPE, value.text)]
    kinds = messages.PLAIN_CALL, messages.TENSOR_CALL, messages.TENSOR_ANSWER, messages.PLAIN_ANSWER
    for kind, encoded in zip(kinds, (numbers, tensor, alone, number), strict=True):
        assert encoded is not None
        found.append((kind, encoded.text))
    return tuple(bytes([kind, 7]) + text for kind, text in found)


_KINDS = messages.TENSOR_ANSWER + 1


def print_nothing(*_: object) -> None:
    """Be called."""


def _dispatch(data: bytes) -> None:
    """Take a message whose pickles are as the product writes them: whoever can change those is a worker."""
    kind, tag = (data + bytes(2))[:2]
    kind, text = kind % _KINDS, data[2:]
    is_plain = kind >= messages.PLAIN_CALL  # all of it is a pickle
    seeds = [seed[2:] if is_plain else seed[-20:] for seed in _rpc_messages()]
    if not (text in seeds if is_plain else text.endswith(tuple(seeds))):
        text = text[:8]
    with _quiet_log(), contextlib.closing(_agent()) as agent:  # it may start threads
        _, job = agent._dispatch(Message(1, kind, tag, text, []))
        if job is not None:
            job()


@contextlib.contextmanager
def _quiet_log() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _read_proved_event(data: bytes) -> None:
    text = proof(SECRET, "rpc membership event", b"key", data) + data
    event = membership.decode_event(text, SECRET, "key")
    log = membership.Membership()
    log.apply(event)
    log.apply(event)
    log.holder("worker", 0)


# -- launcher


def _launcher() -> Iterator[Target]:
    ours, theirs = channel.channel()
    with ours, theirs:
        channel.send(ours, {"rank": 3, "error": ValueError("x"), "times": [1.5, None]})
        packet = theirs.recv(1000)
    yield Target("launcher: channel", (packet, b"f", b"i"), _read_packet, (DistBackendError,))


def _read_packet(data: bytes) -> None:
    """Read a packet that a file came with, of which nothing stays open but what the receiver owns."""
    ours, theirs = channel.channel()
    files: list[int] = []
    with ours, theirs, channel.anonymous_file() as file:
        file.write(data[1:])
        file.flush()
        reading, writing = os.pipe()
        socket.send_fds(ours, [data or b"i"], [writing, file.fileno()])
        os.close(writing)
        try:
            message = channel.receive(theirs)
            files = message.files if message is not None else []
        finally:
            for each in files:
                os.close(each)
            # Readable where no writing end is open. Another thread's child may hold one until its exec.
            closed, _, _ = select.select([reading], [], [], _CLOSED_S)
            os.close(reading)
            assert closed, "a file that came with a packet has stayed open"
