"""Messages between workers: a header about references and scopes, and a serialized object.

    length of the header | header | data (tensors/serialization.py)

Header and data are one part of the message; the large memory of tensors travels as further parts, or lies in
memory that both workers share (shared_buffers.py).

Plain messages are different (plain.py).
"""

from __future__ import annotations

import ctypes
import pickle
import struct
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch

from torchestra.rpc.shared_buffers import OpenedBuffers
from torchestra.tensors.serialization import Reducer, deserialize, serialize, shared_offsets
from torchestra.transport.message import Message

CALL, ANSWER, FAILURE, TERMINATION, SCOPE = range(1, 6)
PLAIN_CALL, PLAIN_ANSWER, TENSOR_CALL, TENSOR_ANSWER = range(6, 10)
"""The kinds of messages, see agent.py; the latter four see plain.py."""

HEADER_LENGTH = struct.Struct("=i")
Borrow: TypeAlias = Callable[[int, int, int, OpenedBuffers], torch.UntypedStorage]
BYTES_AT = bytes.__basicsize__ - 1  # where in a bytes object its bytes begin; they end with a zero


class Encoded(NamedTuple):
    """A message to be sent.

    Attributes:
        parts: addresses and lengths, for the transport; what lies in shared buffers is not among them.
        text: the first part.
        keep: what the other addresses point into.
    """

    parts: list[tuple[int, int]]
    text: bytes
    keep: object


part_length = itemgetter(1)
"""Returns the length of a part: to add them up calls no function of Python."""


def address_of(text: bytes) -> int:
    """Return where the bytes of a bytes object lie (in CPython, which torch needs as well)."""
    return id(text) + BYTES_AT


def encode(
    item: object,
    *,
    reducers: Mapping[type, Reducer] | None = None,
    takes: Callable[[torch.Tensor], bool] | None = None,
    header: Callable[[], object] | None = None,
    share: Callable[[int, int], int] | None = None,
) -> Encoded:
    """Serialize an object for another worker.

    Args:
        header: called afterwards; returns something small to be read before the object, or None.
        share: copies large memory to where the worker finds it, and returns its place there.

    Raises:
        Exception: what pickling raised.
    """
    serialized = serialize(item, reducers=_registered if reducers is None else reducers, takes=takes)
    around = None if header is None else header()
    head = b"" if around is None else pickle.dumps(around, 5)
    pieces, outside = serialized.pack(share)
    text = b"".join((HEADER_LENGTH.pack(len(head)), head, *pieces))
    parts = [(address_of(text), len(text))]
    parts += [(storage.data_ptr() + first, length) for storage, first, length in outside]
    return Encoded(parts, text, outside)


def header_of(message: Message) -> Any:
    """Return the header of a message that has one."""
    (length,) = HEADER_LENGTH.unpack_from(message.text)  # type: ignore[arg-type]
    text = memoryview(message.text)  # type: ignore[arg-type]
    return pickle.loads(text[HEADER_LENGTH.size : HEADER_LENGTH.size + length])


def decode(
    message: Message,
    context: object = None,
    borrow: Borrow | None = None,
    opened: OpenedBuffers | None = None,
) -> Any:
    """Return the object that :func:`encode` was given.

    Args:
        borrow: returns memory that a rank has shared, for the rank, its place and length, and ``opened``.
        opened: see :meth:`SharedBufferPool.open`.

    Raises:
        MemoryError: there was no memory for the message.
        Exception: what unpickling raised.
    """
    if message.lost is not None:
        raise message.lost
    data = memoryview(message.text)  # type: ignore[arg-type]
    (length,) = HEADER_LENGTH.unpack_from(data)
    memo: OpenedBuffers = {} if opened is None else opened
    own = None if borrow is None else lambda offset, size: borrow(message.source, offset, size, memo)
    return deserialize(data[HEADER_LENGTH.size + length :], message.storages, context, own)


def open_shared(message: Message, borrow: Borrow, opened: OpenedBuffers) -> None:
    """Open the shared buffers of a message that is not decoded, so that they are released with ``opened``."""
    data = memoryview(message.text)  # type: ignore[arg-type]
    (length,) = HEADER_LENGTH.unpack_from(data)
    for offset, size in shared_offsets(data[HEADER_LENGTH.size + length :]):
        borrow(message.source, offset, size, opened)


def to_self(rank: int, kind: int, tag: int, encoded: Encoded) -> Message:
    """Return a copy of a message, as it would arrive at another worker."""
    copies = []
    for address, length in encoded.parts[1:]:
        copy = torch.UntypedStorage(length)
        ctypes.memmove(copy.data_ptr(), address, length)
        copies.append(copy)
    return Message(rank, kind, tag, encoded.text, copies)


_registered: dict[type, Reducer] = {}


def register_reducer(cls: type, reducer: Reducer) -> None:
    """Send objects of exactly this type as ``reducer`` says, which returns values like ``__reduce__``.

    Outside of RPC they are pickled as usual. Only the workers that send such objects must call this.
    """
    _registered[cls] = reducer


def registered_reducers() -> Mapping[type, Reducer]:
    """Return how objects of further types are sent."""
    return _registered
