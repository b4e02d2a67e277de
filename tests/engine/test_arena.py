"""Test how much of the address space, of files and of core dumps an arena takes."""

from __future__ import annotations

import os
import resource
from dataclasses import replace

import pytest
import torch

import torchestra as dist
from forking import Child
from torchestra.engine import layout as at
from torchestra.engine.memory.arena import Arena, layout_for
from torchestra.engine.memory.heap import Heap
from torchestra.errors import DistBackendError
from worlds import KINDS, mappings, run

GIB = 1 << 30


def make(layout: at.Layout) -> Arena:
    arena, descriptor = Arena.create(layout, "arena")
    os.close(descriptor)
    return arena


@pytest.fixture
def two_tebibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is said to have 2 TiB of memory."""
    real = os.sysconf
    pages = {"SC_PHYS_PAGES": (2 << 40) // real("SC_PAGE_SIZE")}
    monkeypatch.setattr(os, "sysconf", lambda name: pages.get(name) or real(name))


@pytest.mark.usefixtures("two_tebibytes")
@pytest.mark.parametrize("size", [8, 64])
def test_hundreds_of_groups_fit_into_the_address_space_of_a_large_machine(size: int) -> None:
    arenas = [make(layout_for(size)) for _ in range(200)]
    assert len(arenas) == 200


@pytest.mark.usefixtures("two_tebibytes")
@pytest.mark.parametrize("size", [1, 8, 64])
def test_a_hundred_groups_of_a_large_machine_can_use_their_heaps_at_once(size: int) -> None:
    heaps = []
    for _ in range(100):
        heaps.append(Heap(make(layout_for(size)), size - 1))
        assert heaps[-1].first_address > 0  # mapped
    tensors = [heap.empty((1000,), torch.float32).fill_(1) for heap in heaps]
    assert sum(int(tensor.sum()) for tensor in tensors) == 100_000
    assert heaps[0].last_address - heaps[0].first_address >= 60 * GIB


def sizes_of_mappings() -> list[int]:
    """In bytes, of all memory files of torchestra in this process."""
    bounds = [line.split()[0].split("-") for line in mappings()]
    return [int(last, 16) - int(first, 16) for first, last in bounds]


def use_and_do_not_use_the_heap() -> tuple[int, int]:
    """The bytes mapped by this process before it makes a tensor in the arena, and after."""
    dist.all_reduce(torch.ones(1 << 20))
    dist.barrier()
    before = sum(sizes_of_mappings())
    dist.barrier()
    assert int(dist.empty(4).fill_(1).sum()) == 4
    return before, sum(sizes_of_mappings())


def test_heaps_are_mapped_when_they_are_first_used() -> None:
    for before, after in run("processes", 2, use_and_do_not_use_the_heap):
        assert before < GIB <= after


def some_ranks_have_mapped_their_heaps() -> list[float]:
    """Reductions of tensors that lie in the arena on no rank, on some and on all."""
    found = []
    for users in (0, 1, 2, 3):
        length = 100_000
        tensor = dist.empty(length) if dist.get_rank() < users else torch.empty(length)
        dist.all_reduce(tensor.fill_(1.0))
        found += [float(tensor.min()), float(tensor.max())]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_have_mapped_the_heaps_work_with_ranks_that_have_not(kind: str) -> None:
    assert run(kind, 3, some_ranks_have_mapped_their_heaps) == [[3.0] * 8] * 3


def test_the_rank_that_makes_the_arena_decides_how_large_the_heaps_are() -> None:
    layout = layout_for(2)
    made, descriptor = Arena.create(replace(layout, heap_bytes=5 * GIB), "arena")
    try:
        entered = Arena.attach(descriptor, layout)
    finally:
        os.close(descriptor)
    assert entered.layout == made.layout
    Heap(made, 1).empty((10,), torch.int64).fill_(7)
    assert entered.heaps[5 * GIB :][:80].view("int64").tolist() == [7] * 10


def with_limit(which: int, limit: int) -> tuple[int, int]:
    """Under a limit, the bytes of one heap and what was written into it; then no room is left."""
    resource.setrlimit(which, (limit, limit))
    layout = layout_for(2)
    total = Heap(make(layout), 1).empty((1000,), torch.int64).fill_(1).sum()
    return layout.heap_bytes, int(total)


def address_space_in_use() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


@pytest.mark.parametrize(
    ("which", "limit"),
    [(resource.RLIMIT_FSIZE, GIB), (resource.RLIMIT_AS, 8 * GIB)],
    ids=["file size", "address space"],
)
def test_heaps_keep_within_the_limits_of_the_process(which: int, limit: int) -> None:
    if which == resource.RLIMIT_AS:
        limit += address_space_in_use()
    heap_bytes, total = Child(lambda: with_limit(which, limit)).result()
    assert 100 << 20 < heap_bytes < limit
    assert total == 1000


def test_no_address_space_for_the_heaps_is_an_error_of_who_asks_for_them() -> None:
    def fail() -> str:
        arena = make(layout_for(2))
        resource.setrlimit(resource.RLIMIT_AS, (address_space_in_use() + (64 << 20),) * 2)
        with pytest.raises(DistBackendError) as caught:
            Heap(arena, 0).empty((10,), torch.float32)
        return str(caught.value)

    assert "GiB of address space: [Errno 12]" in Child(fail).result()


def test_core_dumps_leave_out_all_but_the_control_blocks_and_records() -> None:
    """A dump reads every page of a mapping, which would take memory for all that was never touched."""
    arena = make(layout_for(4))
    heap = Heap(arena, 0)
    tensor = heap.empty((10,), torch.float32)
    starts = {
        arena.address,
        arena.address + at.align(arena.layout.slots, at.LARGEST_PAGE),
        heap.first_address,
    }
    flags: dict[int, set[str]] = {}
    start = 0
    with open("/proc/self/smaps") as file:
        for line in file:
            head, *rest = line.split()
            if head == "VmFlags:":
                flags[start] = set(rest)
            elif not head.endswith(":"):
                start = int(head.split("-")[0], 16)
    assert sorted("dd" in flags.get(each, ()) for each in starts) == [False, True, True]
    assert "dd" not in flags[arena.address]
    del tensor
