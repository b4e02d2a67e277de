"""Tensors are put together and cut into chunks without gaps, overlaps or needless copies."""

from __future__ import annotations

import itertools
import weakref

import numpy as np
import pytest
import torch

from torchestra.engine.multihost.broadcast_gather import _as_few as as_few
from torchestra.engine.multihost.chunking import ChunkPlan, Joined, chunk_ends


def joined(*lengths: int) -> tuple[list[torch.Tensor], Joined]:
    numbers = iter(torch.arange(sum(lengths)).split(1))
    tensors = [torch.tensor([next(numbers).item() for _ in range(length)]) for length in lengths]
    return tensors, Joined(tensors)


@pytest.mark.parametrize("lengths", [(7,), (0, 3, 0, 4), (3, 4, 0), (1, 1, 5), (0,)])
def test_every_range_of_several_tensors_is_that_of_one(lengths: tuple[int, ...]) -> None:
    _, whole = joined(*lengths)
    assert whole.numel == sum(lengths)
    for start in range(whole.numel + 1):
        for stop in range(start, whole.numel + 1):
            assert whole.get(start, stop).tolist() == list(range(start, stop))


def test_what_is_in_one_tensor_is_not_copied() -> None:
    tensors, whole = joined(3, 4, 2)
    assert whole.get(4, 7).data_ptr() == tensors[1][1:].data_ptr()
    buffer = whole.buffer(3, 6)
    buffer.fill_(9)
    whole.put(3, buffer)
    assert tensors[1].tolist() == [9, 9, 9, 6]


def test_tensors_that_adjoin_live_as_long_as_what_is_taken_of_them_together() -> None:
    """Else a bridge that still sends from an output, when its program has dropped it, ends the process."""
    owner = np.arange(8, dtype=np.uint8)
    outputs = [torch.from_numpy(owner[:4]), torch.from_numpy(owner[4:])]
    gone = weakref.ref(owner)
    (whole,) = as_few(outputs)
    part = Joined([whole]).get(2, 6)
    del owner, outputs, whole
    assert gone() is not None
    assert part.tolist() == [2, 3, 4, 5]
    del part
    assert gone() is None


def test_what_is_put_across_tensors_lands_in_each() -> None:
    tensors, whole = joined(3, 4, 2)
    buffer = whole.buffer(2, 8)
    buffer.copy_(torch.arange(10, 16))
    whole.put(2, buffer)
    assert [tensor.tolist() for tensor in tensors] == [[0, 1, 10], [11, 12, 13, 14], [15, 8]]


@pytest.mark.parametrize("lengths", [(10, 3), (0, 0), (1, 17), (8,)])
@pytest.mark.parametrize("rails", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_chunks_of_all_rails_make_up_every_block(
    lengths: tuple[int, ...], rails: int, chunk: int
) -> None:
    cuts = ChunkPlan(lengths, rails, chunk)
    for host, length in enumerate(lengths):
        spans = [cuts.span(host, rail, number) for rail in range(rails) for number in range(cuts.chunks)]
        covered = [place for start, stop in spans for place in range(start, stop)]
        assert covered == list(range(length))
        assert all(stop - start <= chunk for start, stop in spans)
        assert cuts.span(host, rails, 0) == (0, 0)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 100, 4096, 10_007])
@pytest.mark.parametrize("longest", [1, 16, 1000])
def test_chunks_begin_and_end_short(length: int, longest: int) -> None:
    ends = chunk_ends(length, longest)
    sizes = [stop - start for start, stop in itertools.pairwise([0, *ends])]
    assert sum(sizes) == length
    assert all(0 < size <= longest for size in sizes)
    if length > 4 * longest > 16:
        assert sizes[0] <= longest // 4
        assert longest in sizes
        assert sizes[-1] <= longest // 4
