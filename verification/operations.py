"""The functions that stand for a kernel's invisible intrinsics and for C functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verification.execution import load, now, store

if TYPE_CHECKING:
    from verification.world import World

ALLOCATED = 1 << 60
"""Start of the memory that kernels allocate: no address of the product's. Each rank has its own."""


def _copy(target: int, source: int, length: int) -> int:
    assert length % 8 == 0, "models move whole words"
    for offset in range(0, length, 8):
        store(target + offset, load(source + offset))
    return target


def process_of(rank: int) -> int:
    """Return what stands for the number of a rank's process."""
    return rank + 1


def _read_process(
    process: int, local: int, local_count: int, remote: int, remote_count: int, flags: int
) -> int:
    """Stand for process_vm_readv: copy words, or what is shorter than a word, of a process that lives."""
    owner = process - process_of(0)
    if now.share(_has_crashed, owner):
        return -1
    assert 0 <= owner < len(now.world.execution.starts)
    assert not flags
    lengths = [load(local + 16 * index + 8) for index in range(local_count)]
    given = [load(remote + 16 * index + 8) for index in range(remote_count)]
    if lengths != given:  # the ends of a rank's own tensor, which nothing is done with
        assert owner == now.rank
        assert sum(lengths) == sum(given) == 2
        return 2
    for index, length in enumerate(lengths):
        _copy_from(owner, load(local + 16 * index), load(remote + 16 * index), length)
    return sum(lengths)


def _copy_from(owner: int, target: int, source: int, length: int) -> None:
    assert length % 8 == 0, "models move whole words"
    for offset in range(0, length, 8):
        store(target + offset, now.share(_read_of, owner, source + offset))


def _has_crashed(world: World, rank: int, owner: int) -> bool:
    return owner in world.crashed


def _read_of(world: World, rank: int, owner: int, address: int) -> int:
    """Read a word in place that may be another rank's own."""
    if not world.execution.starts[owner].is_private(address):
        return world.memory.read(rank, address)
    found = world.locals[owner].private.get(address)
    return world.memory.initial(address) if found is None else found


def _somebody_crashed(world: World, rank: int) -> int:
    return int(bool(world.crashed))


def _stream_line(target: int, source: int) -> None:
    for offset in range(0, 64, 8):
        store(target + offset, load(source + offset), streams=True)


def _stream_fence(world: World, rank: int) -> None:
    world.memory.stream_fence(rank)


def _release_fence(world: World, rank: int) -> None:
    world.memory.release_fence(rank)


def _add_up(function: int, target: int, sources: int, number: int, count: int) -> None:
    """Stand for any reduction: a sum of words."""
    addresses = [load(sources + 8 * index) for index in range(number)]
    for offset in range(0, 8 * count, 8):
        store(target + offset, sum(load(address + offset) for address in addresses))


def _nothing(*words: int) -> int:
    return 0


def _allocate(nbytes: int) -> int:
    """Stand for malloc: return memory of this rank alone, which is never reused."""
    start = load(ALLOCATED) or ALLOCATED + 64
    store(ALLOCATED, start + (nbytes + 63) // 64 * 64)
    return start


OPERATIONS: dict[str, Callable[..., Any]] = {
    "load": load,
    "store": store,
    "memcpy": _copy,
    "process_vm_readv": _read_process,
    "memset": _nothing,
    "stream_line": _stream_line,
    "stream_fence": lambda: now.share(_stream_fence),
    "call_reduction": _add_up,
    "release_fence": lambda: now.share(_release_fence),
    "spin_hint": _nothing,
    "sched_yield": _nothing,
    "counter": _nothing,
    "clock_gettime": _nothing,
    "malloc": _allocate,
    "free": _nothing,
    "somebody_crashed": lambda: now.share(_somebody_crashed),
}
"""By name: the functions that stand for a kernel's invisible intrinsics and C functions."""
