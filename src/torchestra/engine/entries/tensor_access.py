"""Finds out how machine code reads torch's tensors, by comparing with what torch's methods say.

Most is public: torch.Tensor has DLPack's C exchange API (torch 2.10 on), whose function fills a DLTensor in
some 10 ns. Three things a DLTensor does not tell, and they lie in words of torch's own: the dispatch keys,
and the address and the length of the memory. Where those words are differs between versions of torch, so they
are searched in some tensors of which torch says what must be found, and everything is compared with torch's
methods over more tensors. If anything is not as expected, there are no entries, and the general way serves.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import profiler

from torchestra.engine.entry_layout import HEADER, VIEW_BYTES, VIEW_DIMENSIONS, Entry, TensorAccess

__all__ = ["access_to_tensors", "dtype_word", "why_not"]

_NAME = b"dlpack_exchange_api"
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_MAJOR = 1
_DESCRIBE = 40  # in the API's table: version, older versions, allocator, to and from owned tensors, this
_IMPLEMENTATION_WORDS, _STORAGE_WORDS = 24, 10


class _UnknownError(Exception):
    """Tensors are not as they are known to be."""


def _as_they_are(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Call a function without the program's modes, in which new tensors are fake or of another device.

    What it finds out is kept for the process.
    """

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return function(*args, **kwargs)

    return call


@functools.cache
@_as_they_are
def _found() -> tuple[TensorAccess | None, str]:
    try:
        return _find(), ""
    except _UnknownError as error:
        return None, str(error)


def access_to_tensors() -> TensorAccess | None:
    """Return how tensors are read; None if they cannot be by machine code."""
    return _found()[0]


def why_not() -> str:
    """Return why :func:`access_to_tensors` is None, for people; "" if it is not."""
    return _found()[1]


@functools.cache
@_as_they_are
def dtype_word(dtype: torch.dtype) -> int:
    """Return what a DLTensor has for a dtype: code, bits and lanes. 0 if it has nothing."""
    access = access_to_tensors()
    view = None if access is None else _described(access, torch.empty(1, dtype=dtype))
    return 0 if view is None else view[VIEW_DIMENSIONS // 8] >> 32


def _find() -> TensorAccess:
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise _UnknownError("this Python runs without the interpreter's lock, which excludes threads here")
    entry = Entry()
    if _words(id(entry), HEADER // 8 + 1)[HEADER // 8] != ctypes.addressof(entry):
        raise _UnknownError("objects of ctypes are laid out in an unknown way")
    access = TensorAccess(describe=_exchange_function())
    samples = [
        torch.ones(3),
        torch.ones(7, dtype=torch.int64)[2:],
        torch.nn.Parameter(torch.ones(2, 5)),
        torch.frombuffer(bytearray(88), dtype=torch.float64),  # whose memory belongs to another object
    ]
    keys, storages = [_keys(each) for each in samples], [each.untyped_storage() for each in samples]
    implementations = [each._cdata for each in samples]
    at = [each._cdata for each in storages]
    objects, words = map(id, samples), torch.Tensor.__basicsize__ // 8
    access.implementation = _find_word("TensorImpl", zip(objects, implementations, strict=True), words)
    for field, name, bases, values, words in (
        ("keys", "dispatch keys", implementations, keys, _IMPLEMENTATION_WORDS),
        ("storage", "StorageImpl", implementations, at, _IMPLEMENTATION_WORDS),
        ("data", "address", at, [each.data_ptr() for each in storages], _STORAGE_WORDS),
        ("nbytes", "length", at, [each.nbytes() for each in storages], _STORAGE_WORDS),
    ):
        setattr(access, field, _find_word(name, zip(bases, values, strict=True), words))
    with torch.inference_mode():
        access.optional = keys[0] & ~_keys(torch.ones(1))
    access.plain = keys[0]
    access.tensor, access.parameter, access.integer = torch.Tensor, torch.nn.Parameter, int
    access.list, access.none, access.false, access.true = list, None, False, True
    access.profiler, access.profiler_flag = vars(profiler), "_is_profiler_enabled"
    if vars(profiler).get("_is_profiler_enabled") not in (False, True):
        raise _UnknownError("torch does not say whether a profiler is on")
    access.modes = _modes_function()
    _compare(access)
    return access


def _modes_function() -> int:
    """Return the address of torch's function that says whether a dispatch mode is on; 0 if it is not known.

    Its argument says that modes of torch's own, for fake tensors and tracing, do not count.
    """
    try:
        function = ctypes.CDLL("libc10.so")["_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb"]
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _exchange_function() -> int:
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        raise _UnknownError(f"torch {torch.__version__} has no DLPack C exchange API (2.10 has)")
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    try:
        table = pointer(capsule, _NAME)
    except (TypeError, ValueError) as error:
        raise _UnknownError(f"torch's DLPack C exchange API is of another kind ({error})") from None
    major = ctypes.c_uint32.from_address(table).value
    function = _words(table, _DESCRIBE // 8 + 1)[_DESCRIBE // 8]
    if major != _MAJOR or not function:
        raise _UnknownError(f"DLPack is of version {major}, expected {_MAJOR}, or has no function for views")
    return function


def _words(address: int, number: int) -> list[int]:
    return list((ctypes.c_int64 * number).from_address(address))


def _keys(tensor: torch.Tensor) -> int:
    return int(torch._C._dispatch_keys(tensor).raw_repr())


def _find_word(name: str, pairs: Iterable[tuple[int, int]], words: int) -> int:
    """Return at which byte behind each address the value is that belongs to it."""
    indices = set(range(words))
    for address, value in pairs:
        found = _words(address, words)
        indices &= {index for index in indices if found[index] == value}
    if len(indices) != 1:
        raise _UnknownError(
            f"torch {torch.__version__} has its {name} in {len(indices)} places, expected one"
        )
    return indices.pop() * 8


def _described(access: TensorAccess, tensor: torch.Tensor) -> list[int] | None:
    """Return the DLTensor of a tensor; None if torch refuses."""
    function: Callable[[Any, Any], int] = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
        access.describe
    )
    view = (ctypes.c_int64 * (VIEW_BYTES // 8))()
    try:
        failed = function(tensor, ctypes.addressof(view))
    except (RuntimeError, BufferError, ValueError, TypeError):
        return None
    return None if failed else list(view)


def _compare(access: TensorAccess) -> None:
    """Refuse if what is read of some tensors is not what torch's methods say."""
    base = torch.arange(24.0)
    complex_ones = torch.ones(1, dtype=torch.complex64)
    for tensor, plain in (
        (base, True),
        (base.view(2, 3, 4), True),
        (base[5:7], True),
        (base.view(4, 6).t(), True),
        (torch.ones((), dtype=torch.bool), True),
        (torch.ones(1, dtype=torch.bfloat16, requires_grad=True), True),
        (torch._neg_view(base), False),
        (complex_ones.conj().imag, False),
        (complex_ones.conj(), False),
        (torch._efficientzerotensor(3), False),
        (torch.empty(3, device="meta"), False),
    ):
        implementation = _word(id(tensor), access.implementation)
        keys, storage = (_word(implementation, offset) for offset in (access.keys, access.storage))
        if (keys | access.optional == access.plain) is not plain:
            raise _UnknownError(f"torch {torch.__version__} has other dispatch keys than are known")
        if not plain:
            continue
        whole, view = tensor.untyped_storage(), _described(access, tensor)
        memory = (_word(storage, access.data), _word(storage, access.nbytes))
        if view is None or memory != (whole.data_ptr(), whole.nbytes()):
            raise _UnknownError(f"torch {torch.__version__} lays out its storages in an unknown way")
        dimensions = tensor.dim()
        if (
            view[0] != tensor.data_ptr()
            or view[1] & 0xFFFF_FFFF != 1
            or view[2] & 0xFFFF_FFFF != dimensions
            or view[2] >> 40 & 0xFF != 8 * tensor.itemsize
            or _words(view[3], dimensions) != list(tensor.shape)
            or _words(view[4], dimensions) != list(tensor.stride())
            or view[5] != 0
        ):
            raise _UnknownError(f"torch {torch.__version__} describes its tensors in an unknown way")


def _word(address: int, offset: int) -> int:
    return ctypes.c_int64.from_address(address + offset).value
