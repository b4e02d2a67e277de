"""The conventions of sizes, and the check of results: it must accept what is right and nothing else."""

import numpy as np
import pytest

from benchmarks.ranks.shapes import OPERATIONS, Pattern, partner, pieces, shape

MOVING = [operation for operation in OPERATIONS if operation != "barrier"]


def given(rank: int, count: int) -> np.ndarray:
    return ((np.arange(count) + 13 * rank) % 251).astype(np.float32)


def result(operation: str, rank: int, world: int, size: int) -> np.ndarray | None:
    """Return what the operation must leave on a rank, worked out the long way."""
    count = shape(operation, size, world).given
    inputs = [given(r, count) for r in range(world)]
    mine = [np.split(values, world)[rank] for values in inputs] if count % world == 0 else []
    if operation == "all_reduce" or (operation == "reduce" and rank == 0):
        return np.sum(inputs, axis=0)
    if operation == "broadcast":
        return inputs[0]
    if operation == "all_gather" or (operation == "gather" and rank == 0):
        return np.concatenate(inputs)
    if operation == "reduce_scatter":
        return np.sum(mine, axis=0)
    if operation == "all_to_all":
        return np.concatenate(mine)
    if operation == "scatter":
        return mine[0]
    if operation == "send_recv" and rank ^ 1 < world:
        return inputs[rank ^ 1]
    return None


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("operation", MOVING)
@pytest.mark.parametrize("size", [4, 4 * 12 * 251, 4 << 20])
def test_the_check_accepts_exactly_what_the_operation_must_give(operation, world, size):
    pattern = Pattern(world)
    for rank in range(world):
        expected = pieces(operation, rank, world, size)
        right = result(operation, rank, world, size)
        if right is None:
            assert expected == []
            continue
        buffers = shape(operation, size, world)
        assert right.size == (buffers.received or buffers.given)
        assert pattern.holds(right, expected)
        for place in (0, right.size // 2, right.size - 1):
            wrong = right.copy()
            wrong[place] += 1
            assert not pattern.holds(wrong, expected)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_filled_buffer_holds_the_values_of_its_rank(rank):
    buffer = np.empty(Pattern.BLOCK * 2 + 5, dtype=np.float32)
    Pattern(4).fill(buffer, rank)
    np.testing.assert_array_equal(buffer, given(rank, buffer.size))


def test_chunks_that_changed_places_are_noticed():
    """Chunks are powers of two, the pattern's period is not: no two of them are alike."""
    pattern, size = Pattern(2), 4 << 20
    right = result("all_reduce", 0, 2, size)
    half = right.size // 2
    assert not pattern.holds(np.roll(right, half), pieces("all_reduce", 0, 2, size))


@pytest.mark.parametrize(
    ("operation", "elements"),
    [
        ("all_reduce", (256, 0)),
        ("reduce", (256, 0)),
        ("broadcast", (256, 0)),
        ("all_gather", (256, 1024)),
        ("gather", (256, 1024)),
        ("reduce_scatter", (256, 64)),
        ("scatter", (256, 64)),
        ("all_to_all", (256, 256)),
        ("send_recv", (256, 256)),
        ("barrier", (0, 0)),
    ],
)
def test_a_size_is_what_a_rank_puts_in(operation, elements):
    buffers = shape(operation, 1024, 4)
    assert (buffers.given, buffers.received) == elements


def test_what_is_cut_into_parts_has_an_element_in_each():
    assert shape("reduce_scatter", 4, 4).given == 4
    assert shape("all_to_all", 4, 3).received == 3


def test_the_last_of_an_odd_number_has_no_partner():
    assert [partner(rank, 3) for rank in range(3)] == [1, 0, None]
