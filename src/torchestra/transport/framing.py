"""How a message becomes frames of bounded size, and frames a message again.

::

    first frame     kind, tag, how many storages, how long the front is, number; the front, if it is short
    then            the front in pieces, if it is not; then each storage in pieces

The *front* is the length of each storage, and then the text. A frame is at most :data:`PIECE_BYTES` long, and
a little more if it is a first one. So an endless message is not accepted from anybody, one that is large
neither holds up what is sent beside it nor has to fit into memory twice, and each piece is on its way while
the next one is encrypted. Storages are sent from where they lie, and received where they shall lie.

What is announced is not believed before it comes: room for a storage is asked of the operating system, which
gives memory only to what is written. If there is none, the storage is received and thrown away, and whoever
reads the message gets an error in its place: so that is the end of one call, and of no connection.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchestra.transport.message import Message, new_storage, no_room

PIECE_BYTES = 1 << 18
LARGEST_FRAME = PIECE_BYTES + 64
_HEAD = struct.Struct("=HqIQQ")
_LENGTH = struct.Struct("=Q")

Memory = npt.NDArray[np.uint8]


class _Range:
    """Memory by its address, for numpy; keeps something alive that it belongs to."""

    def __init__(self, address: int, length: int, keep: object) -> None:
        self.keep = keep
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (length,),
            "typestr": "|u1",
            "version": 3,
        }


def memory_at(address: int, length: int, keep: object) -> Memory:
    """A view of memory, with which ``keep`` lives."""
    return np.asarray(_Range(address, length, keep))


def frames(
    kind: int, tag: int, parts: Sequence[tuple[int, int]], keep: object, number: int = 1
) -> Iterator[bytes | memoryview]:
    """Return a message in frames. Those of storages are views of their memory.

    Args:
        kind, tag: of the message.
        parts: the address and length of each part; the first is the text.
        keep: what the parts belong to.
        number: of the message, among those to that rank.
    """
    lengths = b"".join(_LENGTH.pack(length) for _, length in parts[1:])
    size = len(lengths) + parts[0][1]
    head = _HEAD.pack(kind, tag, len(parts) - 1, size, number)
    if size <= PIECE_BYTES:
        yield head + lengths + ctypes.string_at(*parts[0])
        rest = parts[1:]
    else:
        yield head
        yield from _pieces(memoryview(lengths))
        rest = parts
    for address, length in rest:
        yield from _pieces(memoryview(memory_at(address, length, keep)))  # type: ignore[arg-type]


def text_frames(kind: int, tag: int, text: bytes, number: int) -> Iterator[bytes | memoryview]:
    """Return a message that has only a text, in frames."""
    head = _HEAD.pack(kind, tag, 0, len(text), number)
    if len(text) <= PIECE_BYTES:
        yield head + text
    else:
        yield head
        yield from _pieces(memoryview(text))


def _pieces(memory: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(memory), PIECE_BYTES):
        yield memory[start : start + PIECE_BYTES]


class MessageAssembler:
    """What has come of the messages of one sender.

    Args:
        source: the sender, as its messages shall say.

    Attributes:
        number: of the last message, among those of its sender.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self._targets: list[tuple[int, int]] = []  # where the next pieces go: address, and room
        self._front: Memory | None = None
        self._kind = self._tag = self._count = self.number = 0
        self._text: bytes | Memory = b""
        self._storages: list[torch.UntypedStorage] = []
        self._too_large = 0  # bytes of a storage that there is no room for
        self._begun = False

    @property
    def under_way(self) -> bool:
        """Whether a message has begun, and has not ended."""
        return self._begun

    def feed(self, frame: Any) -> Message | None:
        """Take the next frame (a buffer); the message, if this was its last.

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
            raise ValueError("a frame that is no beginning of a message")
        self._kind, self._tag, self._count, length, self.number = _HEAD.unpack_from(frame)
        if self._count * _LENGTH.size > length:
            raise ValueError("a first frame that says less than it tells of")
        self._begun = True
        rest = frame[_HEAD.size :]
        if len(rest) == length:
            self._open(rest)
        elif len(rest) == 0:
            self._front = np.empty(length, dtype=np.uint8)
            self._targets.append((self._front.ctypes.data, length))
        else:
            raise ValueError("a first frame of another length than it says")

    def _open(self, front: memoryview) -> None:
        """Make room for what the front tells of."""
        place = self._count * _LENGTH.size
        self._text = bytes(front[place:])
        for number in range(self._count):
            length = _LENGTH.unpack_from(front, number * _LENGTH.size)[0]
            address = self._room(length)
            if length:
                self._targets.append((address, length))
        self._targets.reverse()

    def _room(self, length: int) -> int:
        """Where a storage is to be received; 0 if it is to be thrown away."""
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
            raise ValueError("a piece that is longer than what it belongs to")
        if address:
            ctypes.memmove(address, np.frombuffer(piece, dtype=np.uint8).ctypes.data, length)
        if length < room:
            self._targets.append((address + length if address else 0, room - length))
