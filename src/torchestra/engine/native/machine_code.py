"""Loads an object file into this process: llvmlite places it, and looks up what it calls."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import ctypes
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
    "Py_DecRef",
    "Py_IncRef",
)
"""What builtins and entries take from Python's C interface. (Of the C library everything is found.)"""

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
        for name in PYTHON_SYMBOLS:
            llvm.add_symbol(name, ctypes.addressof(ctypes.c_byte.in_dll(ctypes.pythonapi, name)))
        target = llvm.Target.from_triple(llvm.get_process_triple())
        machine = target.create_target_machine(reloc="pic", codemodel="jitdefault", jit=True)
        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
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
