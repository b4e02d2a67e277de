"""Packets of ``send`` and ``recv`` between hosts: MPI's rendezvous protocol.

A packet has a head of fixed length and, after it, bytes of the message. The transport tells its sender and
its tag. Packets are reliable, but for ``data``, which its sender sends again until it is confirmed.
"""

from __future__ import annotations

import logging
import struct
from enum import IntEnum
from typing import NamedTuple

from torchestra.store.rate_limited import RateLimitedWarnings

_HEAD = struct.Struct("<BBQQ")
warnings = RateLimitedWarnings(logging.getLogger(__name__))


class PacketType(IntEnum):
    """The type of a packet.

    ``rts`` (request to send): there is a message, whose first bytes are in the packet. ``cts`` (clear to
    send): the sender may send the rest. ``data``: the rest. ``ack``: all of it has arrived. ``refuse``: the
    receiver drops it. ``lost``: it could not arrive. ``withdraw``: its sender has taken it back. ``bye``: no
    more packets will come. ``put``: bytes for memory that the receiver has exposed (exposed_memory.py), which
    it answers with ``ack`` or ``lost``.
    """

    rts = 1
    cts = 2
    data = 3
    ack = 4
    refuse = 5
    lost = 6
    withdraw = 7
    bye = 8
    put = 9


class Packet(NamedTuple):
    """A packet from one rank to another.

    Attributes:
        type: a PacketType.
        request: the number by which the sender of the message knows it.
        dtype: the code of the dtype of a message that is announced.
        length: of that, in bytes; of a ``put``, at which byte of the exposed memory it begins.
        payload: the bytes that go along.
    """

    type: int
    request: int = 0
    dtype: int = 0
    length: int = 0
    payload: bytes = b""


def pack(packet: Packet) -> bytes:
    """Return a packet as bytes."""
    return _HEAD.pack(packet.type, packet.dtype, packet.request, packet.length) + packet.payload


def unpack(raw: bytes) -> Packet:
    """Undo :func:`pack`.

    Raises:
        ValueError: it is something else.
    """
    if len(raw) < _HEAD.size:
        raise ValueError(f"{len(raw)} bytes are not a packet")
    what, dtype, request, length = _HEAD.unpack_from(raw)
    return Packet(PacketType(what), request, dtype, length, raw[_HEAD.size :])
