"""Loads an object file into this process: llvmlite places it, and looks up what it calls."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

PYTHON_SYMBOLS = (
    "PyDict_GetItem",
    "PyErr_Clear",
    "PyErr_Fetch",
    "PyErr_NormalizeException",
    "PyErr_Occurred",
    "PyErr_Restore",
    "PyErr_SetString",
    "PyEval_RestoreThread",
    "PyEval_SaveThread",
    "PyExc_TypeError",
    "PyList_GetItem",
    "PyList_Size",
    "PyLong_AsLongLong",
    "PyLong_AsLongLongAndOverflow",
    "PyLong_FromLongLong",
    "PyLong_FromSsize_t",
    "PyObject_Vectorcall",
    "PyTuple_Size",
    "Py_DecRef",
    "Py_IncRef",
)
"""What builtins and entries take from Python's C interface. (Of the C library everything is found.)"""

_VECTORCALL = """
declare i64 @PyThreadState_Get()
declare i64 @_PyObject_MakeTpCall(i64, i64, i64, i64, i64)

define i64 @PyObject_Vectorcall(i64 %callee, i64 %arguments, i64 %number, i64 %names) {
  %class.at = add i64 %callee, 8
  %class.address = inttoptr i64 %class.at to i64*
  %class = load i64, i64* %class.address
  %flags.at = add i64 %class, 168
  %flags.address = inttoptr i64 %flags.at to i64*
  %flags = load i64, i64* %flags.address
  %has = and i64 %flags, 2048
  %has.not = icmp eq i64 %has, 0
  br i1 %has.not, label %other, label %direct
direct:
  %offset.at = add i64 %class, 56
  %offset.address = inttoptr i64 %offset.at to i64*
  %offset = load i64, i64* %offset.address
  %function.at = add i64 %callee, %offset
  %function.address = inttoptr i64 %function.at to i64 (i64, i64, i64, i64)**
  %function = load i64 (i64, i64, i64, i64)*, i64 (i64, i64, i64, i64)** %function.address
  %result = call i64 %function(i64 %callee, i64 %arguments, i64 %number, i64 %names)
  ret i64 %result
other:
  %thread = call i64 @PyThreadState_Get()
  %made = call i64 @_PyObject_MakeTpCall(i64 %thread, i64 %callee, i64 %arguments, i64 %number, i64 %names)
  ret i64 %made
}
"""
# Python 3.10 has this function in its header alone. It reads the class's tp_flags (is there a function that
# takes arguments as an array?) and tp_vectorcall_offset (where it lies in the object); so does the code.
_IN_HEADER = ("PyObject_Vectorcall", _VECTORCALL, ("PyThreadState_Get", "_PyObject_MakeTpCall"))

# What refers to machine code, a builtin say, may outlive whoever loaded it.
_loaded: list[Any] = []


def definition_name(name: str) -> str:
    """Return the symbol of the PyMethodDef of a builtin."""
    return f"definition.{name}"


class MachineCode:
    """The functions of an object file, in memory until the process ends.

    Args:
        object_file: what :meth:`target.Target.compile` has made.
    """

    def __init__(self, object_file: bytes) -> None:
        import llvmlite.binding as llvm  # not for commands that load nothing

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        symbols, code = set(PYTHON_SYMBOLS), ""
        if sys.version_info < (3, 11):
            missing, code, wanted = _IN_HEADER
            symbols = symbols - {missing} | set(wanted)
        for name in symbols:
            llvm.add_symbol(name, ctypes.addressof(ctypes.c_byte.in_dll(ctypes.pythonapi, name)))
        target = llvm.Target.from_triple(llvm.get_process_triple())
        machine = target.create_target_machine(reloc="pic", codemodel="jitdefault", jit=True)
        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(code), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(object_file))
        self._engine.finalize_object()
        _loaded.append(self._engine)

    def address(self, symbol: str) -> int:
        """Return where a function or a table is.

        Raises:
            KeyError: there is none of that name.
        """
        address: int = self._engine.get_function_address(symbol)
        if not address:
            raise KeyError(symbol)
        return address

    def has_builtin(self, name: str) -> bool:
        """Return whether there is a builtin of a name."""
        return bool(self._engine.get_function_address(definition_name(name)))

    def builtin(self, name: str) -> Callable[..., int]:
        """Return the builtin function of a name."""
        make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
            ("PyCFunction_NewEx", ctypes.pythonapi)
        )
        function: Callable[..., int] = make(self.address(definition_name(name)), None, None)
        return function
