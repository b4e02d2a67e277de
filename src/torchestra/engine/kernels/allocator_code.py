"""The two functions of torch's allocator that C++ calls, as machine code.

``DataPtr Allocator::allocate(size_t)`` returns, through a pointer that the caller gives, an address, the
function that frees it, that function's argument, and a device. Where there is no block (blocks.py), the
default allocator is *tail-called*: it runs as if it had been called itself, so the exceptions that it throws
when memory is short find no frame of ours on their way.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

from llvmlite import ir

from torchestra.engine.kernels import blocks
from torchestra.engine.native.compiler import Program

__all__ = ["write_allocator"]

_I16, _I64, _VOID = ir.IntType(16), ir.IntType(64), ir.VoidType()
_FREE = ir.FunctionType(_VOID, [_I64])
_DATA_PTR = ir.LiteralStructType([_I64, _FREE.as_pointer(), _I64, _I16])
_ALLOCATE = ir.FunctionType(_VOID, [_DATA_PTR.as_pointer(), _I64, _I64])


def write_allocator(program: Program) -> None:
    """Add the functions to a program."""
    free = ir.Function(program.module, _FREE, blocks.FREE_SYMBOL)
    builder = ir.IRBuilder(free.append_basic_block())
    builder.call(program.function(blocks.give_block), free.args)
    builder.ret_void()

    allocate = ir.Function(program.module, _ALLOCATE, blocks.ALLOCATE_SYMBOL)
    made, allocator, length = allocate.args
    made.add_attribute("sret")
    builder = ir.IRBuilder(allocate.append_basic_block())
    entry = builder.call(program.function(blocks.take_block), [allocator, length])
    with builder.if_then(builder.icmp_signed("!=", entry, _I64(0)), likely=False):
        values = (_word(builder, entry, blocks.ADDRESS), free, entry, _I16(blocks.CPU_DEVICE))
        for field, value in enumerate(values):
            place = builder.gep(made, [ir.IntType(32)(0), ir.IntType(32)(field)])
            builder.store(value, place)
        builder.ret_void()
    default = _word(builder, allocator, blocks.DEFAULT)
    function = builder.inttoptr(_word(builder, allocator, blocks.ALLOCATE), _ALLOCATE.as_pointer())
    builder.call(function, [made, default, length], tail="musttail", arg_attrs={0: ("sret",)})
    builder.ret_void()


def _word(builder: Any, base: Any, offset: int) -> Any:
    return builder.load(builder.inttoptr(builder.add(base, _I64(offset)), _I64.as_pointer()))
