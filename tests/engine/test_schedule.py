"""Test how often ranks wait for each other in an operation, as docs/algorithms.md has it ("meetings").

A rank's PROGRESS word tells: an operation takes one sequence number, and its last step is the number of
meetings. So an additional synchronisation, which no test of results could see, shows here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.engine.kernels.selection import Choices
from torchestra.engine.membership.rank_context import RankContext
from worlds import run

CHOICES = Choices(direct=1024, chunk=4096, share=2048)
SIZES = (1, 2, 3, 5)
# Elements of one byte. Around the limits of what is direct, of a chunk, of what is shared, of a part.
LENGTHS = (0, 1, 1023, 1024, 1025, 2048, 2049, 4096, 4097, 12_288, 20_001)

Operation = Callable[[torch.Tensor, int], object]


def context() -> RankContext:
    return dist.group.WORLD.communicator.engine.context


def own_progress() -> tuple[int, int]:
    """The number and the last finished step of this rank's last operation."""
    word = context().arena.progress(context().rank)
    return word >> at.STEP_BITS, word & ((1 << at.STEP_BITS) - 1)


def meetings(operation: Operation, length: int, in_arena: bool) -> int:
    size = dist.get_world_size()
    tensor = dist.zeros(length, dtype=torch.uint8) if in_arena else torch.zeros(length, dtype=torch.uint8)
    before, _ = own_progress()
    operation(tensor, size)
    after, step = own_progress()
    assert after == before + 1, "more than one operation"
    return step


def all_meetings(operation: Operation, in_arena: bool) -> list[int]:
    dist.group.WORLD.communicator.engine.choices = CHOICES
    return [meetings(operation, length, in_arena) for length in LENGTHS]


def chunks(length: int, chunk: int) -> int:
    return max(1, -(-length // chunk))


# -- the operations, each on a tensor of as many bytes


def all_reduce(tensor: torch.Tensor, size: int) -> None:
    dist.all_reduce(tensor)


def reduce(tensor: torch.Tensor, size: int) -> None:
    dist.reduce(tensor, size - 1)


def broadcast(tensor: torch.Tensor, size: int) -> None:
    dist.broadcast(tensor, size - 1)


def all_gather(tensor: torch.Tensor, size: int) -> None:
    dist.all_gather([torch.empty_like(tensor) for _ in range(size)], tensor)


def all_gather_into_tensor(tensor: torch.Tensor, size: int) -> None:
    dist.all_gather_into_tensor(tensor.new_empty(size * tensor.numel()), tensor)


def gather(tensor: torch.Tensor, size: int) -> None:
    outputs = [torch.empty_like(tensor) for _ in range(size)]
    dist.gather(tensor, outputs if dist.get_rank() == 0 else None, 0)


def reduce_scatter(tensor: torch.Tensor, size: int) -> None:
    dist.reduce_scatter(tensor, [torch.zeros_like(tensor) for _ in range(size)])


def reduce_scatter_tensor(tensor: torch.Tensor, size: int) -> None:
    dist.reduce_scatter_tensor(tensor, tensor.new_zeros(size * tensor.numel()))


def scatter(tensor: torch.Tensor, size: int) -> None:
    pieces = [torch.zeros_like(tensor) for _ in range(size)]
    dist.scatter(tensor, pieces if dist.get_rank() == 0 else None, 0)


def all_to_all(tensor: torch.Tensor, size: int) -> None:
    dist.all_to_all([torch.empty_like(tensor) for _ in range(size)], [tensor] * size)


def all_to_all_single(tensor: torch.Tensor, size: int) -> None:
    dist.all_to_all_single(tensor.new_empty(size * tensor.numel()), tensor.repeat(size))


# -- what the table in docs/algorithms.md says


@pytest.mark.parametrize("size", SIZES)
def test_a_barrier_is_one_meeting(size: int) -> None:
    def steps() -> list[int]:
        return [meetings(lambda tensor, size: dist.barrier(), 0, False) for _ in range(3)]

    assert run("threads", size, steps) == [[1] * 3] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("operation", [all_reduce, reduce])
def test_all_reduce_meets_once_or_once_a_chunk_and_once_more(operation: Operation, size: int) -> None:
    expected = [1 if length <= CHOICES.direct else chunks(length, CHOICES.chunk) + 1 for length in LENGTHS]
    assert run("threads", size, all_meetings, operation, False) == [expected] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("operation", [all_reduce, reduce])
def test_all_reduce_in_place_meets_at_the_start_and_at_the_end(operation: Operation, size: int) -> None:
    expected = [1 if length <= CHOICES.direct else 2 for length in LENGTHS]
    assert run("threads", size, all_meetings, operation, True) == [expected] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("operation", [broadcast, all_gather, all_gather_into_tensor, gather])
def test_sharing_meets_once_a_part(operation: Operation, size: int) -> None:
    expected = [chunks(length, CHOICES.share) for length in LENGTHS]
    assert run("threads", size, all_meetings, operation, False) == [expected] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("operation", [broadcast, all_gather, all_gather_into_tensor, gather])
def test_sharing_in_place_meets_at_the_start_and_at_the_end(operation: Operation, size: int) -> None:
    expected = [min(2, chunks(length, CHOICES.share)) for length in LENGTHS]
    assert run("threads", size, all_meetings, operation, True) == [expected] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("in_arena", [False, True])
@pytest.mark.parametrize(
    "operation", [reduce_scatter, reduce_scatter_tensor, scatter, all_to_all, all_to_all_single]
)
def test_pieces_for_each_peer_meet_once_a_part(operation: Operation, size: int, in_arena: bool) -> None:
    """A chunk is divided among the peers."""
    part = CHOICES.chunk // max(1, size - 1)
    part -= part % 64
    expected = [chunks(length, part) for length in LENGTHS]
    assert run("threads", size, all_meetings, operation, in_arena) == [expected] * size


def uneven_meetings() -> tuple[int, int]:
    """Rank r sends (r + 1) * 1000 bytes to every peer; the longest piece counts, on every rank."""
    dist.group.WORLD.communicator.engine.choices = CHOICES
    rank, size = dist.get_rank(), dist.get_world_size()
    source = torch.zeros(size * (rank + 1) * 1000, dtype=torch.uint8)
    lengths = [(peer + 1) * 1000 for peer in range(size)]
    target = torch.zeros(sum(lengths), dtype=torch.uint8)
    dist.all_to_all_single(target, source, lengths, [(rank + 1) * 1000] * size)
    _, exchanged = own_progress()
    outputs = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    dist.all_gather(outputs, torch.zeros((rank + 1) * 1000, dtype=torch.uint8))
    return exchanged, own_progress()[1]


def test_the_longest_piece_counts() -> None:
    assert run("threads", 5, uneven_meetings) == [(chunks(5000, 1024), chunks(5000, 2048))] * 5


def default_meetings() -> list[int]:
    dist.group.WORLD.communicator.engine.context.store_word(at.READER, at.REFUSED)
    return [meetings(operation, 4 << 20, False) for operation in (all_reduce, all_gather, all_to_all)]


LONG = (4096, 4097, 5000)
NEVER = 1 << 62


def meetings_of_long_pieces(operation: Operation, single_copy: int, unable: bool) -> list[int]:
    engine = dist.group.WORLD.communicator.engine
    engine.choices = dataclasses.replace(CHOICES, single_copy=single_copy)
    if unable and dist.get_rank() == 1:
        engine.context.store_word(at.READER, at.CANNOT)
    return [meetings(operation, length, False) for length in LONG]


@pytest.mark.parametrize("operation", [broadcast, all_gather, gather, scatter, all_to_all])
def test_what_is_read_where_it_lies_meets_at_the_start_and_at_the_end(operation: Operation) -> None:
    usual = run("threads", 3, meetings_of_long_pieces, operation, NEVER, False)[0]
    assert run("threads", 3, meetings_of_long_pieces, operation, 4096, False) == [[usual[0], 2, 2]] * 3


@pytest.mark.parametrize(("operation", "size"), [(all_gather, 2), (all_to_all, 2), (scatter, 3)])
def test_if_a_rank_cannot_read_all_meet_once_more_and_never_again(operation: Operation, size: int) -> None:
    usual = run("threads", size, meetings_of_long_pieces, operation, NEVER, False)[0]
    expected = [usual[0], usual[1] + 1, usual[2]]
    assert run("threads", size, meetings_of_long_pieces, operation, 4096, True) == [expected] * size


@pytest.mark.parametrize(("size", "expected"), [(2, [9, 32, 8]), (3, [9, 8, 16]), (5, [9, 8, 32])])
def test_the_chunks_are_those_that_were_measured_to_be_best(size: int, expected: list[int]) -> None:
    """4 MiB with the thresholds that a group has by itself: chunks of 512 KiB (128 where two share)."""
    assert run("threads", size, default_meetings) == [expected] * size
