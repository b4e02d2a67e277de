"""The targets behind the store's wire: requests, replicas, a store's file, and what ranks agree on in it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tools.fuzzing import Target

from torchestra.engine.membership.admission import Admission, JoinRequest, Offer, Terms
from torchestra.engine.multihost.mpi_bridge import read_ends
from torchestra.errors import DistBackendError, DistError, DistStoreError, InvalidArgumentError
from torchestra.launcher.node_records import read_failure, read_job, read_members
from torchestra.process_group.reconfigure_handle import ReconfigureHandle
from torchestra.process_group.reconfigure_meeting import read_verdict
from torchestra.store import FileStore, HashStore
from torchestra.store.filelog import HEADER_SIZE, scan
from torchestra.store.filelog import encode as encode_record
from torchestra.store.process import ProcessIdentity
from torchestra.store.replicated.contents import Contents, replacement_fields
from torchestra.store.replicated.messages import REPLACE, Entry, Kind, Message
from torchestra.store.replicated.replica import Replica
from torchestra.store.table import Table
from torchestra.store.tcp.protocol import Decoder, ProtocolError, Request, encode
from torchestra.store.tcp.requests import answer, answer_change
from torchestra.store.tcp.resuming import Resuming, kept
from torchestra.world.group_agreement import GroupCall

_NONCE, _ENDED = b"n" * 32, b"e" * 32
_ME = ProcessIdentity.current().encode()


def targets() -> Iterator[Target]:
    """Yield the targets."""
    yield Target("store: requests", _requests(), _carry_out, (ProtocolError,))
    yield Target("store: replicas", _replica_messages(), _tell_replica, (ProtocolError,))
    yield Target("store: a replica's state", (_wire(1, *_contents().snapshot()),), _restore, (ProtocolError,))
    yield Target("store: a file", (_file(),), _read_file, (DistStoreError,))
    yield Target("store: a file's records", _records(), _read_records, (DistStoreError, ProtocolError))
    calls = GroupCall("new_group", 3, {"g": range(0, 8, 2), "h": (1, 5, 4)}).encode()
    yield Target("groups: calls", (calls,), _read_call, (DistStoreError,))
    yield from _membership()
    yield from _launchers()


def _wire(code: int, *fields: bytes) -> bytes:
    return b"".join(map(bytes, encode(code, fields)))


def _messages(data: bytes) -> Iterator[tuple[int, list[bytes]]]:
    decoder = Decoder()
    decoder.feed(data)
    while (message := decoder.message()) is not None:
        yield message


# -- a store's server


def _requests() -> tuple[bytes, ...]:
    resumed = _wire(Request.RESUME, _ENDED, b"3", b"3", b"key", b"5")
    again = _wire(Request.RESUME, _ENDED, b"2", b"1", b"key", b"value")
    resumed_there = _wire(Request.RESUME, _NONCE, b"1", b"9", b"key", b"tail")
    others = [
        _wire(Request.SET, b"key", b"1", b"other", b"2"),
        _wire(Request.ADD, b"number", b"-5"),
        _wire(Request.COMPARE_SET, b"key", b"old", b"new"),
        _wire(Request.APPEND, b"key", b"tail") + _wire(Request.LIST),
        _wire(Request.PUSH, b"queue", b"value") + _wire(Request.POP, b"", b"queue"),
        _wire(Request.WAIT, b"100", b"never") + _wire(Request.GET, b"100", b"key"),
        _wire(Request.DELETE, b"key") + _wire(Request.CHECK, b"key") + _wire(Request.QUEUE_LENGTH, b"queue"),
    ]
    return resumed + again, again + resumed, resumed_there, *others


def _carry_out(data: bytes) -> None:
    """Take requests as the server does, on a connection beside one that is there and one that has ended."""
    table, dropped = Table(), []

    def drop(peer: Any) -> None:
        dropped.append(peer)
        resuming.end(peer)

    resuming = Resuming(drop)
    me, there, ended = (
        SimpleNamespace(nonce=nonce, answered=2, last=(1, [b"1"])) for nonce in (b"m" * 32, _NONCE, _ENDED)
    )
    for peer in (me, there, ended):
        resuming.begin(peer)  # type: ignore[arg-type]
    resuming.end(ended)  # type: ignore[arg-type]
    for code, fields in _messages(data):
        if code == Request.RESUME:
            done = table.dump()
            first = resuming.resume(me, fields, lambda *request: answer_change(table, *request))  # type: ignore[arg-type]
            done = table.dump()
            assert resuming.resume(me, fields, _again) in (first, kept(first) or (6, []))  # type: ignore[arg-type]
            assert table.dump() == done
        else:
            answer(table, code, fields, lambda _: True)
    assert me not in dropped


def _again(*_: object) -> Any:
    raise AssertionError("a request that was resumed before is carried out again")


# -- a store's replicas


def _replica_messages() -> tuple[bytes, ...]:
    entry = Entry(b"s" * 16, 1, Request.SET, (b"key", b"value"))
    told = [
        Message(Kind.PREPARE, 0, 0, (1, 5, 1), 0, 1, 0, (entry,)),
        Message(Kind.PREPARE_OK, 2, 1, (1, 5, 1), 0, 1, 1),
        Message(Kind.START_VIEW_CHANGE, 2, 1, (1, 5, 1)),
        Message(Kind.DO_VIEW_CHANGE, 2, 1, (1, 5, 1), 0, 1, 1),
        Message(Kind.GET_STATE, 2, 0, (1, 5, 1)),
        Message(Kind.NEW_STATE, 0, 3, (1, 5, 1), 3, 9, 9, (entry,), _contents().snapshot()),
        Message(Kind.RECOVERY, 2, 0, (1, 5, 2)),
        Message(Kind.RECOVERY_RESPONSE, 0, 3, (1, 5, 1), 3, 1, 1, (entry,)),
    ]
    replaced = Entry(code=REPLACE, fields=replacement_fields(2, 1, "h:1"))
    told.append(Message(Kind.PREPARE, 0, 0, (1, 5, 1), 0, 2, 1, (entry, replaced)))
    alone = [_wire(message.kind, *message.encode()) for message in told]
    return *alone, alone[2] + alone[3], alone[0] + alone[5]


class _Machine:
    """What a replica executes."""

    def __init__(self) -> None:
        self._contents = Contents(Table())

    def execute(self, op: int, entry: Entry) -> None:
        if entry.number:
            self._contents.change(entry)
        elif entry.code == REPLACE:
            self._contents.replace(entry)

    def snapshot(self) -> tuple[bytes, ...]:
        return self._contents.snapshot()

    def restore(self, snapshot: tuple[bytes, ...]) -> None:
        self._contents.restore(snapshot)


def _tell_replica(data: bytes) -> None:
    """Take what another replica says; say again what is due then."""
    replica = Replica(1, 3, _Machine(), 5)
    for now, (code, fields) in enumerate(_messages(data)):
        sent = replica.on_message(Message.decode(code, fields))
        for _, message in (*sent, *replica.on_tick(float(now))):
            assert Message.decode(message.kind, message.encode()) == message
        assert replica.log_start <= replica.commit <= replica.op


def _contents() -> Contents:
    contents = Contents(Table())
    for number, (code, fields) in enumerate(
        ((Request.SET, (b"a", b"1")), (Request.PUSH, (b"q", b"x")), (Request.ADD, (b"n", b"3"))), 1
    ):
        contents.change(Entry(b"s" * 16, number, code, fields))
    contents.replace(Entry(code=REPLACE, fields=replacement_fields(1, 1, "h:1")))
    return contents


def _restore(data: bytes) -> None:
    contents = _contents()
    before = contents.snapshot()
    for _, fields in _messages(data):
        try:
            contents.restore(tuple(fields))
        except ProtocolError:
            assert contents.snapshot() == before
            raise
        before = contents.snapshot()


@cache
def _file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        store = FileStore(str(path), 2)
        store.set("key", "value")
        store.add("number", 3)
        store.queue_push("queue", "one")
        return path.read_bytes()


def _read_file(data: bytes) -> None:
    """Read a store's file that something else has written to, below its head."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        path.write_bytes(_file()[:HEADER_SIZE] + data[HEADER_SIZE:])
        store = FileStore(str(path), 2)
        store.add("number", 1)
        store.check(["key"])


def _records() -> tuple[bytes, ...]:
    found = [_wire(kind, key.encode(), value) for kind, key, value, _ in scan(_file()[HEADER_SIZE:])]
    return b"".join(found), *found


def _read_records(data: bytes) -> None:
    """Read records whose checksums are right, whatever they say."""
    records = bytearray(HEADER_SIZE)
    for code, fields in _messages(data):
        key, value = (*fields, b"", b"")[:2]
        records += encode_record(code, key.decode(errors="replace"), value)
    _read_file(bytes(records))


# -- members of a job


def _membership() -> Iterator[Target]:
    request = JoinRequest("0123456789abcdef", 2, "native", "boot/net:[1]", ProcessIdentity.current())
    terms = Terms("g", 3, "", 30.0, "native", None, (0, 1, 2))
    offer = Offer.of(terms, [0, 2], [request])
    lines = request.encode().encode()
    yield Target("admission: requests", (lines, lines * 2), _read_requests, (DistBackendError,))
    yield Target("admission: offer", (offer.encode().encode(),), _read_offer, (DistBackendError,))
    invitations = (b"3 1 8fff\n", b"3 1 8fff\n3 2 80ab\n", b"refused because\n")
    yield Target("admission: invitations", invitations, _read_invitations(request), (DistBackendError,))
    offers = (b"1 8fff\n2 80ab\n", b"9 8fff\n")
    yield Target("admission: offers", offers, _remove_offers, (DistBackendError,))
    verdicts = (b'["late", [1, 2], "rank 1 did not come"]', b"enter")
    yield Target("reconfigure: verdict", verdicts, lambda data: read_verdict(data, 3), (DistStoreError,))
    handle = f"torchestra-rank-1;00ff;unix:@torchestra-rank-00ff;0;{_ME}"
    yield Target("reconfigure: handle", (handle.encode(),), _read_handle, (InvalidArgumentError,))


def _admission(key: str, data: bytes) -> Admission:
    store = HashStore()
    store.set(key, data)
    return Admission(store, 0.01)


def _read_requests(data: bytes) -> None:
    admission = _admission("waiting", data)
    for request in admission.waiting():
        str(request)
    admission.remove(["0123456789abcdef"])
    admission.waiting()


def _read_offer(data: bytes) -> None:
    offer = _admission("offer/00", data).offer(b"\0")
    assert len(offer.previous) == offer.size
    assert all(0 <= rank < offer.size for rank in offer.joiners.values())
    assert offer.encode()


def _read_invitations(request: JoinRequest) -> Any:
    return lambda data: _admission(f"invited/{request.number}", data).invitation(request)


def _remove_offers(data: bytes) -> None:
    _admission("offers", data).remove_offers(3)


def _read_handle(data: bytes) -> None:
    str(ReconfigureHandle.decode(data.decode(errors="replace")))


def _read_call(data: bytes) -> None:
    mine = GroupCall("new_group", 1, {"g": range(0, 8, 2)})
    mine.difference(GroupCall.decode(data))


# -- launchers, and MPI's ends


def _launchers() -> Iterator[Target]:
    launcher = {"who": "pid 1 on h", "token": "00", "nproc": 2, "port": 1}
    job, member = {"nnodes": 2, "torchestra": "1", "node": 0, **launcher}, {**launcher, "store": "h:1"}
    yield Target("launchers: job", (json.dumps(job).encode(),), read_job, (DistStoreError,))
    members = (json.dumps([member] * 2).encode(),)
    yield Target("launchers: members", members, lambda data: read_members(data, 2), (DistStoreError,))
    yield Target("launchers: failure", (b'[1, 137, "rank 3 died"]',), read_failure, (DistStoreError,))
    yield Target("mpi: ends", (b"[0, 2, 77]", b"[1, 2, 78]"), lambda data: read_ends([data]), (DistError,))
