"""The machine code of the intrinsic operations (atomics.py): each has a function that writes it for LLVM."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

__all__ = ["ARM", "X86", "call_intrinsic", "names", "write"]

X86, ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")

_I64, _VOID = ir.IntType(64), ir.VoidType()
_LINE = ir.VectorType(ir.IntType(32), 16)


def write(machine: str, builder: Any, name: str, words: list[Any]) -> Any:
    """Write an operation for a processor (``platform.machine()``); return its result, None if it has none."""
    return _CODE[name](machine, builder, *words)


def names() -> set[str]:
    """Return the names of all operations."""
    return set(_CODE)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


def call_intrinsic(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Write the call of a function of LLVM's own, which is one instruction or a few."""
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [each.type for each in arguments])
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


def _load(ordering: str) -> Callable[..., Any]:
    return lambda _, builder, address: builder.load_atomic(_pointer(builder, address), ordering, 8)


def _store(ordering: str) -> Callable[..., None]:
    def store(_: str, builder: Any, address: Any, value: Any) -> None:
        builder.store_atomic(value, _pointer(builder, address), ordering, 8)

    return store


def _fence(ordering: str) -> Callable[..., None]:
    def fence(_: str, builder: Any) -> None:
        builder.fence(ordering)

    return fence


def _plain_store(_: str, builder: Any, address: Any, value: Any) -> None:
    builder.store(value, _pointer(builder, address))


def _fetch_add(_: str, builder: Any, address: Any, amount: Any) -> Any:
    return builder.atomic_rmw("add", _pointer(builder, address), amount, "seq_cst")


def _compare_exchange(_: str, builder: Any, address: Any, expected: Any, desired: Any) -> Any:
    pair = builder.cmpxchg(_pointer(builder, address), expected, desired, "seq_cst", "seq_cst")
    return builder.extract_value(pair, 0)


def _spin_hint(machine: str, builder: Any) -> None:
    if machine in X86:
        call_intrinsic(builder, "llvm.x86.sse2.pause", _VOID)
    elif machine in ARM:
        call_intrinsic(builder, "llvm.aarch64.isb", _VOID, ir.IntType(32)(15))


def _counter(machine: str, builder: Any) -> Any:
    if machine in X86:
        return call_intrinsic(builder, "llvm.readcyclecounter", _I64)
    if machine in ARM:
        register = builder.module.add_metadata([ir.MetaDataString(builder.module, "cntvct_el0")])
        return call_intrinsic(builder, "llvm.read_volatile_register.i64", _I64, register)
    return _I64(0)


def _stream_line(_: str, builder: Any, target: Any, source: Any) -> None:
    pointer = _LINE.as_pointer()
    value = builder.load(builder.inttoptr(source, pointer), align=1)
    stored = builder.store(value, builder.inttoptr(target, pointer), align=64)
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))


def _stream_fence(machine: str, builder: Any) -> None:
    if machine in X86:
        call_intrinsic(builder, "llvm.x86.sse.sfence", _VOID)
    else:
        builder.fence("seq_cst")


def _call_function(_: str, builder: Any, function: Any, *words: Any) -> Any:
    prototype = ir.FunctionType(_I64, [_I64] * 2)
    return builder.call(builder.inttoptr(function, prototype.as_pointer()), words)


def _call_reduction(_: str, builder: Any, function: Any, *words: Any) -> None:
    prototype = ir.FunctionType(_VOID, [_I64] * 4)
    builder.call(builder.inttoptr(function, prototype.as_pointer()), words)


_CODE: dict[str, Callable[..., Any]] = {
    "load": lambda _, builder, address: builder.load(_pointer(builder, address)),
    "load_acquire": _load("acquire"),
    "load_ordered": _load("seq_cst"),
    "store": _plain_store,
    "store_release": _store("release"),
    "store_ordered": _store("seq_cst"),
    "fetch_add": _fetch_add,
    "compare_exchange": _compare_exchange,
    "spin_hint": _spin_hint,
    "release_fence": _fence("release"),
    "full_fence": _fence("seq_cst"),
    "counter": _counter,
    "stream_line": _stream_line,
    "stream_fence": _stream_fence,
    "call_function": _call_function,
    "call_reduction": _call_reduction,
}
