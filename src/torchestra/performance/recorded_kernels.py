"""Run the sources of kernels with primitives that record what a rank does, instead of moving bytes.

A kernel is a Python function on words whose primitives are names of its module (engine/native). Here the
same code gets other functions under these names: copies and reductions are written down, flags are written
down and set, and a wait lets the other ranks run first. Kernels that call none of these run as machine code.
So loops, thresholds and steps are those of the product, over a real arena.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torchestra.engine import layout as at
from torchestra.engine.kernels import buffers, waiting
from torchestra.engine.local import KERNELS
from torchestra.engine.native import atomics
from torchestra.engine.native.declarations import KernelSource

_MOVED_BYTES = 128 << 10
"""Pieces up to this are copied as well as recorded: ranks may tell each other by them how they go on."""

_DONE = 0
_FLIGHT_RECORDER = "recorder."
"""Its kernels publish entries, which are no flags of the protocol."""


class Observer(Protocol):
    """Takes what the rank that runs now does."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Take a copy of so many bytes, from and to these addresses."""

    def read_peer(self, target: int, nbytes: int) -> None:
        """Take a call of the system that reads so many bytes of a peer's tensor, to an address."""

    def reduce(self, target: int, sources: Sequence[int], count: int) -> None:
        """Take a reduction of ``count`` elements at each of some addresses, to an address."""

    def set_flag(self, value: int) -> None:
        """Take the value that the rank's flag gets."""

    def await_flag(self, local_rank: int, value: int, has_come: Callable[[], bool]) -> None:
        """Take a wait, and return when ``has_come()``."""


def recorded_kernels(observer: Observer) -> dict[str, Callable[..., int]]:
    """Return the kernels of collectives, by name, as functions that tell the observer what they do."""
    rebuild = _Rebuilder(_primitives(observer))
    return {name: rebuild(kernel) for name, kernel in KERNELS.items()}


class _Rebuilder:
    """Makes functions of kernels, whose primitives are replaced."""

    def __init__(self, primitives: dict[object, Callable[..., int]]) -> None:
        self._made: dict[object, Any] = dict(primitives)

    def __call__(self, called: Any) -> Any:
        """Return the function for a kernel, or the same object if it reaches no primitive."""
        if called in self._made:
            return self._made[called]
        if not isinstance(called, KernelSource) or called.name.startswith(_FLIGHT_RECORDER):
            return called
        function = called.function
        names = [name for name in function.__code__.co_names if name in function.__globals__]
        found = {name: function.__globals__[name] for name in names}
        hashable = {name: value for name, value in found.items() if isinstance(value, _CALLABLE)}
        replaced = {name: self(value) for name, value in hashable.items()}
        made: Any = called
        if any(replaced[name] is not found[name] for name in replaced):
            made = types.FunctionType(function.__code__, {**found, **replaced}, function.__name__)
        self._made[called] = made
        return made


_CALLABLE = (KernelSource, type(atomics.load), type(atomics.memcpy))


def _primitives(observer: Observer) -> dict[object, Callable[..., int]]:
    store_release, store_ordered = atomics.store_release, atomics.store_ordered
    flag_line, load_acquire = waiting.flag_line, atomics.load_acquire

    def memcpy(target: int, source: int, length: int) -> int:
        observer.copy(target, source, length)
        if length <= _MOVED_BYTES:
            ctypes.memmove(target, source, length)
        return target

    def copy_out(target: int, source: int, length: int, stream: int) -> int:
        return memcpy(target, source, length)

    def fill(context: int, target: int, source: int, length: int) -> int:
        """However a piece gets into a buffer, and without the time that ranks take of it now and then."""
        return memcpy(target, source, length)

    def process_vm_readv(pid: int, local: int, pieces: int, remote: int, sources: int, flags: int) -> int:
        """All recorded ranks are in this process; one that was never announced has no token."""
        for (target, room), (source, length) in zip(
            _iovecs(local, pieces), _iovecs(remote, sources), strict=False
        ):
            if source and length <= _MOVED_BYTES:
                ctypes.memmove(target, source, min(room, length))
        observer.read_peer(*_iovecs(local, pieces)[-1])
        return sum(length for _, length in _iovecs(remote, sources))

    def call_reduction(function: int, target: int, sources: int, number: int, count: int) -> int:
        observer.reduce(target, list((ctypes.c_int64 * number).from_address(sources)), count)
        return _DONE

    def release(address: int, value: int) -> int:
        observer.set_flag(value)
        store_release(address, value)
        return _DONE

    def order(address: int, value: int) -> int:
        observer.set_flag(value)
        store_ordered(address, value)
        return _DONE

    def wait_until(context: int, peer: int, target: int) -> int:
        word = flag_line(context, peer, target >> at.STEP_BITS)
        observer.await_flag(peer, target, lambda: load_acquire(word) >= target)
        return _DONE

    return {
        atomics.memcpy: memcpy,
        buffers.copy_out: copy_out,
        buffers.fill: fill,
        buffers.put: fill,
        buffers.settle: _settle,
        atomics.process_vm_readv: process_vm_readv,
        atomics.call_reduction: call_reduction,
        store_release: release,
        store_ordered: order,
        waiting.wait_until: wait_until,
    }


def _settle(context: int) -> int:
    """Nothing is on its way past the caches."""
    return _DONE


def _iovecs(address: int, count: int) -> list[tuple[int, int]]:
    """Return the addresses and lengths of the buffers of a call of the system (iovec(3type))."""
    words = list((ctypes.c_int64 * (2 * count)).from_address(address))
    return list(zip(words[::2], words[1::2], strict=True))
