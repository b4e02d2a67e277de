"""Strangers between hosts: who has not proved the job's secret has nothing read, and stops nobody."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated import on_threads
from test_hosts_messages import letters_of, meet_over_a_line
from test_hosts_shrink import meet as meet_by_the_store

import torchestra as dist
from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.multihost.bridge_selection import BRIDGE_VARIABLE, TRUST_VARIABLE, choose_bridge
from torchestra.engine.multihost.letters import ENCLOSED_BYTES, Envelope, Letter, What, pack, unpack
from torchestra.errors import InvalidArgumentError
from torchestra.store import HashStore, PrefixStore
from torchestra.store.rate_limited import RateLimitedWarnings
from torchestra.transport.rendezvous import meet
from torchestra.transport.transport import Transport

LAST = 2


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged of letters that are dropped, beginning anew."""
    for name in ("letters", "correspondence", "point_to_point", "failure_detector", "peer_values"):
        monkeypatch.setattr(
            f"torchestra.engine.multihost.{name}.warnings", RateLimitedWarnings(logging.getLogger("letters"))
        )
    return caplog


# -- letters

KIND = DTYPE_CODE[torch.int64]


def forgeries() -> list[bytes]:
    """What was read as a letter, or ended the thread that reads them."""
    offer = Letter(What.offer, 0, 0, KIND, 8, 0, struct.pack("<q", 666))
    genuine = bytes(pack(Envelope(0, 1, 0), offer))
    return [b"", b"xx", genuine, bytes(32) + genuine, os.urandom(500), genuine[:20]]


def receive_despite_forgeries() -> int:
    rank = dist.get_rank()
    post = letters_of(dist.group.WORLD)._post
    if rank == 1:
        for forged in forgeries():
            if post._has_queues():
                post._store.queue_push(f"box/{LAST}", forged)
            else:
                post._store.set(f"box/{LAST}/{post._store.add(f'count/{LAST}', 1)}", forged)
    dist.barrier()
    if rank == 0:
        dist.send(torch.tensor([7]), LAST)
    number = torch.zeros(1, dtype=torch.int64)
    if rank == LAST:
        dist.recv(number, 0)
    dist.barrier()
    return int(number)


def without_queues(*_: object) -> int:
    raise NotImplementedError


@pytest.mark.parametrize("queues", [True, False], ids=["queues", "numbers"])
def test_letters_that_strangers_put_into_the_store_are_dropped(
    queues: bool, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    if not queues:  # as in torch's store
        monkeypatch.setattr(HashStore, "queue_len", without_queues)
    assert on_threads((2, 1), receive_despite_forgeries) == [0, 0, 7]
    [warning] = [record.getMessage() for record in told.records if "nobody of its group" in record.message]
    assert f"rank {LAST} dropped" in warning


@given(st.binary(max_size=200))
def test_whatever_comes_is_a_letter_or_refused(raw: bytes) -> None:
    try:
        _, letter = unpack(raw)
    except ValueError:
        return
    assert len(letter.enclosed) <= len(raw) < 200
    assert letter.what in What


def test_a_letter_cannot_enclose_more_than_there_is() -> None:
    raw = pack(Envelope(0, 1, 0), Letter(What.part, 1, enclosed=b"12345678"))
    assert unpack(bytes(raw))[1].enclosed == b"12345678"
    with pytest.raises(ValueError, match="cannot enclose 8"):
        unpack(bytes(raw[:-1]))
    with pytest.raises(ValueError, match="cannot enclose"):
        unpack(bytes(pack(Envelope(0, 1, 0), Letter(What.part, 1, enclosed=bytes(ENCLOSED_BYTES + 1)))))


LARGE = 100_000  # elements of int64: more than what a small message has


def impossible() -> Iterator[Letter]:
    """Letters of a rank of the group that say more than is true."""
    large = 8 * LARGE
    yield Letter(What.offer, 0, 5, KIND, 8, 0, b"")  # less than it says: what lies beside it would be read
    yield Letter(What.offer, 0, 5, KIND, 8, 0, bytes(16))
    yield Letter(What.offer, 99, 5, KIND, large, large + 1, b"")
    yield Letter(What.offer, 99, 5, 250, large, 0, b"")
    # More parts than were told of, which would be written beyond the tensor.
    yield Letter(What.offer, 98, 6, KIND, large, large, b"")
    for _ in range(20):
        yield Letter(What.part, 98, enclosed=b"\1" * ENCLOSED_BYTES)
    yield Letter(What.part, 98, enclosed=b"\1" * (large % ENCLOSED_BYTES))


def receive_the_impossible() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == 0:
        meet_over_a_line(last)
        for letter in impossible():
            letters_of(dist.group.WORLD).write(last, letter)
        dist.send(torch.tensor([8]), last, tag=5)
    elif rank == last:
        meet_over_a_line(0)
        whole = torch.zeros(3 * LARGE, dtype=torch.int64)
        work = dist.irecv(whole[LARGE : 2 * LARGE], 0, tag=6)
        dist.recv(number := torch.zeros(1, dtype=torch.int64), 0, tag=5)
        assert number.item() == 8
        work.wait()
        ones = torch.full((LARGE,), 0x0101010101010101)
        assert torch.equal(whole, torch.cat([torch.zeros_like(ones), ones, torch.zeros_like(ones)]))
    dist.barrier()


@pytest.mark.usefixtures("told")
def test_what_a_letter_says_is_checked_against_what_there_is_room_for() -> None:
    on_threads((1, 1), receive_the_impossible)


# -- what hosts tell each other

NONSENSE = [
    "",
    "xx",
    "5",
    "[]",
    "[" * 100_000,
    '{"abort": 5, "host": 9}',
    '{"abort": ["over", ["1"], 5], "host": 9}',
    '{"gone": [], "host": 1}',
    '{"gone": [["1"], [99]], "host": 9}',
    '{"ask": 1}',
]


def be_asked_despite_nonsense() -> bool:
    """Whether the warden of the other host still answers, after what would have ended its thread."""
    detector = dist.group.WORLD.communicator.engine.hierarchy.detector  # type: ignore[union-attr]
    if dist.get_rank() == 0:
        for text in NONSENSE:
            detector.store.set(f"news/{detector.store.add('news', 1)}", text)
    dist.barrier()
    answered = all(host.answered for host in dist.flight_record().hosts)
    dist.barrier()
    return answered


@pytest.mark.usefixtures("told")
def test_news_that_strangers_tell_are_dropped() -> None:
    assert on_threads((1, 1), be_asked_despite_nonsense) == [True, True]


def shrink_despite_nonsense() -> tuple[int, ...] | None:
    group = dist.group.WORLD
    assert group is not None
    store = PrefixStore("shrinking", group.communicator.engine.hierarchy.detector.store)
    if dist.get_rank() == 0:
        store.append("came", b"x \xff 99 --1 0:1 ")
        store.append("gone", b"x \xff 99 -1 0:1 ")
        store.append("excluded", b"x \xff 0 1:x 1:99 -1:0 0:1:2 ")
        for number, text in enumerate(("[9", "[1, 0]", "[0, 99]", '["0"]', "{}"), 1):
            store.set(f"round/{number}", text)
        store.set("verdict/6", "neither")
    meet_by_the_store()
    if dist.get_rank() == 2:
        return None
    return group.shrink(exclude=[2]).previous_ranks


def test_what_strangers_say_of_who_goes_on_is_dropped(told: pytest.LogCaptureFixture) -> None:
    assert on_threads((1, 2), shrink_despite_nonsense) == [(0, 1), (0, 1), None]
    assert any("no rank can have" in record.message for record in told.records)


def believe_no_verdict(proposal: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    store = PrefixStore("shrinking", group.communicator.engine.hierarchy.detector.store)
    if dist.get_rank() == 0:
        store.set("round/1", proposal)
        store.set("verdict/1", "committed")
    meet_by_the_store()
    with pytest.raises(dist.DistBackendError, match=r"somebody else has written .*TORCHESTRA_SECRET"):
        group.shrink()


@pytest.mark.parametrize("proposal", ["", "[0, 1]"])
def test_who_has_not_entered_a_group_is_not_in_it_whatever_a_stranger_says(proposal: str) -> None:
    on_threads((1, 1), believe_no_verdict, proposal)


# -- connections


class Explosive:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exploded.append, ("a stranger's pickle was read",)


exploded: list[str] = []


def exchange_objects() -> list[object]:
    objects = [{"from": 0}] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(objects)
    dist.all_reduce(total := torch.ones(300_000))
    assert (total == dist.get_world_size()).all()
    return objects


def test_who_comes_first_to_the_port_of_a_bridge_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """To either end, before the other one does, he greets as Gloo's ends do, and sends a pickle."""
    exploded.clear()
    held: list[socket.socket] = []
    load = bytes(8) + pickle.dumps([Explosive()])

    def meet_too_late(wire: Transport, *args: Any) -> None:
        host, _, port = wire.endpoint.address.removeprefix("tcp://").rpartition(":")
        for greeting in (b"", b"\0", load, b"\xff" + load):
            held.append(socket.create_connection((host, int(port)), timeout=20))
            held[-1].sendall(greeting)
        meet(wire, *args)

    monkeypatch.setattr("torchestra.engine.multihost.curve_bridge.meet", meet_too_late)
    try:
        assert on_threads((1, 1), exchange_objects, bridge="curve") == [[{"from": 0}]] * 2
    finally:
        for each in held:
            each.close()
    assert len(held) == 8
    assert not exploded


# -- who decides


def test_gloo_and_mpi_are_used_only_in_a_network_that_is_trusted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (BRIDGE_VARIABLE, TRUST_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torchestra.engine.multihost.bridge_selection._told", False)

    def chosen(*, mpiexec: bool = False, has_secret: bool = True) -> str:
        return choose_bridge(threads=False, mpiexec=mpiexec, has_secret=has_secret)

    assert chosen() == chosen(mpiexec=True) == "curve"
    with pytest.raises(InvalidArgumentError, match=rf"have no secret.*TORCHESTRA_SECRET.*{TRUST_VARIABLE}=1"):
        chosen(has_secret=False)
    for kind in ("gloo", "mpi"):
        monkeypatch.setenv(BRIDGE_VARIABLE, kind)
        with pytest.raises(InvalidArgumentError, match=rf"'{kind}', which asks nobody.*{TRUST_VARIABLE}=1"):
            chosen()
    assert not caplog.records
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    monkeypatch.setenv(BRIDGE_VARIABLE, "gloo")
    assert chosen() == chosen(has_secret=False) == "gloo"
    assert [record.message for record in caplog.records] == [
        f"{TRUST_VARIABLE} is set: what goes between hosts goes over Gloo, unencrypted, and whoever reaches"
        " its ports can take part"
    ]
    monkeypatch.delenv(BRIDGE_VARIABLE)
    assert chosen(has_secret=False) == "gloo"
    monkeypatch.setenv(BRIDGE_VARIABLE, "curve")
    assert chosen() == "curve"
    for name, wrong in ((BRIDGE_VARIABLE, "tcp"), (TRUST_VARIABLE, "yes")):
        with monkeypatch.context() as patch:
            patch.setenv(name, wrong)
            with pytest.raises(InvalidArgumentError, match=f"{name} must be"):
                chosen()
