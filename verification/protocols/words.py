"""Words that ranks share, for Python code: the product's kernels, run as the Python functions that they are.

Each atomic access is an operation of the search. Addresses of the model are small; larger ones are memory of
this process, in which a kernel leaves results for its caller.
"""

from __future__ import annotations

import ctypes
import types
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from torchestra.engine import layout as at
from torchestra.engine.kernels import shared_words
from torchestra.engine.native.declarations import External, Intrinsic, KernelSource
from torchestra.engine.p2p.layout import channel_area_bytes
from verification.execution import LOADS
from verification.memory import to_word
from verification.protocols.replay import perform

BASE = 1 << 20
_END = 1 << 32
WORD = 8


def _load(address: int) -> int:
    if address < _END:
        return int(perform("load_relaxed", address))
    return ctypes.c_int64.from_address(address).value


def _store(address: int, value: int) -> None:
    if address < _END:
        perform("store_relaxed", address, to_word(value))
    else:
        ctypes.c_int64.from_address(address).value = to_word(value)


def _operation(name: str) -> Any:
    if name in LOADS:
        return lambda address: perform(name, address)
    return lambda *words: perform(name, *map(to_word, words))


_ATOMICS: dict[str, Any] = {
    "load": _load,
    "store": _store,
    **{
        name: _operation(name)
        for name in (
            "load_acquire", "load_ordered", "store_release", "store_ordered", "compare_exchange",
            "fetch_add", "full_fence", "syscall",
        )
    },
}  # fmt: skip


_made: dict[str, Any] = {}


def runnable(kernel: KernelSource) -> Any:
    """Return a kernel's own function, in which atomic accesses are operations of the search."""
    if kernel.name in _made:
        return _made[kernel.name]
    scope: dict[str, Any] = {}
    made = _made[kernel.name] = types.FunctionType(kernel.function.__code__, scope)
    for name in kernel.function.__code__.co_names:
        value = kernel.function.__globals__.get(name)
        if isinstance(value, KernelSource):
            scope[name] = runnable(value)
        elif isinstance(value, (Intrinsic, External)):
            scope[name] = _ATOMICS.get(value.name.removeprefix("intrinsic."))
        elif isinstance(value, types.ModuleType):
            scope[name] = SimpleNamespace(**_ATOMICS)
        elif value is not None:
            scope[name] = value
    return made


SHARED_WORDS = SimpleNamespace(
    **{
        name: runnable(getattr(shared_words, name))
        for name in ("load_acquire", "load_each", "store_ordered", "compare_exchange")
    },
    sleep_while_for=lambda address, value, limit: None,
    wake=lambda address: None,
)
"""Stands for the module ``kernels.shared_words``; whoever waits for a step may look at any moment."""


class _Bytes:
    """The bytes of an arena: whole words of them are read and written, in no order.

    What is written here (proposals) has words that are never 0, and others that always are: these are left
    out.
    """

    def __getitem__(self, place: slice) -> npt.NDArray[np.uint8]:
        words = [_load(BASE + start) for start in range(place.start, place.stop, WORD)]
        return np.array(words, dtype=np.int64).view(np.uint8)

    def __setitem__(self, place: slice, value: npt.NDArray[np.uint8]) -> None:
        words = np.frombuffer(value.tobytes(), dtype=np.int64).tolist()
        for start, word in zip(range(place.start, place.stop, WORD), words, strict=True):
            if word != 0:
                _store(BASE + start, word)


class ModelArena:
    """Memory that the ranks of a host share, with the product's layout."""

    def __init__(self, size: int) -> None:
        layout = at.Layout(size, 4096, 4096, channel_area_bytes(size), 0)
        # Its properties, which are computed at each use.
        self.layout = SimpleNamespace(
            size=size,
            agreement=layout.agreement,
            agreement_bytes=layout.agreement_bytes,
            proposal_bytes=layout.proposal_bytes,
        )
        self.address = BASE
        self.bytes = _Bytes()
