"""Shapes, dtypes, lengths and thresholds as hypothesis finds them."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchestra as dist
from references import DEFINED, reduced, same_bits, sample
from thresholds import use_thresholds
from torchestra.types import ReduceOp
from worlds import run

_SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

SIZES = st.integers(1, 5)
# Lengths with many zeros and many small ones.
LENGTHS = st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 200))
SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.uint8, torch.bfloat16, torch.int64, torch.complex128])
CHUNKS = st.sampled_from([64, 128, 448, 1024])
DIRECT = st.sampled_from([0, 64, 300, 100_000])
ARENA = st.booleans()


def tensor_of(values: torch.Tensor, in_arena: bool) -> torch.Tensor:
    if not in_arena:
        return values.clone()
    return dist.empty(tuple(values.shape), dtype=values.dtype).copy_(values)


def reduce_shapes(
    shape: tuple[int, ...], pair: tuple[torch.dtype, ReduceOp], direct: int, chunk: int, arena: list[bool]
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype, op = pair
    use_thresholds(direct, chunk, stream_above=600)
    length = torch.Size(shape).numel()
    inputs = [sample(dtype, length, seed=peer).view(shape) for peer in range(size)]
    tensor = tensor_of(inputs[rank], arena[rank])
    dist.all_reduce(tensor, op)
    signed_zeros = op not in (ReduceOp.MIN, ReduceOp.MAX)
    assert same_bits(tensor, reduced(inputs, op), signed_zeros=signed_zeros)
    root = length % size
    tensor = tensor_of(inputs[rank], arena[rank])
    dist.reduce(tensor, root, op)
    assert same_bits(tensor, reduced(inputs, op) if rank == root else inputs[rank], signed_zeros=signed_zeros)
    tensor = tensor_of(inputs[rank], arena[rank])
    dist.broadcast(tensor, root)
    assert same_bits(tensor, inputs[root])


@_SETTINGS
@given(SIZES, SHAPES, st.sampled_from(DEFINED), DIRECT, CHUNKS, st.lists(ARENA, min_size=5, max_size=5))
def test_reductions_of_any_shape(
    size: int,
    shape: tuple[int, ...],
    pair: tuple[torch.dtype, ReduceOp],
    direct: int,
    chunk: int,
    arena: list[bool],
) -> None:
    run("threads", size, reduce_shapes, shape, pair, direct, chunk, arena)


def exchange(lengths: list[list[int]], width: int, dtype: torch.dtype, chunk: int, listed: bool) -> None:
    """Rank p sends ``lengths[p][q]`` rows of ``width`` elements to rank q."""
    rank, size = dist.get_rank(), dist.get_world_size()
    use_thresholds(0, chunk, stream_above=600)

    def sent(sender: int, receiver: int) -> torch.Tensor:
        rows = lengths[sender][receiver]
        return sample(dtype, rows * width, seed=sender * 10 + receiver).view(rows, width)

    inputs = [sent(rank, peer) for peer in range(size)]
    expected = [sent(peer, rank) for peer in range(size)]
    if listed:
        outputs = [torch.zeros_like(tensor) for tensor in expected]
        dist.all_to_all(outputs, inputs)
        assert all(map(same_bits, outputs, expected))
        return
    output = torch.zeros_like(torch.cat(expected))
    splits = [row[rank] for row in lengths[:size]], lengths[rank][:size]
    dist.all_to_all_single(output, torch.cat(inputs), *splits)
    assert same_bits(output, torch.cat(expected))


@_SETTINGS
@given(
    SIZES,
    st.lists(st.lists(LENGTHS, min_size=5, max_size=5), min_size=5, max_size=5),
    st.integers(0, 3),
    DTYPES,
    CHUNKS,
    st.booleans(),
)
def test_exchanges_of_any_lengths(
    size: int, lengths: list[list[int]], width: int, dtype: torch.dtype, chunk: int, listed: bool
) -> None:
    run("threads", size, exchange, [row[:size] for row in lengths], width, dtype, chunk, listed)


def collect(lengths: list[int], dtype: torch.dtype, chunk: int, arena: list[bool]) -> None:
    """Gather and reduce lists whose tensors differ in length from rank to rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    use_thresholds(0, chunk, stream_above=600)
    inputs = [sample(dtype, lengths[peer], seed=peer) for peer in range(size)]
    outputs = [tensor_of(torch.zeros_like(tensor), arena[rank]) for tensor in inputs]
    dist.all_gather(outputs, tensor_of(inputs[rank], arena[rank]))
    assert all(map(same_bits, outputs, inputs))
    parts = [[sample(dtype, lengths[to], seed=peer * 10 + to) for to in range(size)] for peer in range(size)]
    output = tensor_of(torch.zeros_like(parts[0][rank]), arena[rank])
    dist.reduce_scatter(output, parts[rank])
    assert same_bits(output, reduced([parts[peer][rank] for peer in range(size)], ReduceOp.SUM))


@_SETTINGS
@given(
    SIZES,
    st.lists(LENGTHS, min_size=5, max_size=5),
    DTYPES,
    CHUNKS,
    st.lists(ARENA, min_size=5, max_size=5),
)
def test_lists_of_any_lengths(
    size: int, lengths: list[int], dtype: torch.dtype, chunk: int, arena: list[bool]
) -> None:
    run("threads", size, collect, lengths[:size], dtype, chunk, arena)
