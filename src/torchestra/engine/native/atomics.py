"""Numba intrinsics on raw addresses: atomic loads and stores, copies, and the processor's spin hint.

Every address is an integer that points into an arena (memory which several ranks share) or into a
tensor. A word that two ranks touch is only ever touched through the functions here, and each names its
ordering, so that the protocols above rely on the C11 memory model and not on x86:

- ``load_acquire`` / ``store_release``: what the writer wrote before the release is seen by a reader
  whose acquire saw it.
- ``store_ordered`` / ``load_ordered``: sequentially consistent. Needed only where a rank writes one word
  and then reads another that its peer writes and reads the other way round (see waiting.py).
- ``load`` / ``store``: plain, for words that only one rank writes, published by one of the above.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import platform

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

kernel = njit(nogil=True, error_model="numpy")
"""Compiles a function, which gives away the interpreter while it runs."""
short_kernel = njit(error_model="numpy")
"""Compiles a function that keeps the interpreter: it takes less time than to give it away."""

_I64 = ir.IntType(64)
_WORD = types.int64


def _word_pointer(builder, address):
    return builder.inttoptr(address, _I64.as_pointer())


def _atomic_load(ordering: str):
    def typed(typing_context, address):
        def generate(context, builder, signature, arguments):
            return builder.load_atomic(_word_pointer(builder, arguments[0]), ordering, 8)

        return _WORD(_WORD), generate

    return typed


def _atomic_store(ordering: str):
    def typed(typing_context, address, value):
        def generate(context, builder, signature, arguments):
            builder.store_atomic(arguments[1], _word_pointer(builder, arguments[0]), ordering, 8)
            return context.get_dummy_value()

        return types.void(_WORD, _WORD), generate

    return typed


load_acquire = intrinsic(_atomic_load("acquire"))
load_ordered = intrinsic(_atomic_load("seq_cst"))
store_release = intrinsic(_atomic_store("release"))
store_ordered = intrinsic(_atomic_store("seq_cst"))


@intrinsic
def fetch_add(typing_context, address, amount):
    """Add ``amount`` to the word, sequentially consistent, and return what it was."""

    def generate(context, builder, signature, arguments):
        pointer = _word_pointer(builder, arguments[0])
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return _WORD(_WORD, _WORD), generate


@intrinsic
def compare_exchange(typing_context, address, expected, desired):
    """Set the word to ``desired`` if it is ``expected``; return what it was, sequentially consistent."""

    def generate(context, builder, signature, arguments):
        pointer = _word_pointer(builder, arguments[0])
        pair = builder.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 0)

    return _WORD(_WORD, _WORD, _WORD), generate


@intrinsic
def load(typing_context, address):
    """Return the word, in no order with anything."""

    def generate(context, builder, signature, arguments):
        return builder.load(_word_pointer(builder, arguments[0]))

    return _WORD(_WORD), generate


@intrinsic
def store(typing_context, address, value):
    """Write the word, in no order with anything."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], _word_pointer(builder, arguments[0]))
        return context.get_dummy_value()

    return types.void(_WORD, _WORD), generate


_SPIN_HINT = {"x86_64": "llvm.x86.sse2.pause", "AMD64": "llvm.x86.sse2.pause"}.get(platform.machine())


@intrinsic
def spin_hint(typing_context):
    """Tell the processor that this is a spin loop (``pause`` on x86, ``isb`` on 64-bit ARM)."""

    def generate(context, builder, signature, arguments):
        void = ir.VoidType()
        if _SPIN_HINT:
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(void, []), _SPIN_HINT)
            builder.call(function, [])
        elif platform.machine() in ("aarch64", "arm64"):
            builder.asm(ir.FunctionType(void, []), "isb", "~{memory}", [], True)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def release_fence(typing_context):
    """Nothing that is stored later is seen before what was stored earlier. No instruction on x86."""

    def generate(context, builder, signature, arguments):
        builder.fence("release")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def counter(typing_context):
    """Return the processor's time counter (``rdtsc`` on x86, ``cntvct_el0`` on 64-bit ARM), or 0 elsewhere.

    Some 10 ns, against 24 of ``clock_gettime``. See clock.py for where it may be relied on.
    """

    def generate(context, builder, signature, arguments):
        if platform.machine() in ("x86_64", "AMD64"):
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_I64, []), "llvm.readcyclecounter"
            )
            return builder.call(function, [])
        if platform.machine() in ("aarch64", "arm64"):
            return builder.asm(ir.FunctionType(_I64, []), "mrs $0, cntvct_el0", "=r", [], True)
        return _I64(0)

    return _WORD(), generate


_LINE = ir.VectorType(ir.IntType(32), 16)


@intrinsic
def stream_line(typing_context, target, source):
    """Copy 64 bytes past the caches (non-temporal store); ``target`` must be a multiple of 64."""

    def generate(context, builder, signature, arguments):
        pointer = _LINE.as_pointer()
        value = builder.load(builder.inttoptr(arguments[1], pointer), align=1)
        stored = builder.store(value, builder.inttoptr(arguments[0], pointer), align=64)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(_WORD, _WORD), generate


@intrinsic
def stream_fence(typing_context):
    """Make earlier non-temporal stores visible before anything that is stored later."""

    def generate(context, builder, signature, arguments):
        if platform.machine() in ("x86_64", "AMD64"):
            void = ir.FunctionType(ir.VoidType(), [])
            function = cgutils.get_or_insert_function(builder.module, void, "llvm.x86.sse.sfence")
            builder.call(function, [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def call_reduction(typing_context, function, target, sources, number, count):
    """Call a reduction (see reductions.py) by its address."""

    def generate(context, builder, signature, arguments):
        prototype = ir.FunctionType(ir.VoidType(), [_I64] * 4)
        builder.call(builder.inttoptr(arguments[0], prototype.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(_WORD, _WORD, _WORD, _WORD, _WORD), generate


memcpy = types.ExternalFunction("memcpy", _WORD(_WORD, _WORD, _WORD))
clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, _WORD))
sched_yield = types.ExternalFunction("sched_yield", types.int32())
syscall = types.ExternalFunction("syscall", _WORD(_WORD, _WORD, _WORD, _WORD, _WORD, _WORD, _WORD))
