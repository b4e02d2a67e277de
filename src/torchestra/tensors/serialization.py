"""Python objects as tensors of bytes, and back.

Objects are pickled (protocol 5). The memory of large tensors and arrays on the CPU is not copied into the
pickle but travels beside it, as buffers of their own: they are sent from where they are and received into
where they will be. Tensors that share memory in an object share it again afterwards.

A parcel is *a stream and buffers*. The stream begins with an index (words of 8 bytes)::

    objects | buffers | per object: bytes of its pickle, number of its buffers | per buffer: bytes

and the pickles follow. For the way, the first bytes of the stream go into a *block*: a head of some words and
as much of the stream as fits, so that small objects need one message of a size that all ranks know.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

import numpy as np
import torch

from torchestra.errors import UnpicklableObjectError
from torchestra.tensors.contiguity import check_memory, check_storage

BLOCK_BYTES = 1024
_HEAD_WORDS = 4
_INLINE_BYTES = BLOCK_BYTES - 8 * _HEAD_WORDS
# Below, a copy costs less than an operation for this buffer alone.
_LARGE_BYTES = 32 << 10
_MOST_TOLD = 400  # characters of what pickling has raised
# The attribute by which exported memory knows the tensor that it belongs to.
_TENSOR = "tensor"


class Head(NamedTuple):
    """What a block says first: whether there is anything, and what comes after the block.

    Attributes:
        failed: 1 where the sender could not pickle its objects; the stream says why.
        stream: bytes of the stream.
        buffers: how many buffers come.
        more: where parcels for several ranks go out together, 1 if the stream of any of them goes on after
            its block, plus twice the most buffers that any of them has.
    """

    failed: int
    stream: int
    buffers: int
    more: int = 0


@dataclass
class Parcel:
    """Some objects on their way."""

    stream: torch.Tensor
    buffers: list[torch.Tensor]
    failed: bool = False

    @classmethod
    def of(cls, objects: Sequence[object], name: str = "") -> Parcel:
        """Pack objects. The buffers are their own memory.

        Args:
            objects: the objects.
            name: of the function that is to send them, for messages.

        Raises:
            UnpicklableObjectError: one cannot be pickled.
        """
        buffers: list[torch.Tensor] = []
        pickles, counts = [], []
        for number, item in enumerate(objects):
            before = len(buffers)
            file = io.BytesIO()
            try:
                _Pickler(file, buffers).dump(item)
            except Exception as error:
                which = f"object {number} of {len(objects)}" if len(objects) > 1 else "the object"
                raise UnpicklableObjectError(
                    f"{name}: {which}, of type {type(item).__name__}, cannot be pickled:"
                    f" {one_line(error)}; no object was moved"
                ) from error
            pickles.append(file.getbuffer())
            counts.append(len(buffers) - before)
        lengths = [
            pair for pickled, count in zip(pickles, counts, strict=True) for pair in (len(pickled), count)
        ]
        index = np.array(
            [len(objects), len(buffers), *lengths, *(buffer.numel() for buffer in buffers)], dtype=np.int64
        )
        stream = torch.empty(index.nbytes + sum(map(len, pickles)), dtype=torch.uint8)
        memory = stream.numpy().data
        memory[: index.nbytes] = index.tobytes()
        place = index.nbytes
        for pickled in pickles:
            memory[place : place + len(pickled)] = pickled
            place += len(pickled)
        return cls(stream, buffers)

    @classmethod
    def failure(cls, reason: BaseException) -> Parcel:
        """In place of objects that could not be pickled."""
        text = one_line(reason).encode()[:_INLINE_BYTES]
        return cls(torch.frombuffer(bytearray(text), dtype=torch.uint8), [], failed=True)

    @property
    def rest(self) -> torch.Tensor:
        """The part of the stream that is not in the block; may be empty."""
        return self.stream[_INLINE_BYTES:]

    def block(self, more: int = 0) -> torch.Tensor:
        """The first bytes on the way."""
        head = Head(int(self.failed), self.stream.numel(), len(self.buffers), more)
        block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
        block[: 8 * _HEAD_WORDS] = torch.from_numpy(np.array(head, dtype=np.int64).view(np.uint8))
        inline = self.stream[:_INLINE_BYTES]
        block[8 * _HEAD_WORDS : 8 * _HEAD_WORDS + inline.numel()] = inline
        return block

    @classmethod
    def arriving(cls, block: torch.Tensor) -> tuple[Parcel, Head]:
        """A parcel whose block has come; its ``rest`` is to be filled, and then its buffers."""
        head = Head(*block[: 8 * _HEAD_WORDS].numpy().view(np.int64).tolist())
        stream = torch.empty(head.stream, dtype=torch.uint8)
        inline = stream[:_INLINE_BYTES]
        inline.copy_(block[8 * _HEAD_WORDS : 8 * _HEAD_WORDS + inline.numel()])
        return cls(stream, [], bool(head.failed)), head

    def expect_buffers(self) -> list[torch.Tensor]:
        """Make room for the buffers, now that the whole stream is here."""
        if self:
            objects, buffers = self._words(2)
            lengths = self._words(2 + 2 * objects + buffers)[2 + 2 * objects :]
            self.buffers = [torch.empty(length, dtype=torch.uint8) for length in lengths]
        return self.buffers

    @property
    def reason(self) -> str:
        """Why it failed."""
        return self.stream.numpy().tobytes().decode(errors="replace")

    def __bool__(self) -> bool:
        """Whether anything came: nobody sends in a fake world."""
        return self.stream.numel() > 0

    def objects(self) -> list[object]:
        """The objects, each an exception of class Unreadable where it cannot be unpickled."""
        objects, buffers = self._words(2)
        sizes = self._words(2 + 2 * objects)[2:]
        memory = self.stream.numpy().data
        place, used, found = 8 * (2 + 2 * objects + buffers), 0, []
        for length, count in zip(sizes[::2], sizes[1::2], strict=True):
            own = [_memory_of(buffer) for buffer in self.buffers[used : used + count]]
            try:
                found.append(pickle.loads(memory[place : place + length], buffers=own))
            except Exception as error:
                found.append(Unreadable(error))
            place, used = place + length, used + count
        return found

    def _words(self, number: int) -> list[int]:
        words: list[int] = self.stream[: 8 * number].numpy().view(np.int64).tolist()
        return words


def one_line(error: BaseException) -> str:
    """The class and text of an exception, whatever its ``str`` does."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "?"
    told = f"{type(error).__name__}: {text}".encode(errors="backslashreplace").decode()
    return told if len(told) <= _MOST_TOLD else f"{told[: _MOST_TOLD - 1]}…"


class Unreadable:
    """In place of an object that could not be unpickled.

    Attributes:
        error: why.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Pickler(pickle.Pickler):
    """Puts large memory aside instead of copying it, and small memory of tensors in without torch.save."""

    def __init__(self, file: io.BytesIO, buffers: list[torch.Tensor]) -> None:
        def keep(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < _LARGE_BYTES:
                return True  # into the pickle
            if isinstance(raw.obj, ctypes.Array):
                buffers.append(getattr(raw.obj, _TENSOR))
            else:
                memory = np.frombuffer(raw, dtype=np.uint8)
                # torch has no tensors that must not be written.
                buffers.append(torch.from_numpy(memory.copy() if raw.readonly else memory))
            return False

        super().__init__(file, 5, buffer_callback=keep)

    def reducer_override(self, item: object) -> Any:
        if isinstance(item, torch.Tensor):
            check_memory(item)
            return _with_typed_storage(item.__reduce_ex__(5))
        if isinstance(item, torch.storage.TypedStorage) and item._untyped_storage.device.type == "cpu":
            return _typed, (item._untyped_storage, item.dtype)
        if isinstance(item, torch.UntypedStorage) and item.device.type == "cpu":
            check_storage(item)
            tensor = torch.empty(0, dtype=torch.uint8).set_(item)
            return _untyped, (pickle.PickleBuffer(_memory_of(tensor)),)
        return NotImplemented


def _with_typed_storage(reduced: Any) -> Any:
    """What a tensor is pickled as. Of newer dtypes torch hands out a storage that it does not take back."""
    if not isinstance(reduced, tuple):
        return reduced
    function, arguments, *more = reduced
    if function is torch._utils._rebuild_tensor_v3:
        return function, (_typed(arguments[0], torch.uint8), *arguments[1:]), *more
    if function is torch._tensor._rebuild_from_type_v2:
        inner = _with_typed_storage((arguments[0], arguments[2]))
        return function, (inner[0], arguments[1], inner[1], *arguments[3:]), *more
    return reduced


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _untyped(memory: Union[bytearray, ctypes.Array[ctypes.c_uint8]]) -> torch.UntypedStorage:
    """A storage from what lay in the pickle, or from a buffer, whose memory it becomes."""
    if isinstance(memory, ctypes.Array):
        received: torch.Tensor = getattr(memory, _TENSOR)
        return received.untyped_storage()
    tensor = torch.empty(len(memory), dtype=torch.uint8)
    ctypes.memmove(tensor.data_ptr(), bytes(memory), len(memory))
    return tensor.untyped_storage()


def _memory_of(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_uint8]:
    """The memory of a tensor of bytes; it knows and keeps the tensor.

    (``tensor.numpy()`` would make its storage one that can never be resized.)
    """
    memory = (ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr())
    setattr(memory, _TENSOR, tensor)
    return memory
