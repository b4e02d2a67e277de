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

The loops are written as vectors of LLVM, not left to the auto-vectoriser: it would have to prove that
target and sources do not overlap, and in place they do. A function is compiled when first
used and called from kernels by its address, so that a kernel is compiled once and not once per dtype.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import contextlib
import ctypes
import platform
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from torchestra.engine.native.compilation import compiled_function, compiling, undisturbed
from torchestra.types import ReduceOp

SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, DIVIDE, SCALE = range(10)
_ARITHMETIC = (SUM, AVG, PRODUCT, MIN, MAX)
_BITWISE = (BAND, BOR, BXOR)
_WITH_OPERAND = (DIVIDE, SCALE)
_VECTOR_BYTES = 256

_X86 = platform.machine() in ("x86_64", "AMD64")
_ARM = platform.machine() in ("aarch64", "arm64")
# MXCSR: all exceptions masked, and no other bit set but those that note exceptions, which are no mode.
_DEFAULT_MODE, _MODE_BITS = (0x1F80, 0xFFC0) if _X86 else (0, 0xFFFF_FFFF)

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_VOID = ir.VoidType()


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

_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "DIVIDE", "SCALE")
# PREMUL_SUM multiplies before it sends and then is a SUM.
_OPERATION = {"PREMUL_SUM": SUM} | {name: code for code, name in enumerate(_NAMES)}

# By what they are called in the notes of what is compiled.
_compiled: dict[str, Any] = {}
_compiling_here = threading.Lock()


def supports(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Return whether values of the dtype can be combined by the operation."""
    element = _ELEMENTS.get(dtype)
    if element is None or (op.name == "PREMUL_SUM" and element.kind in ("bool", "signed", "unsigned")):
        return False
    return _OPERATION[op.name] in element.operations


def reduction(dtype: torch.dtype, op: ReduceOp) -> int:
    """Return the address of the compiled function for a dtype and operation that :func:`supports` accepts."""
    return _function(dtype, _OPERATION[op.name])


def _function(dtype: torch.dtype, operation: int) -> int:
    signature = types.void(*[types.int64] * 4)
    name = f"reduction-{str(dtype)[6:]}-{_NAMES[operation]}"
    return _address(name, signature, lambda: _make(_DTYPES.index(dtype), operation))


def _address(name: str, signature: Any, make: Callable[[], Any]) -> int:
    """Return where the compiled form of a function is; ``make`` makes one that has not been compiled."""

    def compile_it() -> Any:
        with _compiling_here:
            if name not in _compiled:
                with compiling(name):
                    _compiled[name] = compiled_function(make(), signature)
            return _compiled[name]

    found = _compiled.get(name)
    return (undisturbed(compile_it) if found is None else found).address  # type: ignore[no-any-return]


_REDUCTION = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


def combine(dtype: torch.dtype, op: ReduceOp, target: int, sources: Sequence[int], count: int) -> None:
    """Reduce ``count`` elements at the addresses ``sources``, of this process, into those at ``target``."""
    addresses = (ctypes.c_int64 * len(sources))(*sources)
    _REDUCTION(reduction(dtype, op))(target, ctypes.addressof(addresses), len(sources), count)


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
    if not (_X86 or _ARM):
        yield
        return
    swap = _SWAP(_address("float-mode", types.int64(types.int64), lambda: _swap))
    before = swap(_DEFAULT_MODE)
    try:
        yield
    finally:
        swap(before)


_SWAP = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


def _swap(mode):
    return _swap_mode(mode)


@intrinsic
def _swap_mode(typing_context, mode):
    """Write the thread's floating-point mode; what it was."""

    def generate(context, builder, signature, arguments):
        before = _read_mode(builder)
        if before.type == _I64:
            _write_mode(builder, arguments[0])
            return before
        _write_mode(builder, builder.trunc(arguments[0], before.type))
        return builder.zext(before, _I64)

    return types.int64(types.int64), generate


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
        kind = ir.FunctionType(_VOID, [_I64] * 4)
        function = ir.Function(builder.module, kind, builder.module.get_unique_name("reduce_range"))
        function.linkage = "internal"
        # Not a part of the caller, whose changes of the mode nothing in here may be moved across.
        function.attributes.add("noinline")
        half_by_integers = _lacks_half(context)
        _write_range(ir.IRBuilder(function.append_basic_block()), element, code, half_by_integers)
        _call_in_default_mode(builder, function, arguments[2:])
        return context.get_dummy_value()

    return types.void(dtype, operation, *[types.int64] * 4), generate


def _write_range(builder, element, code, half_by_integers):
    """Write the body of a function of a target, sources, their number, and a count of elements."""
    target, sources, number, count = builder.function.args
    total = builder.mul(count, _I64(element.parts))
    lanes = _VECTOR_BYTES * 8 // element.bits
    whole = builder.and_(total, _I64(~(lanes - 1)))
    for start, stop, step in ((_I64(0), whole, lanes), (whole, total, 1)):
        with cgutils.for_range_slice(builder, start, stop, _I64(step), _I64) as (index, _):
            offset = builder.mul(index, _I64(element.bits // 8))
            _reduce_lanes(builder, element, code, step, target, sources, number, offset, half_by_integers)
    builder.ret_void()


def _read_mode(builder):
    """Return the thread's floating-point mode: MXCSR on x86, FPCR on 64-bit ARM."""
    if not _X86:
        return builder.asm(ir.FunctionType(_I64, []), "mrs $0, fpcr", "=r", [], True)
    word = cgutils.alloca_once(builder, _I32)
    _mode_instruction(builder, "llvm.x86.sse.stmxcsr", word)
    return builder.load(word)


def _write_mode(builder, mode):
    if not _X86:
        builder.asm(ir.FunctionType(_VOID, [_I64]), "msr fpcr, $0", "r,~{memory}", [mode], True)
        return
    word = cgutils.alloca_once(builder, _I32)
    builder.store(mode, word)
    _mode_instruction(builder, "llvm.x86.sse.ldmxcsr", word)


def _mode_instruction(builder, name, word):
    byte = ir.IntType(8).as_pointer()
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VOID, [byte]), name)
    builder.call(function, [builder.bitcast(word, byte)])


def _call_in_default_mode(builder, function, arguments):
    """Call it in the default floating-point mode, and restore the thread's own. To write the mode is slow."""
    if not (_X86 or _ARM):
        builder.call(function, arguments)
        return
    mode = _read_mode(builder)
    differs = builder.icmp_unsigned("!=", builder.and_(mode, mode.type(_MODE_BITS)), mode.type(_DEFAULT_MODE))
    with builder.if_then(differs, likely=False):
        _write_mode(builder, mode.type(_DEFAULT_MODE))
    builder.call(function, arguments)
    with builder.if_then(differs, likely=False):
        _write_mode(builder, mode)


def _lacks_half(context):
    """Return whether the processor that is compiled for cannot convert float16: LLVM would call
    functions for it
    that nothing here provides. All of 64-bit ARM can."""
    features = context.codegen().magic_tuple()[2]
    return _X86 and "+f16c" not in features.split(",")


def _reduce_lanes(builder, element, operation, lanes, target, sources, number, offset, half_by_integers):
    """Emit the code that reduces ``lanes`` neighbouring elements at a byte offset."""

    def lanes_of(scalar):
        return scalar if lanes == 1 else ir.VectorType(scalar, lanes)

    stored, computed = lanes_of(element.stored), lanes_of(element.computed)

    def pointer(address):
        return builder.inttoptr(builder.add(address, offset), stored.as_pointer())

    def source(index):
        entry = builder.gep(builder.inttoptr(sources, _I64.as_pointer()), [index])
        value = builder.load(pointer(builder.load(entry)), align=element.bits // 8)
        return _widen(builder, element, value, computed, half_by_integers)

    if operation in _WITH_OPERAND:
        result = source(_I64(0))
    else:
        total = cgutils.alloca_once(builder, computed)
        builder.store(source(_I64(0)), total)
        with cgutils.for_range_slice(builder, _I64(1), number, _I64(1), _I64) as (index, _):
            builder.store(_combine(builder, element, operation, builder.load(total), source(index)), total)
        result = builder.load(total)
    if operation in (AVG, DIVIDE):
        result = _divide(builder, element, result, number, lanes)
    if operation == SCALE:
        factor = builder.bitcast(number, ir.DoubleType())
        if element.computed != factor.type:
            factor = builder.fptrunc(factor, element.computed)
        result = builder.fmul(result, _spread(builder, factor, lanes))
    result = _narrow(builder, element, result, stored, half_by_integers)
    builder.store(result, pointer(target), align=element.bits // 8)


def _constant(kind, value):
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [value] * kind.count)
    return ir.Constant(kind, value)


def _like(kind, scalar):
    return ir.VectorType(scalar, kind.count) if isinstance(kind, ir.VectorType) else scalar


def _widen(builder, element, value, computed, half_by_integers):
    if element.kind == "bfloat16":
        words = _like(computed, _I32)
        return builder.bitcast(builder.shl(builder.zext(value, words), _constant(words, 16)), computed)
    if element.kind == "float16":
        if half_by_integers:
            return _from_half(builder, value, computed)
        return builder.fpext(builder.bitcast(value, _like(computed, ir.HalfType())), computed)
    if element.kind == "bool":
        return builder.zext(builder.icmp_unsigned("!=", value, _constant(value.type, 0)), value.type)
    return value


def _narrow(builder, element, value, stored, half_by_integers):
    if element.kind == "bfloat16":
        words = _like(stored, _I32)
        bits = builder.bitcast(value, words)
        odd = builder.and_(builder.lshr(bits, _constant(words, 16)), _constant(words, 1))
        rounded = builder.add(bits, builder.add(odd, _constant(words, 0x7FFF)))
        nan = builder.fcmp_unordered("uno", value, value)
        chosen = builder.select(nan, _constant(words, 0x7FC0_0000), rounded)
        return builder.trunc(builder.lshr(chosen, _constant(words, 16)), stored)
    if element.kind == "float16":
        if half_by_integers:
            return _to_half(builder, value, stored)
        return builder.bitcast(builder.fptrunc(value, _like(stored, ir.HalfType())), stored)
    return value


def _from_half(builder, value, computed):
    """float32 of the bits of float16, as VCVTPH2PS makes them."""
    words = _like(computed, _I32)

    def word(number):
        return _constant(words, number)

    bits = builder.zext(value, words)
    sign = builder.shl(builder.and_(bits, word(0x8000)), word(16))
    magnitude = builder.and_(bits, word(0x7FFF))
    shifted = builder.shl(magnitude, word(13))
    # The exponents of the two are 112 apart; denormal numbers become normal ones by the multiplication.
    finite = builder.bitcast(
        builder.fmul(builder.bitcast(shifted, computed), _constant(computed, 2.0**112)), words
    )
    infinite = builder.or_(shifted, word(0x7F80_0000))
    quiet = builder.or_(infinite, word(0x0040_0000))
    infinite = builder.select(builder.icmp_unsigned(">", magnitude, word(0x7C00)), quiet, infinite)
    chosen = builder.select(builder.icmp_unsigned("<", magnitude, word(0x7C00)), finite, infinite)
    return builder.bitcast(builder.or_(chosen, sign), computed)


def _to_half(builder, value, stored):
    """Return the bits of the float16 nearest to a float32, ties to even, as VCVTPS2PH makes them."""
    words = _like(stored, _I32)

    def word(number):
        return _constant(words, number)

    bits = builder.bitcast(value, words)
    sign = builder.and_(builder.lshr(bits, word(16)), word(0x8000))
    magnitude = builder.and_(bits, word(0x7FFF_FFFF))
    odd = builder.and_(builder.lshr(magnitude, word(13)), word(1))
    # The carry of the rounding may go on into the exponent, to infinity too.
    rounded = builder.add(magnitude, builder.add(odd, word((15 - 127 << 23) + 0xFFF)))
    normal = builder.lshr(rounded, word(13))
    # A denormal float16 counts units of 2**-24, the last place of a float32 that is 0.5 and more.
    half = _constant(value.type, 0.5)
    units = builder.bitcast(builder.fadd(builder.bitcast(magnitude, value.type), half), words)
    denormal = builder.sub(units, builder.bitcast(half, words))
    payload = builder.and_(builder.lshr(magnitude, word(13)), word(0x3FF))
    nan = builder.or_(payload, word(0x7E00))
    infinite = builder.select(builder.icmp_unsigned(">", magnitude, word(0x7F80_0000)), nan, word(0x7C00))
    finite = builder.select(builder.icmp_unsigned("<", magnitude, word(127 - 14 << 23)), denormal, normal)
    large = builder.icmp_unsigned(">=", magnitude, word(127 + 16 << 23))
    return builder.trunc(builder.or_(builder.select(large, infinite, finite), sign), stored)


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
    if element.kind in ("signed", "unsigned"):
        signed = element.kind == "signed"
        if element.bits < 32:
            # There may be more ranks than a narrow type can count. In float32 a quotient below a whole
            # number, of numbers of 16 bits, is rounded to less than that; and vectors of it are divided fast.
            divisor = _spread(builder, builder.sitofp(number, ir.FloatType()), lanes)
            dividend = (builder.sitofp if signed else builder.uitofp)(value, divisor.type)
            quotient = builder.fdiv(dividend, divisor)
            return (builder.fptosi if signed else builder.fptoui)(quotient, value.type)
        divisor = number if element.bits == 64 else builder.trunc(number, element.stored)
        return (builder.sdiv if signed else builder.udiv)(value, _spread(builder, divisor, lanes))
    return builder.fdiv(value, _spread(builder, builder.sitofp(number, element.computed), lanes))


def _spread(builder, scalar, lanes):
    """Return a vector of so many times the scalar; one lane is the scalar itself."""
    if lanes == 1:
        return scalar
    kind = ir.VectorType(scalar.type, lanes)
    vector = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))
