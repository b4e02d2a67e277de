"""Plain calls and answers: numbers, texts and ordinary tensors, which take a fraction of the time of others.

They have no header, and are one pickle: a call that of the module and the name of a function and of its
arguments, an answer that of its value. In those of a kind of their own there are tensors; each stands there
as a tuple, which no number and no text is::

    number of the dtype | shape | requires_grad | elements

Elements are bytes, or in a shared buffer (shared_buffers.py), whose place is in the sender's heap. A place
below 0 is ``~offset`` in the receiver's: a buffer that it had shared itself comes back as it is.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import pickle
import sys
from types import FunctionType
from typing import Any

import torch

from torchestra.rpc.messages import BYTES_AT, Encoded
from torchestra.rpc.shared_buffers import SHARE_FROM, OpenedBuffers, SharedBufferPool
from torchestra.tensors.serialization import DTYPE_NUMBERS, DTYPES
from torchestra.transport.message import Message

_PLAIN_TYPES = frozenset((bool, bytes, float, int, str, type(None)))
_TYPES = _PLAIN_TYPES | {torch.Tensor}
_TensorRecord = tuple[int, tuple[int, ...], bool, "bytes | int"]


def encode_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Encoded | None:
    """Return a PLAIN_CALL of a module's function with numbers and texts; None for any other call."""
    if kwargs or type(function) is not FunctionType or not _PLAIN_TYPES.issuperset(map(type, args)):
        return None
    module, name = function.__module__, function.__qualname__
    if getattr(sys.modules.get(module), name, None) is not function:
        return None
    text = pickle.dumps((module, name, args), 5)
    # As Encoded(...), which calls a function of Python; here and below.
    return tuple.__new__(Encoded, ([(id(text) + BYTES_AT, len(text))], text, None))


def encode_value(value: object) -> Encoded | None:
    """Return a PLAIN_ANSWER that is None, a number or a text; None for any other value."""
    if type(value) not in _PLAIN_TYPES:
        return None
    text = pickle.dumps(value, 5)
    return tuple.__new__(Encoded, ([(id(text) + BYTES_AT, len(text))], text, None))


def encode_tensor_call(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    buffers: SharedBufferPool | None,
    taken: dict[int, None],
) -> Encoded | None:
    """Return a TENSOR_CALL: as :func:`encode_call`, but at least one argument is an ordinary tensor.

    Args:
        buffers: those that the worker called can open, if any.
        taken: where the buffers are noted that the tensors take.
    """
    if kwargs or type(function) is not FunctionType or not _TYPES.issuperset(map(type, args)):
        return None
    module, name = function.__module__, function.__qualname__
    if getattr(sys.modules.get(module), name, None) is not function:
        return None
    tensors = [each for each in args if type(each) is torch.Tensor]
    if not all(map(is_ordinary, tensors)):
        return None
    if len(tensors) > 1 and len({each.untyped_storage()._cdata for each in tensors}) < len(tensors):
        return None  # they shall share a storage there, too
    records = []
    for each in args:
        record = _record(each, buffers, taken) if type(each) is torch.Tensor else each
        if record is None and each is not None:
            return None
        records.append(record)
    return _encoded((module, name, records))


def encode_tensor(value: Any, buffers: SharedBufferPool | None, taken: dict[int, None]) -> Encoded | None:
    """Return a TENSOR_ANSWER that is an ordinary tensor; None for any other value."""
    if not is_ordinary(value):
        return None
    record = _record(value, buffers, taken)
    return None if record is None else _encoded(record)


def encode_returned(tensor: torch.Tensor, offset: int) -> Encoded:
    """Return a TENSOR_ANSWER that lies in a buffer of the receiver, at an offset in its heap."""
    return _encoded((DTYPE_NUMBERS[tensor.dtype], tuple(tensor.shape), tensor.requires_grad, ~offset))


def _encoded(content: object) -> Encoded:
    text = pickle.dumps(content, 5)
    return Encoded([(id(text) + BYTES_AT, len(text))], text, None)


def is_ordinary(value: Any) -> bool:
    """Return whether this is a tensor that its dtype, shape and elements say everything about."""
    tensor: torch.Tensor = value
    return (
        type(value) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype in DTYPE_NUMBERS
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.data_ptr() != 0
        and tensor.nbytes > 0
        and tensor.untyped_storage().nbytes() >= tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    )


def _record(
    tensor: torch.Tensor, buffers: SharedBufferPool | None, taken: dict[int, None]
) -> _TensorRecord | None:
    """Return what stands for an ordinary tensor; None for a large one if there are no shared buffers."""
    length = tensor.nbytes
    elements: bytes | int
    if length < SHARE_FROM:
        elements = ctypes.string_at(tensor.data_ptr(), length)
    elif buffers is not None:
        elements = buffers.share(tensor.data_ptr(), length, taken)
    else:
        return None
    return DTYPE_NUMBERS[tensor.dtype], tuple(tensor.shape), tensor.requires_grad, elements


def decode_call(message: Message) -> tuple[Any, tuple[Any, ...]]:
    """Return the function and the arguments of a PLAIN_CALL.

    Raises:
        MemoryError: there was no memory for the message.
        Exception: there is no such function here.
    """
    if message.lost is not None:
        raise message.lost
    module, name, args = pickle.loads(message.text)  # type: ignore[arg-type]
    try:
        return getattr(sys.modules[module], name), args
    except (KeyError, AttributeError):  # not imported yet, or about to be
        return getattr(importlib.import_module(module), name), args


def decode_value(message: Message) -> Any:
    """Return the value of a PLAIN_ANSWER.

    Raises:
        MemoryError: there was no memory for the message.
    """
    if message.lost is not None:
        raise message.lost
    return pickle.loads(message.text)  # type: ignore[arg-type]


def decode_tensor_call(
    message: Message, buffers: SharedBufferPool, source: int
) -> tuple[Any, tuple[Any, ...]]:
    """Return the function and the arguments of a TENSOR_CALL.

    Args:
        source: the local rank of the sender.

    Raises:
        MemoryError: there was no memory for the message, or for a tensor.
        Exception: there is no such function here.
    """
    function, args = decode_call(message)
    opened: OpenedBuffers = {}
    tensors = (_tensor(each, buffers, source, opened) if type(each) is tuple else each for each in args)
    return function, tuple(tensors)


def decode_tensor(
    message: Message, buffers: SharedBufferPool, source: int, opened: OpenedBuffers
) -> torch.Tensor:
    """Return the value of a TENSOR_ANSWER.

    Args:
        source: the local rank of the sender.
        opened: see :meth:`SharedBufferPool.open`.

    Raises:
        MemoryError: there was no memory for the message.
    """
    return _tensor(decode_value(message), buffers, source, opened)


def _tensor(
    record: _TensorRecord, buffers: SharedBufferPool, source: int, opened: OpenedBuffers
) -> torch.Tensor:
    number, shape, requires_grad, elements = record
    dtype = DTYPES[number]
    if isinstance(elements, bytes):
        tensor = torch.empty(shape, dtype=dtype)
        ctypes.memmove(tensor.data_ptr(), elements, len(elements))
    else:
        length = math.prod(shape) * dtype.itemsize
        owner, offset = (source, elements) if elements >= 0 else (buffers.rank, ~elements)
        tensor = torch.empty(0, dtype=dtype)
        tensor.set_(buffers.open(owner, offset, length, opened), 0, shape)  # type: ignore[call-overload]
    return tensor.requires_grad_() if requires_grad else tensor
