"""Pieces that are left in buffers by ordinary stores, past the caches, or both, are the same pieces."""

from __future__ import annotations

import pytest
import torch

import torchestra as dist
from torchestra.engine import layout as at
from worlds import run

# Ticks by ordinary stores and past the caches, and the pieces before, of which the eighth is measured.
WAYS = {"ordinary": (1, 1, 8), "past caches": (9, 1, 8), "measured": (0, 0, 7), "measured, past": (9, 1, 7)}
COUNT = 300_001  # float32: more than a chunk, and no whole number of lines


def reduced(way: tuple[int, int, int], lists: bool) -> list[torch.Tensor]:
    """Return what some operations give on this rank, each begun in the way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    context = dist.group.WORLD.communicator.engine.context
    mine = torch.arange(COUNT, dtype=torch.float32) + rank
    found = []

    def begin(count: int = COUNT) -> torch.Tensor:
        ordinary, past, before = way
        context.store_word(at.FILL_TICKS, ordinary)
        context.store_word(at.FILL_TICKS + 8, past)
        context.store_word(at.FILLS, before)
        return mine[:count].clone()

    if lists:
        whole = begin()
        parts = list(whole.split([5, 100_000, COUNT - 100_005]))
        dist.group.WORLD.communicator.all_reduce_list(parts, dist.ReduceOp.SUM)
        return [whole]
    for count in (20_000, COUNT):
        tensor = begin(count)
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(gathered := torch.empty(size * count), begin(count))
        dist.reduce_scatter_tensor(scattered := torch.empty(count // size), begin(count // size * size))
        dist.broadcast(sent := begin(count), 1)
        dist.all_to_all_single(exchanged := torch.empty(count // size * size), begin(count // size * size))
        found += [tensor, gathered, scattered, sent, exchanged]
    if way[2] == 7:
        begin()
        dist.all_reduce(mine.clone())
        assert min(context.load_word(at.FILL_TICKS), context.load_word(at.FILL_TICKS + 8)) > 0
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("lists", [False, True], ids=["one tensor", "lists"])
def test_every_way_leaves_the_same_pieces(size: int, lists: bool) -> None:
    by_way = {name: run("threads", size, reduced, way, lists) for name, way in WAYS.items()}
    whole = torch.arange(COUNT, dtype=torch.float32)
    total = sum(whole + rank for rank in range(size))
    for found in by_way.values():
        for rank in range(size):
            assert torch.equal(found[rank][-5 if not lists else 0], total)
            assert all(map(torch.equal, found[rank], by_way["ordinary"][rank]))
