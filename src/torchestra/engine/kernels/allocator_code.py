"""The functions of torch's allocator that C++ calls, as machine code.

``DataPtr Allocator::allocate(size_t)`` returns, through a pointer that the caller gives, an address, the
function that frees it, that function's argument, and a device. Where there is no block (blocks.py), the
default allocator is *tail-called*: it runs as if it had been called itself, so the exceptions that it throws
when memory is short find no frame of ours on their way.

The argument is the address itself, as ``raw_allocate`` demands, by which oneDNN gets its buffers. They are
freed by ``raw_deallocate``, through the function that ``Allocator::raw_deleter()`` returns. So it is one
function for both, which frees a block if there is one at the address, and calls the default one if not.
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
    table_word = ir.GlobalVariable(program.module, _I64, blocks.TABLE_SYMBOL)
    table_word.initializer = _I64(0)
    free = ir.Function(program.module, _FREE, blocks.FREE_SYMBOL)
    builder = ir.IRBuilder(free.append_basic_block())
    table = builder.load(table_word)
    freed = builder.call(program.function(blocks.free_block), [table, *free.args])
    with builder.if_then(builder.icmp_signed("==", freed, _I64(0))):
        builder.call(builder.inttoptr(_word(builder, table, blocks.DELETER), _FREE.as_pointer()), free.args)
    builder.ret_void()

    deleter = ir.Function(program.module, ir.FunctionType(_FREE.as_pointer(), [_I64]), blocks.DELETER_SYMBOL)
    ir.IRBuilder(deleter.append_basic_block()).ret(free)

    allocate = ir.Function(program.module, _ALLOCATE, blocks.ALLOCATE_SYMBOL)
    made, allocator, length = allocate.args
    made.add_attribute("sret")
    builder = ir.IRBuilder(allocate.append_basic_block())
    entry = builder.call(program.function(blocks.take_block), [allocator, length])
    with builder.if_then(builder.icmp_signed("!=", entry, _I64(0)), likely=False):
        address = _word(builder, entry, blocks.ADDRESS)
        values = (address, free, address, _I16(blocks.CPU_DEVICE))
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
