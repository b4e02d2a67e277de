"""Writes the machine code of the reductions (reductions.py): one function for each dtype and operation.

The loops are written as vectors of LLVM, not left to the auto-vectoriser: it would have to prove that
target and sources do not overlap, and in place they do.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import contextlib

from llvmlite import ir

from torchestra.engine.kernels.reduction_table import (
    AVG,
    BAND,
    BOR,
    BXOR,
    DIVIDE,
    ELEMENTS,
    MAX,
    MIN,
    PRODUCT,
    SCALE,
    SUM,
    SWAP_MODE,
    default_mode,
    functions,
    symbol,
)
from torchestra.engine.native.intrinsic_code import ARM, X86, call_intrinsic
from torchestra.engine.native.target import Target

_VECTOR_BYTES = 256
_WITH_OPERAND = (DIVIDE, SCALE)
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_VOID = ir.VoidType()
_REDUCTION = ir.FunctionType(_VOID, [_I64] * 4)


def write_reductions(module: ir.Module, target: Target) -> None:
    """Add all reductions, and the function that swaps the floating-point mode, to a module."""
    # Without such instructions LLVM would call functions that nothing provides. All of 64-bit ARM has them.
    half_by_integers = target.machine in X86 and not target.has("f16c")
    written = {}
    for dtype, operation in functions():
        element = ELEMENTS[dtype]
        loop = (element.kind, element.bits, element.parts, operation)
        if _ignores_sign(element, operation):
            loop = ("unsigned", *loop[1:])
        if loop not in written:
            written[loop] = _loop(module, element, operation, half_by_integers)
        function = ir.Function(module, _REDUCTION, symbol(dtype, operation))
        builder = ir.IRBuilder(function.append_basic_block())
        _call_in_default_mode(target.machine, builder, written[loop], function.args)
        builder.ret_void()
    _write_swap(module, target.machine)


def _ignores_sign(element, operation):
    return element.kind == "signed" and operation in (SUM, PRODUCT, BAND, BOR, BXOR)


def _loop(module, element, operation, half_by_integers):
    """Write the function that reduces in whatever mode the thread has."""
    function = ir.Function(module, _REDUCTION, module.get_unique_name("reduce_range"))
    function.linkage = "internal"
    # Not a part of the caller, whose changes of the mode nothing in here may be moved across.
    function.attributes.add("noinline")
    _write_range(ir.IRBuilder(function.append_basic_block()), element, operation, half_by_integers)
    return function


def _write_swap(module, machine):
    """Write the function that sets the thread's floating-point mode, and returns what it was."""
    function = ir.Function(module, ir.FunctionType(_I64, [_I64]), SWAP_MODE)
    builder = ir.IRBuilder(function.append_basic_block())
    if machine not in X86 + ARM:
        builder.ret(function.args[0])
        return
    before = _read_mode(machine, builder)
    if before.type == _I64:
        _write_mode(machine, builder, function.args[0])
        builder.ret(before)
        return
    _write_mode(machine, builder, builder.trunc(function.args[0], before.type))
    builder.ret(builder.zext(before, _I64))


@contextlib.contextmanager
def _count(builder, start, stop, step):
    """Write a loop: the block runs once, and gets the counter."""
    before = builder.block
    test, body, after = (builder.append_basic_block(name) for name in ("for", "do", "after"))
    builder.branch(test)
    builder.position_at_end(test)
    now = builder.phi(_I64)
    now.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", now, stop), body, after)
    builder.position_at_end(body)
    yield now
    now.add_incoming(builder.add(now, _I64(step)), builder.block)
    builder.branch(test)
    builder.position_at_end(after)


def _stored(element):
    if element.kind == "float":
        return ir.FloatType() if element.bits == 32 else ir.DoubleType()
    return ir.IntType(element.bits)


def _computed(element):
    return ir.FloatType() if element.kind in ("bfloat16", "float16") else _stored(element)


def _variable(builder, kind):
    """Return a place for a value, made once for all iterations of the loops around it."""
    with builder.goto_entry_block():
        return builder.alloca(kind)


def _write_range(builder, element, code, half_by_integers):
    """Write the body of a function of a target, sources, their number, and a count of elements."""
    target, sources, number, count = builder.function.args
    total = builder.mul(count, _I64(element.parts))
    lanes = _VECTOR_BYTES * 8 // element.bits
    whole = builder.and_(total, _I64(~(lanes - 1)))
    for start, stop, step in ((_I64(0), whole, lanes), (whole, total, 1)):
        with _count(builder, start, stop, step) as index:
            offset = builder.mul(index, _I64(element.bits // 8))
            _reduce_lanes(builder, element, code, step, target, sources, number, offset, half_by_integers)
    builder.ret_void()


def _read_mode(machine, builder):
    """Write code that returns the thread's floating-point mode: MXCSR on x86, FPCR on 64-bit ARM."""
    if machine not in X86:
        return call_intrinsic(builder, "llvm.aarch64.get.fpcr", _I64)
    word = _variable(builder, _I32)
    _mode_instruction(builder, "llvm.x86.sse.stmxcsr", word)
    return builder.load(word)


def _write_mode(machine, builder, mode):
    if machine not in X86:
        call_intrinsic(builder, "llvm.aarch64.set.fpcr", _VOID, mode)
        return
    word = _variable(builder, _I32)
    builder.store(mode, word)
    _mode_instruction(builder, "llvm.x86.sse.ldmxcsr", word)


def _mode_instruction(builder, name, word):
    call_intrinsic(builder, name, _VOID, builder.bitcast(word, ir.IntType(8).as_pointer()))


def _call_in_default_mode(machine, builder, function, arguments):
    """Call it in the default floating-point mode, and restore the thread's own. To write the mode is slow."""
    if machine not in X86 + ARM:
        builder.call(function, arguments)
        return
    default, mode_bits = default_mode(machine)
    mode = _read_mode(machine, builder)
    differs = builder.icmp_unsigned("!=", builder.and_(mode, mode.type(mode_bits)), mode.type(default))
    with builder.if_then(differs, likely=False):
        _write_mode(machine, builder, mode.type(default))
    builder.call(function, arguments)
    with builder.if_then(differs, likely=False):
        _write_mode(machine, builder, mode)


def _reduce_lanes(builder, element, operation, lanes, target, sources, number, offset, half_by_integers):
    """Emit the code that reduces ``lanes`` neighbouring elements at a byte offset."""

    def lanes_of(scalar):
        return scalar if lanes == 1 else ir.VectorType(scalar, lanes)

    stored, computed = lanes_of(_stored(element)), lanes_of(_computed(element))

    def pointer(address):
        return builder.inttoptr(builder.add(address, offset), stored.as_pointer())

    def source(index):
        entry = builder.gep(builder.inttoptr(sources, _I64.as_pointer()), [index])
        value = builder.load(pointer(builder.load(entry)), align=element.bits // 8)
        return _widen(builder, element, value, computed, half_by_integers)

    if operation in _WITH_OPERAND:
        result = source(_I64(0))
    else:
        total = _variable(builder, computed)
        builder.store(source(_I64(0)), total)
        with _count(builder, _I64(1), number, 1) as index:
            builder.store(_combine(builder, element, operation, builder.load(total), source(index)), total)
        result = builder.load(total)
    if operation in (AVG, DIVIDE):
        result = _divide(builder, element, result, number, lanes)
    if operation == SCALE:
        factor = builder.bitcast(number, ir.DoubleType())
        if _computed(element) != factor.type:
            factor = builder.fptrunc(factor, _computed(element))
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
        divisor = number if element.bits == 64 else builder.trunc(number, _stored(element))
        return (builder.sdiv if signed else builder.udiv)(value, _spread(builder, divisor, lanes))
    divisor = builder.sitofp(number, _computed(element))
    # By a power of two a product with the inverse, which is exact, has the same bits, in a third of the time.
    is_power = builder.icmp_unsigned("==", builder.and_(number, builder.sub(number, _I64(1))), _I64(0))
    quotient = _variable(builder, value.type)
    with builder.if_else(is_power) as (power, other):
        with power:
            inverse = builder.fdiv(_constant(divisor.type, 1.0), divisor)
            builder.store(builder.fmul(value, _spread(builder, inverse, lanes)), quotient)
        with other:
            builder.store(builder.fdiv(value, _spread(builder, divisor, lanes)), quotient)
    return builder.load(quotient)


def _spread(builder, scalar, lanes):
    """Return a vector of so many times the scalar; one lane is the scalar itself."""
    if lanes == 1:
        return scalar
    kind = ir.VectorType(scalar.type, lanes)
    vector = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))
