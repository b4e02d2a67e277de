"""Strangers between hosts: who has not proved the job's secret has nothing read, and stops nobody."""

from __future__ import annotations

import logging
import pickle
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated import on_threads
from test_hosts_messages import link_of
from test_hosts_shrink import meet as meet_by_the_store

import torchestra as dist
from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.multihost.bridge_selection import BRIDGE_VARIABLE, TRUST_VARIABLE, choose_bridge
from torchestra.engine.multihost.control_message import ControlMessage
from torchestra.engine.multihost.group_transport import Channel
from torchestra.engine.multihost.packets import Packet, PacketType, pack, unpack
from torchestra.errors import InvalidArgumentError
from torchestra.store import PrefixStore
from torchestra.store.rate_limited import RateLimitedWarnings
from torchestra.transport.rendezvous import meet
from torchestra.transport.transport import Transport


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return what is logged of packets that are dropped, beginning anew."""
    for name in ("packets", "point_to_point", "failure_detector", "peer_values"):
        monkeypatch.setattr(
            f"torchestra.engine.multihost.{name}.warnings", RateLimitedWarnings(logging.getLogger("packets"))
        )
    return caplog


# -- packets

KIND = DTYPE_CODE[torch.int64]


@given(st.binary(max_size=200))
def test_whatever_comes_is_a_packet_or_refused(raw: bytes) -> None:
    try:
        packet = unpack(raw)
    except ValueError:
        return
    assert len(packet.payload) < len(raw) < 200
    assert packet.type in PacketType


LARGE = 100_000  # elements of int64: more than what a small message has


def impossible() -> Iterator[bytes]:
    """Packets of a rank of the group that say more than is true."""
    large = 8 * LARGE
    yield b""
    yield b"xx"
    yield bytes(100)
    yield pack(Packet(PacketType.rts, 0, KIND, 8, b""))  # what lies beside it would be read
    yield pack(Packet(PacketType.rts, 0, KIND, 8, bytes(16)))
    yield pack(Packet(PacketType.rts, 99, KIND, large, bytes(large + 1)))
    yield pack(Packet(PacketType.rts, 99, 250, large, b""))
    yield pack(Packet(PacketType.rts, 0, KIND, large, b""))  # nobody could be told to send the rest


def receive_the_impossible() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    link = link_of(dist.group.WORLD)
    if rank == 0:
        dist.group.WORLD.communicator.engine.mailbox._send_rest = lambda *_: None  # type: ignore[union-attr]
        for raw in impossible():
            link.post_text(last, Channel.p2p, 5, raw)
        # More than was told of, which would be written beyond the tensor.
        link.post_text(last, Channel.p2p, 6, pack(Packet(PacketType.rts, 98, KIND, 8 * LARGE, b"")))
        data = np.full(8 * LARGE + 8, 1, np.uint8)
        head = np.frombuffer(pack(Packet(PacketType.data, 98)), np.uint8)
        dist.recv(torch.zeros(1), last)
        link.post(
            last, Channel.p2p, 0, [(head.ctypes.data, head.nbytes), (data.ctypes.data, data.nbytes)], data
        )
        dist.send(torch.tensor([8]), last, tag=5)
    elif rank == last:
        whole = torch.zeros(3 * LARGE, dtype=torch.int64)
        work = dist.irecv(whole[LARGE : 2 * LARGE], 0, tag=6)
        dist.send(torch.zeros(1), 0)
        dist.recv(number := torch.zeros(1, dtype=torch.int64), 0, tag=5)
        assert number.item() == 8
        with pytest.raises(dist.DistBackendError, match=r"800008 bytes came, not 800000"):
            work.wait()
        assert not whole.any()
    dist.barrier()


@pytest.mark.usefixtures("told")
def test_what_a_packet_says_is_checked_against_what_there_is_room_for() -> None:
    on_threads((1, 1), receive_the_impossible)


# -- what hosts tell each other

NONSENSE = [b"", b"xx", b"5", b"[]", b"[" * 100_000, b'["over", ["1"], 5]', b'[["1"], [99], []]', b"{}"]


def be_asked_despite_nonsense() -> bool:
    """Return whether the other host still answers, after what would have ended its thread."""
    if dist.get_rank() == 0:
        for text in NONSENSE:
            for what in (*ControlMessage, 99):
                link_of(dist.group.WORLD).post_text(1, Channel.control, what, text)
    dist.barrier()
    answered = all(host.answered for host in dist.flight_record().hosts)
    dist.barrier()
    return answered


@pytest.mark.usefixtures("told")
def test_control_messages_that_make_no_sense_are_dropped() -> None:
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
    assert any("invalid proposal" in record.message for record in told.records)


def believe_no_verdict(proposal: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    store = PrefixStore("shrinking", group.communicator.engine.hierarchy.detector.store)
    if dist.get_rank() == 0:
        store.set("round/1", proposal)
        store.set("verdict/1", "committed")
    meet_by_the_store()
    with pytest.raises(dist.DistBackendError, match=r"another process has written .*TORCHESTRA_SECRET"):
        group.shrink()


@pytest.mark.parametrize("proposal", ["", "[0, 1]", '[[0, 1], ""]'], ids=["none", "unreadable", "valid"])
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
    monkeypatch.setattr("torchestra.engine.multihost.bridge_selection._warned", False)

    def chosen(*, mpiexec: bool = False, has_secret: bool = True) -> str:
        return choose_bridge(threads=False, mpiexec=mpiexec, has_secret=has_secret)

    assert chosen() == chosen(mpiexec=True) == "curve"
    with pytest.raises(InvalidArgumentError, match=rf"have no secret.*TORCHESTRA_SECRET.*{TRUST_VARIABLE}=1"):
        chosen(has_secret=False)
    for kind in ("gloo", "mpi"):
        monkeypatch.setenv(BRIDGE_VARIABLE, kind)
        with pytest.raises(
            InvalidArgumentError,
            match=rf"'{kind}', which does not authenticate its peers.*{TRUST_VARIABLE}=1",
        ):
            chosen()
    assert not caplog.records
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    monkeypatch.setenv(BRIDGE_VARIABLE, "gloo")
    assert chosen() == chosen(has_secret=False) == "gloo"
    assert [record.message for record in caplog.records] == [
        f"{TRUST_VARIABLE} is set: data between hosts goes over Gloo, unencrypted, and whoever reaches its"
        " ports can take part"
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
