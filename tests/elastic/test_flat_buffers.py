"""Flat buffers serve on when their group has been replaced, until new ones have taken their place."""

from __future__ import annotations

import pytest
import torch

import torchestra as dist
from torchestra.elastic import flat_buffers
from torchestra.elastic.flat_buffers import BufferPool, FlatLayout
from worlds import KINDS, outcomes

NUMEL = 1000


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether the ranks of the default group read this tensor where it lies."""
    found: bool = dist.group.WORLD.communicator.engine.is_in_heap(tensor.data_ptr())
    return found


def outlive_a_group() -> list[int]:
    layout = FlatLayout([torch.zeros(NUMEL)], [0])
    pool = BufferPool(layout, dist.group.WORLD)
    first, second = pool.take(), pool.take()
    memory = [first.flat.data_ptr(), second.flat.data_ptr()]
    assert is_shared(first.flat)
    first.flat.fill_(3.0)
    pool.give_back(second)
    store, rank = dist.group.WORLD.store, dist.get_rank()
    store.set(f"has buffers/{rank}", b"1")
    store.wait([f"has buffers/{each}" for each in range(3)])  # the group ends for all with the first shrink()
    if rank == 2:
        raise SystemExit
    group = dist.group.WORLD.shrink()
    pool.use(group)
    assert pool.adopt(first) is first, "what is lent keeps its memory, and its elements"
    assert first.flat[:NUMEL].eq(3.0).all()
    assert len(first.flat) == layout.padded(2)
    assert not first.flat[layout.length :].any()
    total = torch.empty(2 * len(first.flat))
    dist.all_gather_into_tensor(total, first.flat)  # of the old group's memory, by the new one
    assert all(each[:NUMEL].eq(3.0).all() for each in total.chunk(2))
    pool.give_back(first)
    found = []
    for _ in range(3):  # both are replaced, one in each call, and then there is nothing left to do
        lent = [pool.take(), pool.take()]
        found.append(sum(is_shared(each.flat) for each in lent))
        assert found[-1] or {each.flat.data_ptr() for each in lent} == set(memory)
        for each in lent:
            pool.give_back(each)
        pool.renew()
    assert is_shared(pool.take().flat)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_outlive_their_group_and_are_replaced_one_by_one(kind: str) -> None:
    ended = outcomes(kind, 3, outlive_a_group)
    assert [each.value for each in ended[:2]] == [[0, 1, 2]] * 2, ended


def change_groups_amid_renewal() -> int:
    """Return how many buffers there are in the end."""
    flat_buffers._RENEWED_BYTES = NUMEL  # several steps for each
    pool = BufferPool(FlatLayout([torch.zeros(NUMEL)], [0]), dist.group.WORLD)
    for each in [pool.take(), pool.take()]:
        pool.give_back(each)
    for _ in range(3):
        pool.use(dist.group.WORLD.shrink())
        pool.renew()
        pool.renew()
    steps = 0
    while not is_shared(pool._free[0].flat):
        pool.renew()
        steps += 1
        assert steps < 100
    assert pool._next is None or is_shared(pool._next.flat)
    return len(pool._free)


def test_buffers_whose_renewal_was_cut_off_do_not_add_up() -> None:
    (ended,) = outcomes("processes", 1, change_groups_amid_renewal)
    assert ended.value == 2, ended


@pytest.mark.parametrize("numel", [1, 15, 16, 1000, 1008, 5000])
def test_a_buffer_suffices_for_any_number_of_ranks_that_the_group_may_have(numel: int) -> None:
    layout = FlatLayout([torch.zeros(numel)], [0])
    assert max(map(layout.padded, range(1, 65))) <= layout.capacity(64)


def renew_bit_by_bit() -> int:
    flat_buffers._RENEWED_BYTES = NUMEL
    pool = BufferPool(FlatLayout([torch.zeros(NUMEL)], [0]), dist.group.WORLD)
    pool.give_back(pool.take())
    pool.use(dist.group.WORLD.shrink())
    steps = 0
    while not is_shared((lent := pool.take()).flat):
        pool.give_back(lent)
        pool.renew()
        steps += 1
        assert steps < 100
    return steps


def test_no_step_has_to_touch_more_than_its_share() -> None:
    """The elements, in whole cache lines, and the padding for 64 ranks are touched 1,000 bytes at a time."""
    (ended,) = outcomes("processes", 1, renew_bit_by_bit)
    assert ended.value == -(-(4032 + 64 * 64) // NUMEL), ended
