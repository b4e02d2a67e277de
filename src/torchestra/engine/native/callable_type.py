"""A class whose instances are called as machine code is: with no Python function, and no frame, in between.

Its instances have two words behind the object's header: the address of a C function (CPython's vectorcall
protocol, PEP 590), which is called for every call of the instance, with it as the first argument; and a word
of that function's own.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

FUNCTION = object.__basicsize__
"""At which byte of an instance the address of its function lies."""
OWN_WORD = FUNCTION + 8
"""At which byte that function's own word does."""

_DEFAULT, _BASE_TYPE, _HAVE_VECTORCALL = 1 << 18, 1 << 10, 1 << 11  # Py_TPFLAGS
_TP_CALL, _TP_MEMBERS = 50, 72  # slots, by their numbers in the stable interface
_SSIZE, _READ_ONLY = 19, 1


class _Slot(ctypes.Structure):
    _fields_ = [("slot", ctypes.c_int), ("value", ctypes.c_void_p)]


class MethodDefinition(ctypes.Structure):
    """A PyMethodDef: name, C function, how that is called, and docstring.

    What is made of it refers to it, so it must be kept.
    """

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


class _Member(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_int),
        ("offset", ctypes.c_ssize_t),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


class _Spec(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("basicsize", ctypes.c_int),
        ("itemsize", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("slots", ctypes.c_void_p),
    ]


# What the class refers to for as long as there is one.
_members = (_Member * 2)(_Member(b"__vectorcalloffset__", _SSIZE, FUNCTION, _READ_ONLY, None))
_call = ctypes.cast(ctypes.pythonapi.PyVectorcall_Call, ctypes.c_void_p).value
_slots = (_Slot * 3)(_Slot(_TP_CALL, _call), _Slot(_TP_MEMBERS, ctypes.addressof(_members)))
_spec = _Spec(
    b"torchestra.engine.native.callable_type.NativeCallable",
    OWN_WORD + 8,
    0,
    _DEFAULT | _BASE_TYPE | _HAVE_VECTORCALL,
    ctypes.addressof(_slots),
)

if TYPE_CHECKING:

    class NativeCallable:
        """Base class of what is called as machine code; :func:`bind` says which."""

else:
    _make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)(("PyType_FromSpec", ctypes.pythonapi))
    NativeCallable = _make(ctypes.addressof(_spec))


METH_FASTCALL_KEYWORDS = 0x80 | 0x02
# What the methods of classes refer to.
_definitions: list[MethodDefinition] = []


def add_method(cls: type, name: str, function: int, doc: str | None) -> None:
    """Give a class a method that is a C function at an address.

    Args:
        cls: the class; its instances are the function's first argument.
        function: ``PyObject *function(instance, arguments, number, keywords)``.
    """
    text = None if doc is None else doc.encode()
    definition = MethodDefinition(name.encode(), function, METH_FASTCALL_KEYWORDS, text)
    _definitions.append(definition)
    make: Any = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_void_p)(
        ("PyDescr_NewMethod", ctypes.pythonapi)
    )
    setattr(cls, name, make(cls, ctypes.addressof(definition)))


def bind(instance: NativeCallable, function: int, word: int) -> None:
    """Have calls of an instance call the C function at an address.

    Args:
        function: ``PyObject *function(instance, arguments, number, keywords)``, a vectorcallfunc.
        word: what it finds at OWN_WORD of the instance. What it refers to must live as long as the instance.
    """
    ctypes.c_int64.from_address(id(instance) + OWN_WORD).value = word
    ctypes.c_int64.from_address(id(instance) + FUNCTION).value = function
