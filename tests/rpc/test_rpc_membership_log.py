"""The log of workers that join and leave: who may write it, what it says, and whatever else lies there."""

from __future__ import annotations

import json
import random
import sys
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchestra.errors import InvalidArgumentError
from torchestra.rpc import joining
from torchestra.rpc.membership import Membership, MembershipLog, WorkerJoined, decode_event, encode_event
from torchestra.store import HashStore
from torchestra.store.process import ProcessIdentity
from torchestra.system.authentication import PROOF_BYTES, proof

HERE = ProcessIdentity.current().encode()


def joined(**changes: Any) -> WorkerJoined:
    fields = {"name": "a", "rank": 0, "address": "tcp://127.0.0.1:1", "key": "k" * 40, "process": HERE}
    return WorkerJoined(**{**fields, **changes})


def test_without_a_secret_workers_on_other_hosts_are_refused() -> None:
    far = ProcessIdentity("elsewhere", 1, 1, "another-boot/4026531836").encode()
    with pytest.raises(InvalidArgumentError, match=r"worker 'a' is process 1 on elsewhere, .* no secret"):
        joining._check_same_host(joined(process=far))
    joining._check_same_host(joined())


def test_events_are_believed_only_from_who_knows_the_secret_and_only_in_their_place() -> None:
    store = HashStore()
    own, other = MembershipLog(store, b"ours"), MembershipLog(store, b"theirs")
    assert other.append(0, joined(name="stranger"))
    assert own.append(1, joined())
    store.set("torchestra/rpc/event/2", store.get("torchestra/rpc/event/1"))
    membership = Membership()
    for position in range(3):
        membership.apply(own.read(position))
    assert membership.joined == [joined()]
    assert membership.position == 3


def append_names(log: MembershipLog, names: list[str], held: list[str], begin: threading.Barrier) -> None:
    membership, key = Membership(), str(threading.get_ident()).zfill(40)  # a worker's own
    begin.wait(30)
    for name in names:
        while True:
            while log.has(membership.position):
                membership.apply(log.read(membership.position))
            if membership.holder(name, -1) is not None:
                break
            if log.append(membership.position, joined(name=name, rank=len(membership.joined), key=key)):
                held.append(name)
                break


def test_the_log_has_no_gaps_and_a_name_has_one_holder_however_many_append_at_once() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns within each step
    try:
        for _ in range(8):
            append_at_once()
    finally:
        sys.setswitchinterval(interval)


def append_at_once() -> None:
    log, held, begin = MembershipLog(HashStore(), b"ours"), [], threading.Barrier(6)
    names = [f"name{number}" for number in range(30)]
    shuffled = [random.Random(seed).sample(names, len(names)) for seed in range(6)]
    threads = [threading.Thread(target=append_names, args=(log, each, held, begin)) for each in shuffled]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(held) == sorted(names)
    found = [log.read(position) for position in range(len(names))]
    assert not log.has(len(names))
    assert sorted(each.name for each in found) == sorted(names)


EVENT = encode_event(joined(), b"ours", "key")


@given(st.binary(max_size=200), st.integers(0, len(EVENT)), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_whatever_the_store_says_is_an_event_or_nothing(text: bytes, start: int, cut: int) -> None:
    changed = EVENT[:start] + text + EVENT[start + cut * len(text) :]
    assert decode_event(changed, b"ours", "key") in (None, joined())
    content = changed[PROOF_BYTES:]
    proved = proof(b"ours", "rpc membership event", b"key", content) + content
    event = decode_event(proved, b"ours", "key")  # of another version, say
    assert event is None or Membership([joined()]).apply(event) in (True, False)


CONTENT = json.loads(EVENT[PROOF_BYTES:])
OTHER_TYPES = [0, [], "event", *({**CONTENT, name: [0] * len(CONTENT["key"])} for name in CONTENT)]


@pytest.mark.parametrize("content", OTHER_TYPES)
def test_an_event_whose_fields_have_other_types_is_none(content: object) -> None:
    text = json.dumps(content).encode()
    assert decode_event(proof(b"ours", "rpc membership event", b"key", text) + text, b"ours", "key") is None
