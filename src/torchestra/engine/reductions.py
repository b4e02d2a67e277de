"""The arithmetic: for each dtype and reduce operation one compiled function over any number of sources.

A reduction has the C signature ``void(target*, sources**, number, count)``: element ``i`` of the target
becomes ``((s0[i] + s1[i]) + s2[i]) + …`` over ``number`` sources, in that order, however the whole was
cut into ranges. This fixed order is what makes results bit-identical on every rank and from run to run.
The target may be one of the sources, element for element.

float16 and bfloat16 are widened to float32, combined there, and rounded once (to nearest even) at the
end. bool SUM is "or", PRODUCT is "and". AVG divides the sum by ``number``; integers truncate towards
zero. MIN and MAX hand on a NaN.

The loops are written as vectors of LLVM, not left to the auto-vectoriser: it would have to prove that
target and sources do not overlap, and in place they do. A function is compiled when first
used and called from kernels by its address, so that a kernel is compiled once and not once per dtype.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from torchestra.engine.compilation import compiling, undisturbed
from torchestra.types import ReduceOp

SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR = range(8)
_ARITHMETIC = (SUM, AVG, PRODUCT, MIN, MAX)
_BITWISE = (BAND, BOR, BXOR)
_VECTOR_BYTES = 256

_I64 = ir.IntType(64)


@dataclass(frozen=True)
class _Element:
    """How one dtype is stored and computed with. ``parts`` is 2 for complex: reduced part by part."""

    kind: str  # "float", "bfloat16", "float16", "signed", "unsigned", "bool"
    bits: int
    operations: tuple[int, ...]
    parts: int = 1

    @property
    def stored(self) -> ir.Type:
        if self.kind == "float":
            return ir.FloatType() if self.bits == 32 else ir.DoubleType()
        return ir.IntType(self.bits)

    @property
    def computed(self) -> ir.Type:
        return ir.FloatType() if self.kind in ("bfloat16", "float16") else self.stored


_ALL = _ARITHMETIC + _BITWISE
_ELEMENTS: dict[torch.dtype, _Element] = {
    torch.float32: _Element("float", 32, _ARITHMETIC),
    torch.float64: _Element("float", 64, _ARITHMETIC),
    torch.bfloat16: _Element("bfloat16", 16, _ARITHMETIC),
    torch.float16: _Element("float16", 16, _ARITHMETIC),
    torch.complex64: _Element("float", 32, (SUM, AVG), parts=2),
    torch.complex128: _Element("float", 64, (SUM, AVG), parts=2),
    torch.bool: _Element("bool", 8, (SUM, PRODUCT, MIN, MAX, *_BITWISE)),
    torch.int8: _Element("signed", 8, _ALL),
    torch.int16: _Element("signed", 16, _ALL),
    torch.int32: _Element("signed", 32, _ALL),
    torch.int64: _Element("signed", 64, _ALL),
    torch.uint8: _Element("unsigned", 8, _ALL),
    torch.uint16: _Element("unsigned", 16, _ALL),
    torch.uint32: _Element("unsigned", 32, _ALL),
    torch.uint64: _Element("unsigned", 64, _ALL),
}
_DTYPES = tuple(_ELEMENTS)

# PREMUL_SUM multiplies before it sends and then is a SUM.
_OPERATION = {"PREMUL_SUM": SUM} | {
    name: code for code, name in enumerate(("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"))
}

_addresses: dict[tuple[torch.dtype, int], int] = {}
_kept: list[Any] = []
_compiling_here = threading.Lock()


def supports(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Whether values of the dtype can be combined by the operation."""
    element = _ELEMENTS.get(dtype)
    if element is None or (op.name == "PREMUL_SUM" and element.kind in ("bool", "signed", "unsigned")):
        return False
    return _OPERATION[op.name] in element.operations


def reduction(dtype: torch.dtype, op: ReduceOp) -> int:
    """The address of the compiled function for a dtype and operation that :func:`supports` accepts."""
    key = (dtype, _OPERATION[op.name])
    address = _addresses.get(key)
    return undisturbed(lambda: _compiled(dtype, op)) if address is None else address


def _compiled(dtype: torch.dtype, op: ReduceOp) -> int:
    key = (dtype, _OPERATION[op.name])
    with _compiling_here:
        if key in _addresses:
            return _addresses[key]
        with compiling(f"reduction-{str(dtype)[6:]}-{op.name}"):
            compiled = cfunc(types.void(*[types.int64] * 4), cache=True, error_model="numpy")(
                _make(_DTYPES.index(dtype), key[1])
            )
        _kept.append(compiled)
        _addresses[key] = compiled.address
        return _addresses[key]


_REDUCTION = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


def combine(dtype: torch.dtype, op: ReduceOp, target: int, sources: Sequence[int], count: int) -> None:
    """Reduce ``count`` elements at the addresses ``sources``, of this process, into those at ``target``."""
    addresses = (ctypes.c_int64 * len(sources))(*sources)
    _REDUCTION(reduction(dtype, op))(target, ctypes.addressof(addresses), len(sources), count)


def _make(dtype, operation):
    # The two numbers are constants of the closure, and as such part of Numba's cache key.
    def reduce(target, sources, number, count):
        _reduce_range(dtype, operation, target, sources, number, count)

    return reduce


@intrinsic(prefer_literal=True)
def _reduce_range(typing_context, dtype, operation, target, sources, number, count):
    element = _ELEMENTS[_DTYPES[dtype.literal_value]]
    code = operation.literal_value

    def generate(context, builder, signature, arguments):
        _, _, target, sources, number, count = arguments
        total = builder.mul(count, _I64(element.parts))
        lanes = _VECTOR_BYTES * 8 // element.bits
        whole = builder.and_(total, _I64(~(lanes - 1)))
        for start, stop, step in ((_I64(0), whole, lanes), (whole, total, 1)):
            with cgutils.for_range_slice(builder, start, stop, _I64(step), _I64) as (index, _):
                offset = builder.mul(index, _I64(element.bits // 8))
                _reduce_lanes(builder, element, code, step, target, sources, number, offset)
        return context.get_dummy_value()

    return types.void(dtype, operation, *[types.int64] * 4), generate


def _reduce_lanes(builder, element, operation, lanes, target, sources, number, offset):
    """Emit the code that reduces ``lanes`` neighbouring elements at a byte offset."""

    def lanes_of(scalar):
        return scalar if lanes == 1 else ir.VectorType(scalar, lanes)

    stored, computed = lanes_of(element.stored), lanes_of(element.computed)

    def pointer(address):
        return builder.inttoptr(builder.add(address, offset), stored.as_pointer())

    def source(index):
        entry = builder.gep(builder.inttoptr(sources, _I64.as_pointer()), [index])
        value = builder.load(pointer(builder.load(entry)), align=element.bits // 8)
        return _widen(builder, element, value, computed)

    total = cgutils.alloca_once(builder, computed)
    builder.store(source(_I64(0)), total)
    with cgutils.for_range_slice(builder, _I64(1), number, _I64(1), _I64) as (index, _):
        builder.store(_combine(builder, element, operation, builder.load(total), source(index)), total)
    result = builder.load(total)
    if operation == AVG:
        result = _divide(builder, element, result, number, lanes)
    builder.store(_narrow(builder, element, result, stored), pointer(target), align=element.bits // 8)


def _constant(kind, value):
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [value] * kind.count)
    return ir.Constant(kind, value)


def _like(kind, scalar):
    return ir.VectorType(scalar, kind.count) if isinstance(kind, ir.VectorType) else scalar


def _widen(builder, element, value, computed):
    if element.kind == "bfloat16":
        words = _like(computed, ir.IntType(32))
        return builder.bitcast(builder.shl(builder.zext(value, words), _constant(words, 16)), computed)
    if element.kind == "float16":
        return builder.fpext(builder.bitcast(value, _like(computed, ir.HalfType())), computed)
    return value


def _narrow(builder, element, value, stored):
    if element.kind == "bfloat16":
        words = _like(stored, ir.IntType(32))
        bits = builder.bitcast(value, words)
        odd = builder.and_(builder.lshr(bits, _constant(words, 16)), _constant(words, 1))
        rounded = builder.add(bits, builder.add(odd, _constant(words, 0x7FFF)))
        nan = builder.fcmp_unordered("uno", value, value)
        chosen = builder.select(nan, _constant(words, 0x7FC0_0000), rounded)
        return builder.trunc(builder.lshr(chosen, _constant(words, 16)), stored)
    if element.kind == "float16":
        return builder.bitcast(builder.fptrunc(value, _like(stored, ir.HalfType())), stored)
    return value


def _combine(builder, element, operation, left, right):
    real = element.kind in ("float", "bfloat16", "float16")
    if element.kind == "bool":
        return {SUM: builder.or_, MAX: builder.or_, BOR: builder.or_, BXOR: builder.xor}.get(
            operation, builder.and_
        )(left, right)
    if operation in (SUM, AVG):
        return builder.fadd(left, right) if real else builder.add(left, right)
    if operation == PRODUCT:
        return builder.fmul(left, right) if real else builder.mul(left, right)
    if operation in (MIN, MAX):
        sign = "<" if operation == MIN else ">"
        if real:
            better = builder.fcmp_ordered(sign, right, left)
            return builder.select(
                builder.or_(better, builder.fcmp_unordered("uno", right, right)), right, left
            )
        compare = builder.icmp_signed if element.kind == "signed" else builder.icmp_unsigned
        return builder.select(compare(sign, right, left), right, left)
    return {BAND: builder.and_, BOR: builder.or_, BXOR: builder.xor}[operation](left, right)


def _divide(builder, element, value, number, lanes):
    scalar = value.type.element if lanes > 1 else value.type
    if element.kind in ("signed", "unsigned"):
        divisor = number if element.bits == 64 else builder.trunc(number, scalar)
    else:
        divisor = builder.sitofp(number, scalar)
    if lanes > 1:
        vector = builder.insert_element(ir.Constant(value.type, ir.Undefined), divisor, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
        divisor = builder.shuffle_vector(vector, vector, zeros)
    if element.kind == "signed":
        return builder.sdiv(value, divisor)
    if element.kind == "unsigned":
        return builder.udiv(value, divisor)
    return builder.fdiv(value, divisor)
