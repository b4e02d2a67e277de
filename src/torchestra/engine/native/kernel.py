"""The decorators of kernels, and how a kernel is called: as machine code, or as Python.

All kernels of the engine are one object file, which is loaded when the first of them is called. A kernel
that is not in it, say one that a program has written, is compiled in memory when it is first called.

With ``TORCHESTRA_KERNELS=python`` kernels run interpreted; the intrinsic operations and the reductions are
machine code all the same, so what one rank does is seen by the others as ever.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from torchestra.engine.native.declarations import Intrinsic, KernelSource
from torchestra.engine.native.machine_code import MachineCode
from torchestra.engine.native.object_files import find_or_make

Kernel = Callable[..., int]
"""A kernel as Python calls it: with ints."""

_VARIABLE = "TORCHESTRA_KERNELS"
_WAYS = ("", "compiled", "python")
_interpreted = os.environ.get(_VARIABLE, "") == "python"
if os.environ.get(_VARIABLE, "") not in _WAYS:
    raise ValueError(f"{_VARIABLE} must be 'compiled' or 'python', got {os.environ[_VARIABLE]!r}")

# By name: what the object file has, as it is made of these sources.
_declared: dict[str, NativeKernel | NativeIntrinsic] = {}
_object: MachineCode | None = None
_loading = threading.RLock()


def _no_builder() -> bytes:
    raise RuntimeError("the engine has not said how its kernels are compiled")


_build: Callable[[], bytes] = _no_builder


class _Native:
    """Hold a function that is compiled and called from Python."""

    name: str
    _entry: Callable[..., int]
    _code: MachineCode | None = None

    @property
    def entry(self) -> Callable[..., int]:
        """The builtin function: takes ints, returns an int."""
        if self._entry == self._call_first:
            self._entry = self._load().builtin(self.name)
        return self._entry

    def _call_first(self, *words: int) -> int:
        return self.entry(*words)

    @property
    def address(self) -> int:
        """The address of the C function, which takes and returns 64-bit words."""
        return self._load().address(self.name)

    def __call__(self, *words: int) -> int:
        return self._entry(*words)

    def _load(self) -> MachineCode:
        return load_object()


class NativeIntrinsic(_Native, Intrinsic):
    """An intrinsic operation, for kernels, and for Python: on memory of this process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._entry = self._call_first
        _declared[self.name] = self


class NativeKernel(_Native, KernelSource):
    """A compiled function on words.

    Args:
        function: the Python function.
        keeps_interpreter: whether a call from Python holds the interpreter's lock while it runs.
    """

    def __init__(self, function: Callable[..., Any], keeps_interpreter: bool) -> None:
        super().__init__(function, keeps_interpreter)
        self._entry = function if _interpreted else self._call_first
        if self.__module__.startswith("torchestra.engine."):
            _declared.setdefault(self.name, self)

    def _load(self) -> MachineCode:
        with _loading:
            if self._code is None:
                shared = load_object() if _declared.get(self.name) is self else None
                in_object = shared is not None and shared.has_builtin(self.name)
                self._code = shared if in_object else _compiled_alone(self)
            assert self._code is not None
            return self._code


def kernel(function: Callable[..., Any]) -> Any:
    """Make a kernel of a function; calls from Python release the interpreter's lock while it runs."""
    return NativeKernel(function, keeps_interpreter=False)


def short_kernel(function: Callable[..., Any]) -> Any:
    """Make a kernel that keeps the interpreter's lock: it takes less time than to release it."""
    return NativeKernel(function, keeps_interpreter=True)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Declare an intrinsic operation."""
    return NativeIntrinsic(function)


def entry_point(kernel: Any) -> Callable[..., int]:
    """Return the builtin function of a kernel. Calling it spares 0.1 µs; every argument must be an int."""
    entry: Callable[..., int] = kernel.entry
    return entry


def address_of(kernel: Any) -> int:
    """Return the address of a kernel's C function: ``int64_t name(int64_t, …)``."""
    address: int = kernel.address
    return address


def address_in_object(symbol: str) -> int:
    """Return where a function is that the object file has besides kernels.

    Raises:
        KeyError: it has none of that name.
    """
    return load_object().address(symbol)


def is_interpreted() -> bool:
    """Return whether kernels run as Python."""
    return _interpreted


def declared() -> list[NativeKernel | NativeIntrinsic]:
    """Return the kernels of the engine whose modules have been imported, and intrinsic operations."""
    return list(_declared.values())


def set_builder(build: Callable[[], bytes]) -> None:
    """Say what compiles the object file of the engine, where none is found."""
    global _build
    _build = build


def load_object() -> MachineCode:
    """Return the machine code of the engine; loaded, or compiled, once a process."""
    global _object
    if _object is None:
        with _loading:
            if _object is None:
                _object = MachineCode(find_or_make(_build))
    return _object


def _compiled_alone(kernel: NativeKernel) -> MachineCode:
    from torchestra.engine.native.compiler import Program
    from torchestra.engine.native.target import Target

    target = Target.host()
    program = Program(target.machine)
    program.add(kernel)
    return MachineCode(target.compile(str(program.module)))
