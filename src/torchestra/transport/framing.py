"""Cut messages into frames of bounded size, and assemble frames into messages.

::

    first frame     kind, tag, count of storages, length of the front, sequence number; the front, if short
    then            the front in pieces, if it is long; then each storage in pieces

The *front* is the length of each storage, and then the text. A frame is at most :data:`PIECE_BYTES` long;
a first frame may be a little longer. So nobody can send an endless message, a large one neither delays other
messages nor has to fit into memory twice, and each piece is on its way while ZeroMQ encrypts the next.
Storages are sent from, and received into, their own memory.

A length that a peer announces costs nothing until its bytes come: the operating system gives memory only to
pages that are written. If there is none, the receiver drops the storage, and whoever reads the message gets
an error in its place. So this fails one call, but no connection.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchestra.transport.message import Message, new_storage, no_room

PIECE_BYTES = 1 << 16
FRONT_BYTES = PIECE_BYTES + 64  # in one frame; a piece with what is said about it
LARGEST_FRAME = FRONT_BYTES + 64
_HEAD = struct.Struct("=HqIQQ")
_LENGTH = struct.Struct("=Q")

Memory = npt.NDArray[np.uint8]


class _Range:
    """A range of memory for numpy, by its address; keeps the object alive that the memory belongs to."""

    def __init__(self, address: int, length: int, keep: object) -> None:
        self.keep = keep
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (length,),
            "typestr": "|u1",
            "version": 3,
        }


def memory_at(address: int, length: int, keep: object) -> Memory:
    """Return a view of memory, which keeps ``keep`` alive."""
    return np.asarray(_Range(address, length, keep))


def frames(
    kind: int, tag: int, parts: Sequence[tuple[int, int]], keep: object, sequence: int = 1
) -> Iterator[bytes | memoryview]:
    """Return the frames of a message. Those of storages are views of their memory.

    Args:
        parts: the address and length of each part; the first is the text.
        keep: the object that the parts belong to.
        sequence: the number of the message among those to that rank.
    """
    lengths = b"".join(_LENGTH.pack(length) for _, length in parts[1:])
    size = len(lengths) + parts[0][1]
    head = _HEAD.pack(kind, tag, len(parts) - 1, size, sequence)
    if size <= FRONT_BYTES:
        yield head + lengths + ctypes.string_at(*parts[0])
        rest = parts[1:]
    else:
        yield head
        yield from _pieces(memoryview(lengths))
        rest = parts
    for address, length in rest:
        yield from _pieces(memoryview(memory_at(address, length, keep)))  # type: ignore[arg-type]


def text_frames(kind: int, tag: int, text: bytes, sequence: int) -> Iterator[bytes | memoryview]:
    """Return the frames of a message that has only a text."""
    head = _HEAD.pack(kind, tag, 0, len(text), sequence)
    if len(text) <= FRONT_BYTES:
        yield head + text
    else:
        yield head
        yield from _pieces(memoryview(text))


def _pieces(memory: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(memory), PIECE_BYTES):
        yield memory[start : start + PIECE_BYTES]


class WholeText(NamedTuple):
    """A message of one part in one frame, with its number among those of its sender."""

    kind: int
    tag: int
    text: bytes
    sequence: int


def whole_text(frame: memoryview) -> WholeText | None:
    """Return the message in a frame, if the frame is a whole message with only a text."""
    if len(frame) <= _HEAD.size:
        return None
    kind, tag, count, length, sequence = _HEAD.unpack_from(frame)
    if count or len(frame) != _HEAD.size + length:
        return None
    return WholeText(kind, tag, bytes(frame[_HEAD.size :]), sequence)


class MessageAssembler:
    """Assembles the messages of one sender, ``source``, from their frames.

    Attributes:
        sequence: the number of the last message among those of its sender.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self._targets: list[tuple[int, int]] = []  # where the next pieces go: address, and room
        self._front: Memory | None = None
        self._kind = self._tag = self._count = self.sequence = 0
        self._text: bytes | Memory = b""
        self._storages: list[torch.UntypedStorage] = []
        self._too_large = 0  # bytes of a storage that there is no room for
        self._begun = False

    @property
    def under_way(self) -> bool:
        """Return whether a message has begun, and has not ended."""
        return self._begun

    def feed(self, frame: Any) -> Message | None:
        """Take the next frame (a buffer); return the message, if this was its last.

        Raises:
            ValueError: it is not what can come next.
            MemoryError: there is no room for the front of a message.
        """
        if not self._begun:
            self._begin(memoryview(frame))
        else:
            self._fill(memoryview(frame))
        if self._targets:
            return None
        if self._front is not None:
            self._open(memoryview(self._front))  # type: ignore[arg-type]
            self._front = None
            if self._targets:
                return None
        self._begun = False
        lost = no_room(self._source, "a tensor", self._too_large) if self._too_large else None
        storages, self._storages, self._too_large = self._storages, [], 0
        text, self._text = self._text, b""
        return Message(self._source, self._kind, self._tag, text, storages, lost)

    def _begin(self, frame: memoryview) -> None:
        if len(frame) < _HEAD.size:
            raise ValueError("a frame that does not begin a message")
        self._kind, self._tag, self._count, length, self.sequence = _HEAD.unpack_from(frame)
        if self._count * _LENGTH.size > length:
            raise ValueError("a first frame too short for the lengths that it announces")
        self._begun = True
        rest = frame[_HEAD.size :]
        if len(rest) == length:
            self._open(rest)
        elif len(rest) == 0:
            self._front = np.empty(length, dtype=np.uint8)
            self._targets.append((self._front.ctypes.data, length))
        else:
            raise ValueError("a first frame whose length is not the one that it states")

    def _open(self, front: memoryview) -> None:
        """Allocate the storages whose lengths the front gives."""
        end_of_lengths = self._count * _LENGTH.size
        self._text = bytes(front[end_of_lengths:])
        for (length,) in _LENGTH.iter_unpack(front[:end_of_lengths]):
            address = self._room(length)
            if length:
                self._targets.append((address, length))
        self._targets.reverse()

    def _room(self, length: int) -> int:
        """Return the address to receive a storage at; 0 if there is no memory for it."""
        if self._too_large:
            return 0
        storage = new_storage(length)
        if storage is None:
            self._too_large = length
            self._storages.clear()
            self._targets = [(0, size) for _, size in self._targets]
            return 0
        self._storages.append(storage)
        return storage.data_ptr()

    def _fill(self, piece: memoryview) -> None:
        address, room = self._targets.pop()
        length = len(piece)
        if length > room or not length:
            raise ValueError("an empty piece, or one longer than the memory it is for")
        if address:
            ctypes.memmove(address, np.frombuffer(piece, dtype=np.uint8).ctypes.data, length)
        if length < room:
            self._targets.append((address + length if address else 0, room - length))
