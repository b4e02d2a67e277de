"""Convert Python objects to tensors of bytes, which collectives of objects move, and back.

Packed objects are *a stream and buffers*. The buffers are the large memory of tensors and arrays, in offset
(serialization.py). The stream begins with an index (words of 8 bytes)::

    objects | buffers | per object: bytes of its data, number of its buffers | per buffer: bytes

and the data of the objects follow. The first bytes of the stream travel in a *block*: a head of some words
and as much of the stream as fits, so that small objects need one message of a size that all ranks know.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchestra.errors import UnpicklableObjectError
from torchestra.tensors.serialization import OutOfBand, deserialize, serialize

BLOCK_BYTES = 1024
_HEAD = struct.Struct("4q")
_COUNTS = struct.Struct("2q")  # with which the index begins
_INLINE_BYTES = BLOCK_BYTES - _HEAD.size
# Below, a copy costs less than an operation for this buffer alone.
_LARGE_BYTES = 32 << 10
_MAX_REASON = 400  # characters of the error of pickling


class Head(NamedTuple):
    """Describe, at the beginning of a block, the data that follow.

    Attributes:
        failed: 1 if the sender could not pickle its objects; the stream then holds the reason.
        stream: bytes of the stream.
        buffers: how many buffers come.
        more: if objects for several ranks are sent together, 1 if the stream of any of them goes on after its
            block, plus twice the largest number of buffers of any.
    """

    failed: int
    stream: int
    buffers: int
    more: int = 0


@dataclass
class PackedObjects:
    """Hold objects that are being sent or received.

    Attributes:
        stream, buffers: see above.
        failed: whether the sender could not pickle its objects; the stream then holds the reason.
    """

    stream: bytearray
    buffers: list[torch.Tensor]
    failed: bool = False

    @classmethod
    def of(cls, objects: Sequence[object], name: str = "") -> PackedObjects:
        """Pack objects. The buffers are their own memory.

        Args:
            objects: the objects.
            name: of the function that is to send them, for messages.

        Raises:
            UnpicklableObjectError: one cannot be pickled.
        """
        data, buffers, sizes = list[bytes](), list[torch.Tensor](), list[int]()
        for number, item in enumerate(objects):
            try:
                pieces, outside = serialize(item, exact=True).pack(inline_below=_LARGE_BYTES)
            except Exception as error:
                which = f"object {number} of {len(objects)}" if len(objects) > 1 else "the object"
                raise UnpicklableObjectError(
                    f"{name}: {which}, of type {type(item).__name__}, cannot be pickled:"
                    f" {one_line(error)}; no object was moved"
                ) from error
            data += pieces
            buffers += map(_as_tensor, outside)
            sizes += (sum(map(len, pieces)), len(outside))
        index = [len(objects), len(buffers), *sizes, *(buffer.numel() for buffer in buffers)]
        return cls(bytearray().join((struct.pack(f"{len(index)}q", *index), *data)), buffers)

    @classmethod
    def failure(cls, reason: BaseException) -> PackedObjects:
        """Make the message that is sent in offset of objects that could not be pickled."""
        return cls(bytearray(one_line(reason).encode()[:_INLINE_BYTES]), [], failed=True)

    @property
    def has_rest(self) -> bool:
        """Return whether a part of the stream is not in the block."""
        return len(self.stream) > _INLINE_BYTES

    @property
    def rest(self) -> torch.Tensor:
        """Return the part of the stream that is not in the block; may be empty."""
        if not self.has_rest:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.stream, dtype=torch.uint8, offset=_INLINE_BYTES)

    def block(self, more: int = 0) -> torch.Tensor:
        """Return the first bytes to be sent."""
        block = bytearray(BLOCK_BYTES)
        _HEAD.pack_into(block, 0, self.failed, len(self.stream), len(self.buffers), more)
        inline = self.stream[:_INLINE_BYTES]
        block[_HEAD.size : _HEAD.size + len(inline)] = inline
        return torch.frombuffer(block, dtype=torch.uint8)

    @classmethod
    def arriving(cls, block: torch.Tensor) -> tuple[PackedObjects, Head]:
        """Begin to receive objects whose block has come; the caller fills ``rest``, then the buffers."""
        return cls.all_arriving(block)[0]

    @classmethod
    def all_arriving(cls, blocks: torch.Tensor) -> list[tuple[PackedObjects, Head]]:
        """Do as :meth:`arriving` for several blocks, one after the other in a tensor."""
        memory, found = blocks.numpy().data.cast("B"), []
        for start in range(0, len(memory), BLOCK_BYTES):
            head = Head(*_HEAD.unpack_from(memory, start))
            first, inline = start + _HEAD.size, min(head.stream, _INLINE_BYTES)
            stream = bytearray(head.stream)
            stream[:inline] = memory[first : first + inline]
            found.append((cls(stream, [], bool(head.failed)), head))
        return found

    def expect_buffers(self) -> list[torch.Tensor]:
        """Make room for the buffers, now that the whole stream is here."""
        if self:
            *_, lengths = self._index()
            self.buffers = [torch.empty(length, dtype=torch.uint8) for length in lengths]
        return self.buffers

    @property
    def reason(self) -> str:
        """Return why it failed."""
        return self.stream.decode(errors="replace")

    def __bool__(self) -> bool:
        """Return whether anything came; in a fake world nothing does."""
        return bool(self.stream)

    def objects(self) -> list[object]:
        """Return the objects, each an :class:`Unreadable` where it cannot be unpickled."""
        offset, sizes, _ = self._index()
        memory, used, found = memoryview(self.stream), 0, []
        for length, count in zip(sizes[::2], sizes[1::2], strict=True):
            own = [buffer.untyped_storage() for buffer in self.buffers[used : used + count]]
            try:
                found.append(deserialize(memory[offset : offset + length], own))
            except Exception as error:
                found.append(Unreadable(error))
            offset, used = offset + length, used + count
        return found

    def _index(self) -> tuple[int, Sequence[int], Sequence[int]]:
        """Return where the data begin, what the index says of each object, and the buffers' lengths."""
        objects, buffers = _COUNTS.unpack_from(self.stream)
        words = struct.unpack_from(f"{2 * objects + buffers}q", self.stream, _COUNTS.size)
        return _COUNTS.size + 8 * len(words), words[: 2 * objects], words[2 * objects :]


def one_line(error: BaseException) -> str:
    """Return the class and text of an exception, whatever its ``str`` does."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "?"
    text = f"{type(error).__name__}: {text}".encode(errors="backslashreplace").decode()
    return text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON - 1]}…"


class Unreadable:
    """Stand in for an object that could not be unpickled.

    Attributes:
        error: the error of unpickling.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


def _as_tensor(memory: OutOfBand) -> torch.Tensor:
    storage, first, length = memory
    return torch.empty(0, dtype=torch.uint8).set_(storage, first, (length,), (1,))
