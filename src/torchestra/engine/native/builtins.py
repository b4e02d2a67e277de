"""Writes builtins, the functions that Python calls without a frame of its own, for LLVM.

A builtin is a C function ``PyObject *(PyObject *self, PyObject *const *arguments, Py_ssize_t number)``
(METH_FASTCALL) with a PyMethodDef. Both lie in the object file with the kernels; machine_code.py makes the
Python object of them, and says which functions of Python's C interface are looked up by their names when
the file is loaded. All of these belong to the stable interface, so that an object file does not depend on
the version of Python.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

from llvmlite import ir

from torchestra.engine.native.machine_code import definition_name

OBJECT = ir.IntType(8).as_pointer()
"""PyObject *."""
BYTES = ir.IntType(8).as_pointer()
_I64, _I32, _VOID = ir.IntType(64), ir.IntType(32), ir.VoidType()
_METH_FASTCALL = 0x80
_FASTCALL = ir.FunctionType(OBJECT, [OBJECT, OBJECT.as_pointer(), _I64])

PROTOTYPES = {
    "PyLong_AsLongLong": ir.FunctionType(_I64, [OBJECT]),
    "PyLong_FromLongLong": ir.FunctionType(OBJECT, [_I64]),
    "PyErr_Occurred": ir.FunctionType(OBJECT, []),
    "PyErr_SetString": ir.FunctionType(_VOID, [OBJECT, BYTES]),
    "PyEval_SaveThread": ir.FunctionType(OBJECT, []),
    "PyEval_RestoreThread": ir.FunctionType(_VOID, [OBJECT]),
}


class Interface:
    """Python's C interface, as a module of LLVM calls it.

    Args:
        module: where the functions are declared when they are first called.
    """

    def __init__(self, module: ir.Module) -> None:
        self._module = module

    def call(self, builder: Any, name: str, *arguments: Any) -> Any:
        """Write the call of a function of the interface."""
        function = self._module.globals.get(name)
        if function is None:
            function = ir.Function(self._module, PROTOTYPES[name], name)
        return builder.call(function, arguments)

    def type_error(self, builder: Any) -> Any:
        """Return the class TypeError."""
        name = "PyExc_TypeError"
        found = self._module.globals.get(name) or ir.GlobalVariable(self._module, OBJECT, name)
        return builder.load(found)

    def text(self, text: str) -> Any:
        """Return the address of a C string."""
        data = bytearray(text.encode() + b"\0")
        constant = ir.Constant(ir.ArrayType(ir.IntType(8), len(data)), data)
        name = self._module.get_unique_name("text")
        found = ir.GlobalVariable(self._module, constant.type, name)
        found.linkage, found.global_constant, found.initializer = "internal", True, constant
        return found.bitcast(BYTES)


def define_method(module: ir.Module, name: str) -> ir.Function:
    """Return the C function of a builtin, still to be written, and add its PyMethodDef."""
    function = ir.Function(module, _FASTCALL, f"builtin.{name}")
    function.linkage = "internal"
    text = Interface(module).text(name.rpartition(".")[2])
    kind = ir.LiteralStructType([BYTES, _FASTCALL.as_pointer(), _I32, BYTES])
    definition = ir.GlobalVariable(module, kind, definition_name(name))
    definition.initializer = ir.Constant(
        kind, [text, function, ir.Constant(_I32, _METH_FASTCALL), ir.Constant(BYTES, None)]
    )
    return function


def write_builtin(module: ir.Module, name: str, called: ir.Function, *, releases: bool) -> None:
    """Write a builtin that calls a function of words with ints, and returns an int.

    Args:
        releases: the interpreter's lock is let go while the function runs.
    """
    function = define_method(module, name)
    python = Interface(module)
    _, arguments, number = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    wrong = function.append_basic_block("wrong")
    wanted = len(called.args)
    first = function.append_basic_block("arguments")
    builder.cbranch(builder.icmp_signed("==", number, _I64(wanted)), first, wrong)
    builder.position_at_end(wrong)
    message = python.text(f"{name}() takes {wanted} ints")
    python.call(builder, "PyErr_SetString", python.type_error(builder), message)
    failed = function.append_basic_block("failed")
    builder.branch(failed)
    builder.position_at_end(failed)
    builder.ret(ir.Constant(OBJECT, None))
    builder.position_at_end(first)
    words = [
        _word(python, builder, builder.load(builder.gep(arguments, [_I64(at)])), failed)
        for at in range(wanted)
    ]
    if releases:
        thread = python.call(builder, "PyEval_SaveThread")
        result = builder.call(called, words)
        python.call(builder, "PyEval_RestoreThread", thread)
    else:
        result = builder.call(called, words)
    builder.ret(python.call(builder, "PyLong_FromLongLong", result))


def _word(python: Interface, builder: Any, argument: Any, failed: ir.Block) -> Any:
    """Return an int as a word; where it is none the builtin returns at ``failed``, with the error set."""
    word = python.call(builder, "PyLong_AsLongLong", argument)
    with builder.if_then(builder.icmp_signed("==", word, _I64(-1)), likely=False):
        error = python.call(builder, "PyErr_Occurred")
        going_on = builder.function.append_basic_block("minus_one")
        builder.cbranch(builder.icmp_unsigned("==", error, ir.Constant(OBJECT, None)), going_on, failed)
        builder.position_at_end(going_on)
    return word
