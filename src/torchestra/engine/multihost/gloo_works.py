"""Waits for works of Gloo's that another thread can end.

Gloo ends a wait when the work's connection fails, except where the work's message has begun to arrive, or to
be sent: that wait learns of no failure, and only its own time-out ends it. (Seen with a message of 1 GiB, its
other end stopped or killed in the middle.) It would keep the bridge's thread, Gloo's descriptors and the
tensors for as long as the operation may take.

torch can end such a wait, by ``abort()`` of the work's class in C++, but does not bind that for Python. So it
is called here by its symbol. That is safe because everything is compared before: pybind11 gives the address
of a C++ object only to those who name its type and the C++ library that torch was built with (its "conduit",
made for other modules), and the object's first word must be the table of virtual functions of the very class
whose function is called. Where anything is not as expected, nothing is called, and the bridge warns of what
is left.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchestra.engine.multihost.bridge import BridgeError

_ABI = b"system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_1"
_TYPE_INFO, _RAW = b"St9type_info", b"raw_pointer_ephemeral"
_CLASSES = ("N4c10d16ProcessGroupGloo8RecvWork", "N4c10d16ProcessGroupGloo8SendWork")
_BEFORE_FUNCTIONS = 2 * ctypes.sizeof(ctypes.c_void_p)  # in a table of virtual functions (Itanium C++ ABI)


class WorksWaiter:
    """Waits for works on one thread, until another one stops it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: Sequence[Any] = ()
        self._is_stopped = False

    def wait(self, works: Sequence[Any], timeout: timedelta) -> Iterator[None]:
        """Wait for one work after the other; yield after each.

        Raises:
            BridgeError: it has been stopped.
            RuntimeError: from Gloo: a connection has failed, or the time is up.
        """
        with self._lock:
            self._works = () if self._is_stopped else works
        try:
            for work in works:
                if self._is_stopped or not work.wait(timeout):
                    raise BridgeError("this end is closed")
                yield
        finally:
            self._works = ()

    def stop(self) -> None:
        """End the wait, and all later ones."""
        with self._lock:
            self._is_stopped = True
            works = self._works
        for work in works:
            abort(work)


def abort(work: Any) -> bool:
    """End the wait for a work that sends or receives, whoever waits; return whether that could be done."""
    symbols = _symbols()
    address = None if symbols is None else _address_of(work, symbols.type_info)
    if symbols is None or address is None:
        return False
    function = symbols.aborts.get(ctypes.c_size_t.from_address(address).value)
    if function is None:
        return False
    function(address)
    return True


class _Symbols(NamedTuple):
    """Hold what is needed of torch's library.

    Attributes:
        type_info: the address of the type information of ``c10d::Work``.
        aborts: of each class, by the address of its virtual functions, ``abort()``.
    """

    type_info: int
    aborts: dict[int, Callable[[int], None]]


@functools.cache
def _symbols() -> _Symbols | None:
    """Find the symbols; None where torch's library has others."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        type_info = _address_in(library, "_ZTIN4c10d4WorkE")
        aborts: dict[int, Callable[[int], None]] = {
            _address_in(library, f"_ZTV{name}E") + _BEFORE_FUNCTIONS: _METHOD((f"_Z{name}5abortEv", library))
            for name in _CLASSES
        }
    except (OSError, ValueError, AttributeError):
        return None
    return _Symbols(type_info, aborts)


def _address_in(library: ctypes.CDLL, name: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library, name))


def _address_of(work: Any, type_info: int) -> int | None:
    """Return the address of the C++ object; None if pybind11 does not know it by this type."""
    conduit = getattr(work, "_pybind11_conduit_v1_", None)
    capsule = conduit and conduit(_ABI, _NEW_CAPSULE(type_info, _TYPE_INFO, None), _RAW)
    return None if capsule is None else _GET_POINTER(capsule, _GET_NAME(capsule))


_METHOD = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_NEW_CAPSULE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_GET_NAME = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
_GET_POINTER = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
