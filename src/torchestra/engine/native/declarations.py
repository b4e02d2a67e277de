"""The language of kernels: Python functions on 64-bit words, and the operations that they call.

A kernel's arguments, variables and result are words (signed 64-bit integers). Besides other kernels it calls
:class:`Intrinsic` operations (atomics.py) and functions of the C library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

_C_TYPES: dict[str, Any] = {"i64": ctypes.c_int64, "i32": ctypes.c_int32, "void": None}


class Intrinsic:
    """An operation that the compiler has machine code for (intrinsic_code.py), under this function's name.

    Args:
        function: has the parameters and the docstring; never called.
    """

    keeps_interpreter = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = f"intrinsic.{function.__name__}"
        self.parameters: int = function.__code__.co_argcount
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__


class External:
    """A function of the C library, which kernels and Python call.

    Args:
        name: what the library calls it.
        result: "i64", "i32" or "void".
        parameters: each "i64" or "i32".
    """

    def __init__(self, name: str, result: str, *parameters: str) -> None:
        self.name = name
        self.result = result
        self.parameters = parameters

    def __call__(self, *words: int) -> Any:
        function = ctypes.CDLL(None)[self.name]
        function.restype = _C_TYPES[self.result]
        function.argtypes = [_C_TYPES[each] for each in self.parameters]
        return function(*words)


class KernelSource:
    """A Python function on words, as the compiler takes it.

    Attributes:
        function: the Python function.
        name: its module (below the engine) and name, "kernels.move.share": what its machine code is called.
        keeps_interpreter: whether a call from Python holds the interpreter's lock while it runs.
    """

    def __init__(self, function: Callable[..., Any], keeps_interpreter: bool) -> None:
        self.function = function
        self.name = f"{function.__module__.removeprefix('torchestra.engine.')}.{function.__qualname__}"
        self.keeps_interpreter = keeps_interpreter
        self.parameters: int = function.__code__.co_argcount
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self.__name__ = function.__name__
        self.__wrapped__ = function  # for inspect.signature() and the like

    @property
    def is_private(self) -> bool:
        """Return whether only kernels of its own module call it."""
        return self.__name__.startswith("_")

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"
