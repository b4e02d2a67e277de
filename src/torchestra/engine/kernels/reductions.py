"""The arithmetic: for each dtype and reduce operation one compiled function over any number of sources.

A reduction has the C signature ``void(target*, sources**, number, count)``: element ``i`` of the target
becomes ``((s0[i] + s1[i]) + s2[i]) + …`` over ``number`` sources, in that order, however the whole was
cut into ranges. This fixed order is what makes results bit-identical on every rank and from run to run.
The target may be one of the sources, element for element.

float16 and bfloat16 are widened to float32, combined there, and rounded once (to nearest even) at the
end. bool SUM is "or", PRODUCT is "and", and any byte but 0 is read as True. AVG divides the sum by
``number``; integers truncate towards zero. MIN and MAX hand on a NaN.

Two more operations have one source, and ``number`` is their operand: DIVIDE is the last step of AVG, SCALE
multiplies by the float64 of those bits, rounded to the type that is computed in.

All compute in the default floating-point mode (round to nearest, denormal numbers kept), whatever mode the
calling thread is in, and leave the thread's mode as it was: the mode is per thread, and which thread runs an
operation is chance.

All are compiled with the kernels (reduction_code.py), which call them by their addresses, so that a kernel
is compiled once and not once per dtype.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import struct
from collections.abc import Iterator, Sequence

import torch

from torchestra.engine.kernels.reduction_table import (
    DIVIDE,
    ELEMENTS,
    NAMES,
    SCALE,
    SUM,
    SWAP_MODE,
    default_mode,
    symbol,
)
from torchestra.engine.native.kernel import address_in_object
from torchestra.types import ReduceOp

_MACHINE = platform.machine()
_HAS_MODE = _MACHINE in ("x86_64", "AMD64", "aarch64", "arm64")
_DEFAULT_MODE, _ = default_mode(_MACHINE)
# PREMUL_SUM multiplies before it sends and then is a SUM.
_OPERATION = {"PREMUL_SUM": SUM} | {name: code for code, name in enumerate(NAMES)}


def supports(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Return whether values of the dtype can be combined by the operation."""
    element = ELEMENTS.get(_name(dtype))
    if element is None or (op.name == "PREMUL_SUM" and element.kind in ("bool", "signed", "unsigned")):
        return False
    return _OPERATION[op.name] in element.operations


def reduction(dtype: torch.dtype, op: ReduceOp) -> int:
    """Return the address of the compiled function for a dtype and operation that :func:`supports` accepts."""
    return _function(dtype, _OPERATION[op.name])


@functools.cache
def _function(dtype: torch.dtype, operation: int) -> int:
    return address_in_object(symbol(_name(dtype), operation))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_REDUCTION = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


def combine(dtype: torch.dtype, op: ReduceOp, target: int, sources: Sequence[int], count: int) -> None:
    """Reduce ``count`` elements at the addresses ``sources``, of this process, into those at ``target``."""
    addresses = (ctypes.c_int64 * len(sources))(*sources)
    _REDUCTION(reduction(dtype, op))(target, ctypes.addressof(addresses), len(sources), count)


def combine_tensors(target: torch.Tensor, sources: Sequence[torch.Tensor], op: ReduceOp) -> None:
    """Reduce contiguous tensors of this rank, as the kernels do: same order, same rounding."""
    addresses = [source.data_ptr() for source in sources]
    combine(target.dtype, op, target.data_ptr(), addresses, target.numel())


def divide(dtype: torch.dtype, address: int, number: int, count: int) -> None:
    """Divide ``count`` elements of this process by ``number``, in place, as AVG does."""
    _in_place(dtype, DIVIDE, address, number, count)


def scale(dtype: torch.dtype, address: int, factor: float, count: int) -> None:
    """Multiply ``count`` floating-point or complex elements of this process by ``factor``, in place."""
    (bits,) = struct.unpack("=q", struct.pack("=d", factor))
    _in_place(dtype, SCALE, address, bits, count)


def _in_place(dtype: torch.dtype, operation: int, address: int, operand: int, count: int) -> None:
    sources = (ctypes.c_int64 * 1)(address)
    _REDUCTION(_function(dtype, operation))(address, ctypes.addressof(sources), operand, count)


@contextlib.contextmanager
def default_float_mode() -> Iterator[None]:
    """Have this thread round to nearest and keep denormal numbers while the block runs.

    For arithmetic of torch's whose results must not depend on which thread of a rank comes to do it. (Threads
    that torch itself may start for it are not reached.) Not to be held open over a wait.
    """
    if not _HAS_MODE:
        yield
        return
    swap = _SWAP(address_in_object(SWAP_MODE))
    before = swap(_DEFAULT_MODE)
    try:
        yield
    finally:
        swap(before)


_SWAP = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
