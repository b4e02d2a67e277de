"""Test copies past the caches: every byte, and none beside them."""

from __future__ import annotations

import numpy as np
import pytest

from torchestra.engine.kernels.copies import copy_past_caches

BLOCK = 1 << 14  # of four pages, which take turns


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 4096, BLOCK - 1, BLOCK, 2 * BLOCK + 64 + 7])
@pytest.mark.parametrize(("to", "origin"), [(0, 0), (4, 0), (60, 3), (63, 64)])
def test_what_is_copied_past_the_caches_is_all_and_nothing_else(length: int, to: int, origin: int) -> None:
    given = np.random.default_rng(length).integers(1, 256, 128 + length, dtype=np.uint8)
    taken = np.zeros(256 + length, dtype=np.uint8)
    first = -taken.ctypes.data % 64 + to
    copy_past_caches(taken.ctypes.data + first, given.ctypes.data + origin, length)
    np.testing.assert_array_equal(taken[first : first + length], given[origin : origin + length])
    assert not taken[:first].any()
    assert not taken[first + length :].any()
