"""What is said to another worker: pickles, with the memory of tensors beside them.

A tensor is pickled as its shape and the number of its storage; storages travel as parts of the message
(endpoint.py), each once, however many views of it there are, and only the range of it that these reach.
A large view that uses less than half of the range it spans is copied first, and shares nothing.

Received tensors are leaves: what autograd knew of them stays behind, but for ``requires_grad``. Within a
distributed autograd context those that require gradients are noted on both sides, and attached to its graph.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import pickle
import struct
import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch

from torchestra.rpc.shared_buffers import LEND_FROM, Lender
from torchestra.tensors.contiguity import check_memory, check_storage

# Of each storage: where in the sender's the received bytes begin, how many there are, and where in the heap
# of the sender they lie, or that they are a part of the message, or lie behind its table.
_RANGE = struct.Struct("=qqq")
_PART = -1
_WITHIN = -2
_WITHIN_BELOW = 1 << 14  # bytes: to copy so few twice is quicker than to send them apart
_HEAD = struct.Struct("=ii")  # how long the envelope is, how many storages there are
_WASTE_FROM = 1 << 13  # bytes: what a view spans, but does not use, is sent with it if it is less than that
_ALIGNMENT = 16
_reading = threading.local()
# The common types by number: their names take longer to write and to look up than all else about a tensor.
_DTYPES = (
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
_CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in enumerate(_DTYPES)}
_BYTES_AT = bytes.__basicsize__ - 1  # where in a bytes object its bytes begin; they end with a zero
_writing = threading.local()


class Outgoing:
    """A message to be sent.

    Attributes:
        parts: addresses and lengths, for the post office.
        text: the first part.
        keep: what the other addresses point into.
    """

    __slots__ = ("keep", "parts", "text")

    def __init__(self, parts: list[tuple[int, int]], text: bytes, keep: object = None) -> None:
        self.parts = parts
        self.text = text
        self.keep = keep


class _Storages:
    """The storages that a message needs, and the range of each."""

    __slots__ = ("kept", "ranges", "takes")

    def __init__(self, takes: Callable[[torch.Tensor], bool] | None) -> None:
        self.takes = takes
        self.kept: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self.ranges: list[list[int]] = []

    def number(self, storage: torch.UntypedStorage, begin: int, end: int) -> int:
        known = self.kept.get(storage._cdata)
        if known is None:
            number = len(self.ranges)
            self.kept[storage._cdata] = (number, storage)
            self.ranges.append([begin, end])
            return number
        number = known[0]
        reach = self.ranges[number]
        reach[0] = min(reach[0], begin)
        reach[1] = max(reach[1], end)
        return number

    def reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type not in ("cpu", "meta"):
            raise TypeError(f"only CPU tensors can be sent, got one on {tensor.device}: call .cpu() first")
        check_memory(tensor)
        if self.takes is not None and tensor.requires_grad and self.takes(tensor):
            return _attached, (tensor.detach(),)
        if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.is_quantized:
            return tensor.detach().__reduce_ex__(5)
        data = tensor
        if tensor.is_conj() or tensor.is_neg():
            data = tensor.detach().resolve_conj().resolve_neg()
        shape, strides, size, count = tuple(data.shape), data.stride(), data.element_size(), data.numel()
        dtype = _CODES.get(data.dtype, data.dtype)
        if count == 0:
            return _empty, (dtype, shape, tensor.requires_grad)
        span = count
        if not data.is_contiguous():
            span = 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
            if span > 2 * count and span * size >= _WASTE_FROM:
                data = data.detach().contiguous()
                strides, span = data.stride(), count
        offset = int(data.storage_offset())
        number = self.number(data.untyped_storage(), offset * size, (offset + span) * size)
        return _tensor, (number, dtype, shape, strides, offset * size, tensor.requires_grad)

    def reduce_parameter(self, parameter: torch.nn.Parameter) -> Any:
        if self.takes is not None and parameter.requires_grad and self.takes(parameter):
            return _attached, (parameter.detach(),)
        return _parameter, (parameter.data, parameter.requires_grad)

    def reduce_untyped(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu":
            raise TypeError(f"only CPU tensors can be sent, got a storage on {storage.device}")
        check_storage(storage)
        return _storage, (self.number(storage, 0, storage.nbytes()),)

    def reduce_typed(self, storage: torch.storage.TypedStorage) -> Any:
        return _typed, (storage._untyped_storage, storage.dtype)


def _received(number: int) -> tuple[torch.UntypedStorage, int]:
    storages, begins, _ = _reading.message
    return storages[number], begins[number]


def _tensor(
    number: int,
    dtype: int | torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    place: int,
    grad: bool,
) -> torch.Tensor:
    storage, begin = _received(number)
    dtype = _DTYPES[dtype] if isinstance(dtype, int) else dtype
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(storage, (place - begin) // dtype.itemsize, shape, strides)
    return tensor.requires_grad_() if grad else tensor


def _attached(tensor: torch.Tensor) -> torch.Tensor:
    being_read().attached.append(tensor)
    return tensor


def _empty(dtype: int | torch.dtype, shape: tuple[int, ...], grad: bool) -> torch.Tensor:
    dtype = _DTYPES[dtype] if isinstance(dtype, int) else dtype
    return torch.empty(shape, dtype=dtype, requires_grad=grad)


def _parameter(data: torch.Tensor, grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, grad)


def _storage(number: int) -> torch.UntypedStorage:
    return _received(number)[0]


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def encode(
    message: object,
    reducers: dict[type, Callable[[Any], Any]] | None = None,
    envelope: Callable[[], object] | None = None,
    lender: Lender | None = None,
    takes: Callable[[torch.Tensor], bool] | None = None,
) -> Outgoing:
    """Pickle an object and set the memory of its tensors aside.

    Args:
        reducers: how objects of further types are pickled.
        envelope: asked after that for something small that is read before the object, or for None.
        lender: where large memory is copied to.
        takes: whether a tensor, which requires gradients, is to be attached on the other side to the graph
            of a distributed autograd context.

    Raises:
        Exception: what pickling raised.
    """
    storages = _Storages(takes)
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5)
    pickler.dispatch_table = _DispatchTable(storages, reducers)
    before = getattr(_writing, "table", None)
    _writing.table = pickler.dispatch_table
    try:
        pickler.dump(message)
    finally:
        _writing.table = before
    outside = envelope() if envelope is not None else None
    wrapper = b"" if outside is None else pickle.dumps(outside, 5)
    ranges = storages.ranges
    if not ranges:
        text = _HEAD.pack(len(wrapper), 0) + wrapper + file.getvalue()
        return Outgoing([(address_of(text), len(text))], text)
    table = []
    within: list[bytes] = []
    parts = [(0, 0)]
    for reach, (_, storage) in zip(ranges, storages.kept.values(), strict=True):
        begin = reach[0] // _ALIGNMENT * _ALIGNMENT
        address, length, place = storage.data_ptr() + begin, reach[1] - begin, _PART
        if length < _WITHIN_BELOW:
            place = _WITHIN
            within.append(ctypes.string_at(address, length))
        elif lender is not None and length >= LEND_FROM:
            place = lender.lend(address, length)
        else:
            parts.append((address, length))
        table.append(_RANGE.pack(begin, length, place))
    text = b"".join((_HEAD.pack(len(wrapper), len(ranges)), wrapper, *table, *within, file.getvalue()))
    parts[0] = (address_of(text), len(text))
    return Outgoing(parts, text, storages.kept)


def encode_alone(value: object) -> Outgoing:
    """A value as a message without envelope or storages, which :mod:`pickle` alone reads again."""
    text = pickle.dumps(value, 5)
    return Outgoing([(address_of(text), len(text))], text)


_PLAIN = frozenset((bool, bytes, float, int, str, type(None)))
_NOTHING_AROUND = _HEAD.pack(0, 0)


def is_plain(function: object, args: tuple[Any, ...], kwargs: object) -> bool:
    """Whether a call has nothing in it that :func:`encode` treats in its own way."""
    if kwargs or type(function) is not FunctionType:
        return False
    return all(type(each) in _PLAIN for each in args)


def is_plain_value(value: object) -> bool:
    """Whether a result has nothing in it that :func:`encode` treats in its own way."""
    return type(value) in _PLAIN


def encode_plain(message: object) -> Outgoing:
    """:func:`encode`, several times as fast, for a plain call or for None, a number or a text."""
    text = _NOTHING_AROUND + pickle.dumps(message, 5)
    return Outgoing([(address_of(text), len(text))], text)


def address_of(text: bytes) -> int:
    """Where the bytes of a bytes object lie (in CPython, which numba needs as well)."""
    return id(text) + _BYTES_AT


class _DispatchTable(dict[type, Callable[[Any], Any]]):
    """How a pickler treats types: ours first, then what copyreg has been told."""

    def __init__(self, storages: _Storages, more: dict[type, Callable[[Any], Any]] | None) -> None:
        super().__init__(more or ())
        self[torch.Tensor] = storages.reduce_tensor
        self[torch.nn.Parameter] = storages.reduce_parameter
        self[torch.UntypedStorage] = storages.reduce_untyped
        self[torch.storage.TypedStorage] = storages.reduce_typed

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        registered = _registered.get(kind)
        return _COPYREG[kind] if registered is None else registered


_registered: dict[type, Callable[[Any], Any]] = {}


def register_reducer(kind: type, reducer: Callable[[Any], Any]) -> None:
    """Have objects of exactly that type be sent as ``reducer`` says, which returns what ``__reduce__`` would.

    Elsewhere they are pickled as ever. Must be called on every worker only if these send such objects.
    """
    _registered[kind] = reducer


def reducer_in_progress(kind: type) -> Callable[[Any], Any] | None:
    """How the message that this thread is pickling treats a type; None outside of one.

    For objects that pickle parts of themselves: these parts belong to the message.
    """
    table: _DispatchTable | None = getattr(_writing, "table", None)
    return None if table is None else table.get(kind)


_COPYREG: dict[type, Callable[[Any], Any]] = copyreg.dispatch_table


def open_envelope(text: Any) -> Any:
    """What :func:`encode` was given as envelope, or None."""
    length, _ = _HEAD.unpack_from(text)
    return pickle.loads(memoryview(text)[_HEAD.size : _HEAD.size + length]) if length else None


def decode(
    text: Any,
    storages: Sequence[torch.UntypedStorage],
    inside: object = None,
    borrow: Callable[[int, int], torch.UntypedStorage] | None = None,
) -> Any:
    """The object that :func:`encode` was given.

    Args:
        borrow: gets memory that was lent.
        inside: what :func:`being_read` tells the functions that rebuild parts of it.

    Raises:
        Exception: what unpickling raised.
    """
    length, count = _HEAD.unpack_from(text)
    place = _HEAD.size + length
    if not count and inside is None:
        return pickle.loads(memoryview(text)[place:])
    begins, found, parts = [], [], iter(storages)
    table, place = place, place + count * _RANGE.size
    for number in range(count):
        begin, length, where = _RANGE.unpack_from(text, table + number * _RANGE.size)
        begins.append(begin)
        if where == _PART:
            found.append(next(parts))
        elif where == _WITHIN:
            storage = torch.UntypedStorage(length)
            ctypes.memmove(storage.data_ptr(), bytes(memoryview(text)[place : place + length]), length)
            found.append(storage)
            place += length
        else:
            assert borrow is not None
            found.append(borrow(where, length))
    before = getattr(_reading, "message", None)
    _reading.message = (found, begins, inside)
    try:
        return pickle.loads(memoryview(text)[place:])
    finally:
        _reading.message = before


def being_read() -> Any:
    """What :func:`decode` was given as ``inside``, for what it calls."""
    return _reading.message[2]


def in_own_memory(outgoing: Outgoing) -> tuple[bytes, list[torch.UntypedStorage]]:
    """A copy of a message, as it would arrive elsewhere."""
    copies = []
    for address, length in outgoing.parts[1:]:
        copy = torch.UntypedStorage(length)
        ctypes.memmove(copy.data_ptr(), address, length)
        copies.append(copy)
    return outgoing.text, copies
