"""Serialize Python objects, with the memory of their tensors out of band.

Objects are pickled (protocol 5). In the pickle a tensor is its shape and the number of its storage; the
storages stand beside the pickle, each once, and tensors that share one share it again afterwards::

    count | per storage: first byte, bytes, offset | memory of the small storages | pickle

Small memory is copied into this data, since a copy costs less than a transfer. Large memory is *out of band*:
the sender moves it from where it is to where the receiver will use it.

Two callers have made different promises. *Exact* serialization (of objects that collectives move) keeps all
that torch pickles: attributes, devices, whole storages. The memory of objects that pickle themselves with
out-of-band buffers, as NumPy's arrays do, counts as a storage there. The other one (of remote calls) sends
values: of a storage only the range that its tensors reach; a large view that uses less than half of the range
it spans is copied first, and shares nothing; devices but the CPU are refused; arrays are copied, since
callers may change them at once.

What comes out are leaves: what autograd knew of a tensor stays behind, except ``requires_grad``.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import pickle
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from torchestra.tensors.contiguity import check_memory, check_storage

Reducer = Callable[[Any], Any]
"""Returns what ``__reduce__`` of an object would."""
OutOfBand = tuple[torch.UntypedStorage, int, int]
"""A storage, the first byte that is needed, and how many bytes are."""

OUT_OF_BAND, _INLINE = -1, -2  # places of storages; others are places in memory that both sides share
_COUNT = struct.Struct("=i")
_ENTRY = struct.Struct("=qqq")
_BUFFER = -1  # as the first byte: a buffer of an object that pickles itself
_ALIGNMENT = 16
_INLINE_BELOW = 1 << 14  # bytes: to copy so few twice is quicker than to send them apart
_WASTE_FROM = 1 << 13  # bytes: what a view spans, but does not use, is sent with it if it is less than that
# The common types by number: their names take longer to write and to look up than all else about a tensor.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
DTYPE_NUMBERS: dict[torch.dtype, int] = {dtype: code for code, dtype in enumerate(DTYPES)}
_COPYREG: dict[type, Reducer] = copyreg.dispatch_table
_thread = threading.local()  # .table while it pickles, .message while it unpickles


class Serialized:
    """A pickled object.

    Attributes:
        pickled: the pickle.
        storages: the storages that it needs: each, its first byte needed (or -1, see above), and the last.
    """

    __slots__ = ("_numbers", "pickled", "storages")

    def __init__(self) -> None:
        self.pickled = b""
        self.storages: list[tuple[torch.UntypedStorage, int, int]] = []
        self._numbers: dict[int, int] = {}

    def number(self, storage: torch.UntypedStorage, begin: int, end: int) -> int:
        """Return the number of a storage of which these bytes are needed."""
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self.storages)
            self.storages.append((storage, begin, end))
        elif (reach := self.storages[number])[1] > begin or reach[2] < end:
            _, first, last = reach
            self.storages[number] = (storage, min(first, begin), max(last, end))
        return number

    def add_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Take the memory of an object that pickles itself; return whether it shall be in the pickle."""
        raw = buffer.raw()
        if raw.nbytes < _INLINE_BELOW:
            return True
        memory = np.frombuffer(raw, dtype=np.uint8)
        # torch has no tensors that must not be written.
        storage = torch.from_numpy(memory.copy() if raw.readonly else memory).untyped_storage()
        self.storages.append((storage, _BUFFER, raw.nbytes))
        return False

    def pack(
        self, share: Callable[[int, int], int] | None = None, inline_below: int = _INLINE_BELOW
    ) -> tuple[list[bytes], list[OutOfBand]]:
        """Return the data, in pieces, and the memory that is out of band.

        Args:
            share: given the address and length of large memory, puts it where the receiver finds it, and
                returns that offset, or -1 where it shall be out of band.
            inline_below: how many bytes are too many to be copied into the data.
        """
        table, inline = [_COUNT.pack(len(self.storages))], list[bytes]()
        outside = list[OutOfBand]()
        for storage, begin, end in self.storages:
            first = begin and max(begin, 0) // _ALIGNMENT * _ALIGNMENT
            length, offset = end - first, _INLINE
            if length < inline_below:
                inline.append(ctypes.string_at(storage.data_ptr() + first, length))
            else:
                offset = OUT_OF_BAND if share is None else share(storage.data_ptr() + first, length)
                if offset == OUT_OF_BAND:
                    outside.append((storage, first, length))
            table.append(_ENTRY.pack(begin if begin == _BUFFER else first, length, offset))
        return [*table, *inline, self.pickled], outside


class _DispatchTable(dict[type, Reducer]):
    """Choose the reduction of a type for a pickler: ours for tensors, then the caller's, then copyreg's."""

    __slots__ = ("_exact", "_number", "_takes")

    def __init__(self, result: Serialized, exact: bool, takes: Callable[[torch.Tensor], bool] | None) -> None:
        self._number = result.number
        self._exact = exact
        self._takes = takes
        self[torch.Tensor] = self._reduce_tensor
        self[torch.nn.Parameter] = self._reduce_parameter
        self[torch.UntypedStorage] = self._reduce_untyped
        self[torch.storage.TypedStorage] = self._reduce_typed

    def __missing__(self, kind: type) -> Reducer:
        return _reduce_subclass if issubclass(kind, torch.Tensor) else _COPYREG[kind]

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        exact = self._exact
        if not exact and tensor.device.type not in ("cpu", "meta"):
            raise TypeError(f"only CPU tensors can be sent, got one on {tensor.device}: call .cpu() first")
        check_memory(tensor)
        if self._takes is not None and tensor.requires_grad and self._takes(tensor):
            return _attached, (tensor.detach(),)
        if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.is_quantized:
            return _with_typed_storage((tensor if exact else tensor.detach()).__reduce_ex__(5))
        if exact:
            return self._reduce_exactly(tensor)
        data = tensor
        if tensor.is_conj() or tensor.is_neg():
            data = tensor.detach().resolve_conj().resolve_neg()
        shape, strides, size, count = tuple(data.shape), data.stride(), data.element_size(), data.numel()
        dtype = DTYPE_NUMBERS.get(data.dtype, data.dtype)
        if count == 0:
            return _empty, (dtype, shape, tensor.requires_grad)
        span = count
        if not data.is_contiguous():
            span = 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
            if span > 2 * count and span * size >= _WASTE_FROM:
                data = data.detach().contiguous()
                strides, span = data.stride(), count
        offset = int(data.storage_offset()) * size
        number = self._number(data.untyped_storage(), offset, offset + span * size)
        return _tensor, (number, dtype, shape, strides, offset, tensor.requires_grad)

    def _reduce_exactly(self, tensor: torch.Tensor) -> Any:
        """Reduce a strided tensor on the CPU, and keep its attributes and the whole storage."""
        if tensor.is_conj() or tensor.is_neg() or tensor.__dict__ or tensor._backward_hooks:
            return _with_typed_storage(tensor.__reduce_ex__(5))
        storage = tensor.untyped_storage()
        number = self._number(storage, 0, storage.nbytes())
        offset = int(tensor.storage_offset()) * tensor.element_size()
        dtype = DTYPE_NUMBERS.get(tensor.dtype, tensor.dtype)
        return _tensor, (number, dtype, tuple(tensor.shape), tensor.stride(), offset, tensor.requires_grad)

    def _reduce_parameter(self, parameter: torch.nn.Parameter) -> Any:
        if self._takes is not None and parameter.requires_grad and self._takes(parameter):
            return _attached, (parameter.detach(),)
        if self._exact and (parameter.__dict__ or parameter._backward_hooks or not parameter.is_cpu):
            return _reduce_subclass(parameter)
        return torch.nn.Parameter, (parameter.data, parameter.requires_grad)

    def _reduce_untyped(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu":
            if self._exact:
                return storage.__reduce__()
            raise TypeError(f"only CPU tensors can be sent, got a storage on {storage.device}")
        check_storage(storage)
        return _storage, (self._number(storage, 0, storage.nbytes()),)

    def _reduce_typed(self, storage: torch.storage.TypedStorage) -> Any:
        if self._exact and storage._untyped_storage.device.type != "cpu":
            return storage.__reduce__()
        return _typed, (storage._untyped_storage, storage.dtype)


def _reduce_subclass(tensor: torch.Tensor) -> Any:
    check_memory(tensor)
    return _with_typed_storage(tensor.__reduce_ex__(5))


def _with_typed_storage(reduced: Any) -> Any:
    """Mend what torch reduces a tensor to: of newer dtypes to a storage that it does not take back."""
    if not isinstance(reduced, tuple):
        return reduced
    function, arguments, *more = reduced
    if function is torch._utils._rebuild_tensor_v3:
        return function, (_typed(arguments[0], torch.uint8), *arguments[1:]), *more
    if function is torch._tensor._rebuild_from_type_v2:
        inner = _with_typed_storage((arguments[0], arguments[2]))
        return function, (inner[0], arguments[1], inner[1], *arguments[3:]), *more
    return reduced


# -- what pickles call to rebuild tensors


def _storage(number: int) -> torch.UntypedStorage:
    storage: torch.UntypedStorage = _thread.message[0][number]
    return storage


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _tensor(
    number: int,
    dtype: int | torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    grad: bool,
) -> torch.Tensor:
    storages, begins, _ = _thread.message
    dtype = DTYPES[dtype] if isinstance(dtype, int) else dtype
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(storages[number], (offset - begins[number]) // dtype.itemsize, shape, strides)
    return tensor.requires_grad_() if grad else tensor


def _empty(dtype: int | torch.dtype, shape: tuple[int, ...], grad: bool) -> torch.Tensor:
    dtype = DTYPES[dtype] if isinstance(dtype, int) else dtype
    return torch.empty(shape, dtype=dtype, requires_grad=grad)


def _attached(tensor: torch.Tensor) -> torch.Tensor:
    deserialization_context().attached.append(tensor)
    return tensor


# -- both ways


def serialize(
    item: object,
    *,
    exact: bool = False,
    reducers: Mapping[type, Reducer] | None = None,
    takes: Callable[[torch.Tensor], bool] | None = None,
) -> Serialized:
    """Pickle an object, and put the memory of its tensors and arrays aside.

    Args:
        exact: keep everything of tensors, see above.
        reducers: how objects of exactly these further types are pickled.
        takes: whether a tensor, which requires gradients, is to be appended to ``attached`` of the context
            that :func:`deserialize` is given.

    Raises:
        Exception: what pickling raised.
    """
    result, file = Serialized(), io.BytesIO()
    table = _DispatchTable(result, exact, takes)
    if reducers:
        table.update(reducers)
    pickler = pickle.Pickler(file, 5, buffer_callback=result.add_buffer if exact else None)
    pickler.dispatch_table = table
    before, _thread.table = getattr(_thread, "table", None), table
    try:
        pickler.dump(item)
    finally:
        _thread.table = before
        table.clear()  # its values are methods of its own, and it shall die without the garbage collector
    result.pickled = file.getvalue()
    return result


def reducer_in_progress(kind: type) -> Reducer | None:
    """Return how the pickle that this thread is making treats a type; None outside of one.

    For objects that pickle parts of themselves: these parts belong to the same message.
    """
    table: _DispatchTable | None = getattr(_thread, "table", None)
    return None if table is None else table.get(kind)


def deserialize(
    data: memoryview,
    out_of_band: Iterable[torch.UntypedStorage] = (),
    context: object = None,
    borrow: Callable[[int, int], torch.UntypedStorage] | None = None,
) -> Any:
    """Return the object of the data that :meth:`Serialized.pack` has made.

    Args:
        data: its data.
        out_of_band: the memory that was out of band, in the same order. Tensors and arrays lie in it.
        context: what :func:`deserialization_context` returns to functions that rebuild parts of it.
        borrow: returns the memory that was shared, for its offset and length.

    Raises:
        Exception: what unpickling raised.
    """
    (count,) = _COUNT.unpack_from(data)
    at = _COUNT.size + count * _ENTRY.size
    storages, begins, buffers, outside = [], [], [], iter(out_of_band)
    for begin, length, offset in _ENTRY.iter_unpack(data[_COUNT.size : at]):
        if offset == OUT_OF_BAND:
            storage = next(outside)
        elif offset == _INLINE:
            storage = torch.UntypedStorage(length)
            ctypes.memmove(storage.data_ptr(), bytes(data[at : at + length]), length)
            at += length
        else:
            assert borrow is not None
            storage = borrow(offset, length)
        storages.append(storage)
        begins.append(begin)
        if begin == _BUFFER:
            buffers.append(_memory_of(storage, length))
    before, _thread.message = getattr(_thread, "message", None), (storages, begins, context)
    try:
        return pickle.loads(data[at:], buffers=buffers)
    finally:
        _thread.message = before


def shared_offsets(data: memoryview) -> list[tuple[int, int]]:
    """Return where the memory is that both sides share, and how many bytes, of what deserialize() reads."""
    (count,) = _COUNT.unpack_from(data)
    entries = _ENTRY.iter_unpack(data[_COUNT.size : _COUNT.size + count * _ENTRY.size])
    return [(offset, length) for _, length, offset in entries if offset not in (OUT_OF_BAND, _INLINE)]


def deserialization_context() -> Any:
    """Return the context that :func:`deserialize`, which runs on this thread, was given."""
    return _thread.message[2]


def _memory_of(storage: torch.UntypedStorage, length: int) -> ctypes.Array[ctypes.c_uint8]:
    """Return the memory of a storage, which lives as long (``tensor.numpy()`` forbids to resize it)."""
    memory = (ctypes.c_uint8 * length).from_address(storage.data_ptr())
    setattr(memory, "storage", storage)  # noqa: B010
    return memory
