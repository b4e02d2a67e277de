"""Tensors in the arena: where they lie, and when their memory is used again."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.engine.memory import heap as heap_module
from torchestra.engine.memory.arena import Arena
from torchestra.engine.memory.heap import Heap
from torchestra.errors import InvalidArgumentError
from worlds import KINDS, mapped_files, mappings, run

SOON = 20.0
HEAP_BYTES = 64 << 20
TraceFunction = Callable[[FrameType, str, Any], Any]


@pytest.fixture
def heap() -> Heap:
    arena, descriptor = Arena.create(at.Layout(2, 4096, 4096, 0, HEAP_BYTES), "heap")
    os.close(descriptor)
    return Heap(arena, 1)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def test_tensors_do_not_overlap_and_lie_in_the_heap(heap: Heap) -> None:
    tensors = [heap.empty((length,), torch.float64) for length in (1, 15, 16, 17, 1000)]
    spans = sorted(span(tensor) for tensor in tensors)
    assert heap.first_address <= spans[0][0]
    assert spans[-1][1] <= heap.last_address
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    for tensor in tensors:
        assert heap.offset_of(tensor.data_ptr()) == tensor.data_ptr() - heap.first_address


def test_every_tensor_begins_on_a_cache_line(heap: Heap) -> None:
    tensors = [heap.empty((3,), torch.uint8) for _ in range(5)]
    assert {tensor.data_ptr() % 128 for tensor in tensors} == {0}


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (), (1,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex128])
def test_any_shape_and_dtype(heap: Heap, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = heap.empty(shape, dtype)
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    tensor.fill_(1)
    assert tensor.sum() == tensor.numel()


def test_memory_comes_back_when_the_last_view_dies(heap: Heap) -> None:
    tensor = heap.empty((100,), torch.float32)
    address, view = tensor.data_ptr(), tensor[50:].view(2, 25)
    del tensor
    assert heap.empty((100,), torch.float32).data_ptr() != address
    del view
    assert heap.empty((100,), torch.float32).data_ptr() == address


def test_neighbours_that_are_free_become_one_range(heap: Heap) -> None:
    tensors = [heap.empty((128,), torch.uint8) for _ in range(4)]
    address = tensors[0].data_ptr()
    for index in (0, 2, 1):  # the last joins the two others
        tensors[index] = None
    assert heap.empty((384,), torch.uint8).data_ptr() == address


def test_a_full_heap_says_so_and_can_be_used_when_there_is_room_again(heap: Heap) -> None:
    most = heap.empty((HEAP_BYTES - 256,), torch.uint8)
    with pytest.raises(
        InvalidArgumentError, match=f"no 384 bytes are left in this rank's heap of {HEAP_BYTES}"
    ):
        heap.empty((300,), torch.uint8)
    rest = heap.empty((256,), torch.uint8)
    del most
    assert span(heap.empty((300,), torch.uint8))[1] <= span(rest)[0]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[2]) * mmap.PAGESIZE


def test_memory_of_large_tensors_goes_back_to_the_system(heap: Heap) -> None:
    before = resident_bytes()
    tensor = heap.empty((48 << 20,), torch.uint8).fill_(1)
    assert resident_bytes() - before > 40 << 20
    del tensor
    assert resident_bytes() - before < 8 << 20


def test_the_last_large_ranges_keep_their_pages_for_those_who_want_them_again(heap: Heap) -> None:
    length = 3 << 20
    before = resident_bytes()
    addresses = {heap.empty((length - number,), torch.uint8).fill_(1).data_ptr() for number in range(20)}
    assert len(addresses) == 1
    assert resident_bytes() - before < 2 * length
    tensors = [heap.empty((length,), torch.uint8).fill_(1) for _ in range(heap_module._KEPT_RANGES + 5)]
    tensors.clear()
    kept = resident_bytes() - before
    assert length < kept < (heap_module._KEPT_RANGES + 2) * length
    assert heap.empty((HEAP_BYTES,), torch.uint8).data_ptr() == heap.first_address  # none is lost


def test_a_tensor_that_dies_in_the_middle_of_an_allocation_does_no_harm(heap: Heap) -> None:
    """The garbage collector runs finalisers wherever it likes; here one runs at every line of the heap."""
    mortal = [heap.empty((number * 37 % 400 + 1,), torch.int16) for number in range(400)]
    kept = []

    def let_one_die(frame: FrameType, event: str, argument: object) -> TraceFunction:
        if mortal and frame.f_code.co_filename == heap_module.__file__:
            mortal.pop(len(mortal) * 7 // 11)
        return let_one_die

    before = sys.gettrace()
    sys.settrace(let_one_die)
    try:
        kept.extend(heap.empty((number % 300 + 1,), torch.int16) for number in range(100))
    finally:
        sys.settrace(before)
    assert not mortal
    spans = sorted(span(tensor) for tensor in kept)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    kept.clear()
    assert heap.empty((HEAP_BYTES,), torch.uint8).data_ptr() == heap.first_address


def outlive_the_group() -> bool:
    tensor = dist.empty(1000, dtype=torch.float32)
    tensor.fill_(dist.get_rank())
    dist.all_reduce(tensor)
    expected = float(sum(range(dist.get_world_size())))
    dist.destroy_process_group()
    tensor += 1
    return bool((tensor == expected + 1).all()) and len(mappings()) >= 1


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_outlive_their_group(kind: str) -> None:
    assert run(kind, 2, outlive_the_group) == [True, True]


def test_no_memory_is_mapped_when_group_and_tensors_are_gone() -> None:
    gc.collect()
    mapped = mapped_files()
    run("threads", 3, outlive_the_group)
    gc.collect()
    deadline = time.monotonic() + SOON
    while left := mapped_files() - mapped:  # a thread that ends holds what is left for a moment
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def shapes_and_fills() -> None:
    assert (
        dist.empty(2, 3).shape == dist.empty((2, 3)).shape == dist.empty(torch.Size([2, 3])).shape == (2, 3)
    )
    assert dist.empty(2).dtype == torch.get_default_dtype()
    assert dist.zeros(4, dtype=torch.int8).tolist() == [0] * 4
    assert dist.ones(2, dtype=torch.bool).tolist() == [True] * 2
    assert dist.full((2, 1), 2.5).tolist() == [[2.5], [2.5]]
    assert dist.empty(()).shape == ()


def test_makers_of_tensors_take_what_torchs_take() -> None:
    run("threads", 1, shapes_and_fills)
