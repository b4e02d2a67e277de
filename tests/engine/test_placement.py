"""Ranks that share cores: who moves where, and that it is a push and not a pin."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest

from torchestra.engine import layout as at
from torchestra.engine.kernels import placement

CORES = sorted(os.sched_getaffinity(0))

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores to move between")


class Rank:
    """A rank's context and the control blocks of its group, in memory of this test's own."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.control = np.zeros((size, at.CONTROL_BYTES // 8), dtype=np.int64)
        self.masks = np.zeros(2 * at.MASK_BYTES // 8, dtype=np.int64)
        self.words = np.zeros(at.CONTEXT_BYTES // 8, dtype=np.int64)
        for offset, value in (
            (at.RANK, rank),
            (at.SIZE, size),
            (at.CONTROL, self.control.ctypes.data),
            (at.CORES, len(CORES)),
            (at.MASKS, self.masks.ctypes.data),
            (at.NEXT_REBALANCE, placement.REBALANCE_EVERY),
        ):
            self.words[offset // 8] = value

    def see(self, cores: Sequence[int]) -> None:
        self.control[:, at.CORE // 8] = np.array(cores) + 1

    @property
    def core(self) -> int:
        return int(self.control[self.rank, at.CORE // 8]) - 1

    def load_word(self, offset: int) -> int:
        return int(self.words[offset // 8])

    def rebalance(self) -> None:
        placement.rebalance(self.words.ctypes.data)


def current_core(rank: Rank) -> int:
    """The core of this thread, as the kernel sees it."""
    rank.see([-1] * len(rank.control))
    rank.rebalance()
    return rank.core


def looks_with_all_on_its_core(rank: Rank) -> int:
    """Let the rank look while all seem to be where it is; that core. (The system may move it in between.)"""
    for _ in range(1000):
        core = current_core(rank)
        rank.words[at.NEXT_REBALANCE // 8] = placement.REBALANCE_EVERY
        rank.see([core] * len(rank.control))
        rank.rebalance()
        stays_away = rank.load_word(at.NEXT_REBALANCE) > placement.REBALANCE_EVERY  # as after its own move
        if rank.core == core or stays_away:
            return core
    raise AssertionError("the system kept moving this thread")


def test_the_last_rank_on_a_crowded_core_moves_to_an_empty_one_and_stays_free() -> None:
    rank = Rank(rank=3, size=4)
    left = looks_with_all_on_its_core(rank)
    assert rank.core != left
    assert rank.core in CORES
    assert sorted(os.sched_getaffinity(0)) == CORES


def test_moves_become_rarer_until_nobody_is_crowded() -> None:
    rank = Rank(rank=3, size=4)
    looks_with_all_on_its_core(rank)
    assert (
        rank.load_word(at.NEXT_REBALANCE)
        == rank.load_word(at.UNTIL_REBALANCE)
        == 2 * placement.REBALANCE_EVERY
    )
    rank.see([-1] * 4)
    rank.rebalance()
    assert (
        rank.load_word(at.NEXT_REBALANCE) == rank.load_word(at.UNTIL_REBALANCE) == placement.REBALANCE_EVERY
    )


def test_only_the_last_rank_on_a_core_moves() -> None:
    rank = Rank(rank=2, size=4)
    core = looks_with_all_on_its_core(rank)
    assert rank.core == core


def test_a_core_with_its_fair_share_is_not_left() -> None:
    rank = Rank(rank=3, size=2 * len(CORES))
    for _ in range(1000):
        core = current_core(rank)
        others = [each for each in CORES if each != core]
        rank.see([core, *others, *others, core])
        rank.see([*others, *others, core, core][: 2 * len(CORES)])
        rank.control[3, at.CORE // 8] = core + 1
        rank.words[at.NEXT_REBALANCE // 8] = placement.REBALANCE_EVERY + 1
        rank.rebalance()
        if rank.load_word(at.NEXT_REBALANCE) == placement.REBALANCE_EVERY:
            break  # else the system may have moved it in between, to where it is one too many
    else:
        raise AssertionError("it leaves its core each time")
    assert sorted(os.sched_getaffinity(0)) == CORES


def test_a_wait_rebalances_once_in_a_while_only() -> None:
    rank = Rank(rank=0, size=2)
    context = rank.words.ctypes.data
    placement.rebalance_sometimes(context)
    rank.see([-1, -1])
    for _ in range(placement.REBALANCE_EVERY):
        placement.rebalance_sometimes(context)
        assert rank.core == -1
    placement.rebalance_sometimes(context)
    assert rank.core in CORES
