"""all_reduce of sparse COO tensors."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchestra as dist
from devices import gpu
from torchestra.communicator import communicator
from torchestra.errors import CollectiveMismatchError, InvalidArgumentError
from worlds import KINDS, run


def coo(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


def with_a_diagonal(rank: int, size: int, sparse: int, dense: int) -> torch.Tensor:
    """Entries at 0 to rank in the first dimension, and at 0 in the others; values of 1."""
    indices = torch.zeros((sparse, rank + 1), dtype=torch.int64)
    indices[0] = torch.arange(rank + 1)
    values = torch.ones([rank + 1] + [2] * dense)
    return coo(indices, values, (size,) * sparse + (2,) * dense)


def random_coo(
    seed: int, shape: tuple[int, ...], sparse: int, entries: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Not coalesced: some of its entries are in the same place."""
    dice = torch.Generator().manual_seed(seed)
    indices = torch.stack(
        [torch.randint(0, length, (entries,), generator=dice) for length in shape[:sparse]]
        or [torch.zeros(entries, dtype=torch.int64)]
    )[:sparse]
    values = torch.randn((entries, *shape[sparse:]), generator=dice, dtype=torch.float64)
    if dtype.is_complex:
        return coo(indices, torch.complex(values, -values).to(dtype), shape)
    return coo(indices, values.to(dtype) if dtype.is_floating_point else (values * 5).to(dtype), shape)


def dense_sum(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Entry by entry, in a dtype that loses nothing that is tested."""
    exact = (
        torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    )
    total = torch.zeros(tensors[0].shape, dtype=exact)
    for tensor in tensors:
        for place, value in zip(tensor._indices().t().tolist(), tensor._values(), strict=True):
            total[tuple(place)] += value.to(exact)
    return total


# -- what it does


def the_basics() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for inputs in (1, 2):
        for sparse, dense in ((1, 0), (2, 0), (3, 0), (1, 1), (1, 2), (1, 3), (2, 1)):
            whole = size * inputs
            tensors = [
                with_a_diagonal(rank * inputs + number, whole, sparse, dense) for number in range(inputs)
            ]
            expected = sum(with_a_diagonal(peer, whole, sparse, dense).to_dense() for peer in range(whole))
            future = dist.group.WORLD.communicator.all_reduce_sparse(
                tensors, dist.ReduceOp.SUM, async_op=True
            ).get_future()
            results = future.wait()
            assert len(results) == inputs
            for tensor, result in zip(tensors, results, strict=True):
                assert result is tensor
                assert tensor.is_coalesced()
                assert (tensor.sparse_dim(), tensor.dense_dim()) == (sparse, dense)
                assert torch.equal(tensor.to_dense(), expected)
        tensor = with_a_diagonal(rank, size, 2, 1)
        assert dist.all_reduce(tensor) is None
        assert torch.equal(
            tensor.to_dense(), sum(with_a_diagonal(peer, size, 2, 1).to_dense() for peer in range(size))
        )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_of_several_dimensions_and_several_inputs(size: int) -> None:
    run("threads", size, the_basics)


def test_sums_among_processes() -> None:
    run("processes", 4, the_basics)


def with_and_without_entries() -> None:
    """Ranks with none, with the same and with other places; and all with none."""
    rank = dist.get_rank()
    for counts, sparse in (([0, 3, 0], 2), ([5, 0, 1], 1), ([0, 0, 0], 2), ([1, 200, 40], 2)):
        tensors = [random_coo(peer, (30, 4, 3), sparse, count) for peer, count in enumerate(counts)]
        mine = tensors[rank].clone()
        dist.all_reduce(mine)
        expected = dense_sum(tensors, torch.float32)
        torch.testing.assert_close(mine.to_dense().double(), expected, rtol=1e-5, atol=1e-5)
        places = {tuple(place) for tensor in tensors for place in tensor._indices().t().tolist()}
        assert mine._nnz() == len(places)
        assert mine.is_coalesced()


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_may_have_different_and_no_entries(kind: str) -> None:
    run(kind, 3, with_and_without_entries)


REDUCIBLE = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def every_dtype() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in REDUCIBLE:
        tensors = [random_coo(peer, (6, 2), 1, 9, dtype) for peer in range(size)]
        mine = tensors[rank].clone()
        dist.all_reduce(mine)
        assert mine.dtype is dtype
        expected = dense_sum(tensors, dtype)
        found = torch.zeros_like(expected)  # (torch cannot make all of these dense)
        found[mine.indices()[0]] = mine._values().to(found.dtype)
        if dtype.is_floating_point or dtype.is_complex:
            tolerance = 4 * torch.finfo(dtype).eps * 6
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(found.to(dtype), expected.to(dtype)), dtype
    flags = coo(torch.tensor([[rank, 3]]), torch.tensor([True, False]), (5,))
    dist.all_reduce(flags)
    assert flags.indices().tolist() == [sorted({*range(size), 3})]
    assert flags.values().tolist() == [place < size for place in sorted({*range(size), 3})]


def test_every_dtype_that_can_be_summed() -> None:
    run("threads", 3, every_dtype)


def sum_of_halves() -> None:
    """Added in half precision one by one, 2048 + 1 + 1 ... would stay 2048."""
    rank = dist.get_rank()
    values = torch.tensor([2048.0] + [1.0] * 64 if rank == 0 else [1.0] * 64, dtype=torch.float16)
    tensor = coo(torch.zeros((1, len(values)), dtype=torch.int64), values, (2,))
    dist.all_reduce(tensor)
    assert tensor.values().tolist() == [2048.0 + 128]


def test_half_precision_adds_in_float32() -> None:
    run("threads", 2, sum_of_halves)


def bits_of_a_sum(seed: int, sparse: int, counts: list[int]) -> tuple[list[list[int]], bytes]:
    rank = dist.get_rank()
    shape = (5, 4, 3)
    tensors = [random_coo(seed + peer, shape, sparse, count) for peer, count in enumerate(counts)]
    mine = tensors[rank].coalesce() if seed % 2 else tensors[rank]
    expected = dense_sum(tensors, torch.float32)
    summed(mine, bool(seed % 3))
    torch.testing.assert_close(mine.to_dense().double(), expected, rtol=1e-5, atol=1e-5)
    return mine.indices().tolist(), mine.values().numpy().tobytes()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sparse=st.integers(1, 3),
    counts=st.lists(st.integers(0, 30), min_size=3, max_size=3),
)
def test_all_ranks_have_the_same_bits(seed: int, sparse: int, counts: list[int]) -> None:
    results = run("threads", 3, bits_of_a_sum, seed, sparse, counts)
    assert all(result == results[0] for result in results)


def gradients() -> None:
    """Do as DistributedDataParallel does: gradients of a sparse embedding, and leaves that require grad."""
    rank, size = dist.get_rank(), dist.get_world_size()
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    with torch.no_grad():
        embedding.weight.fill_(1)
    embedding(torch.tensor([rank, rank, 9])).sum().backward()
    dist.all_reduce(embedding.weight.grad)
    expected = torch.zeros(10, 3)
    expected[:size] = 2
    expected[9] = size
    assert torch.equal(embedding.weight.grad.to_dense(), expected)
    leaf = coo(torch.tensor([[1]]), torch.tensor([2.0]), (3,)).requires_grad_()
    dist.all_reduce(leaf)
    assert leaf.to_dense().tolist() == [0, 2.0 * size, 0]
    assert leaf.requires_grad


def test_gradients_of_an_embedding() -> None:
    run("threads", 2, gradients)


@gpu
def test_sums_of_tensors_on_a_gpu() -> None:
    run("threads", 2, on_a_gpu)


def on_a_gpu() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for sparse, dense in ((1, 0), (2, 1)):
        for leaf in (False, True):
            tensor = with_a_diagonal(rank, size, sparse, dense).cuda().requires_grad_(leaf)
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            assert tensor.is_cuda
            expected = sum(with_a_diagonal(peer, size, sparse, dense).to_dense() for peer in range(size))
            assert torch.equal(tensor.detach().to_dense().cpu(), expected)
            assert work.result()[0] is tensor


def twins_elsewhere() -> None:
    """As on a GPU: what is summed are copies, and the tensors themselves get the result."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for leaf in (False, True):
        tensor = with_a_diagonal(rank, size, 1, 0).requires_grad_(leaf)
        dist.all_reduce(tensor)
        expected = sum(with_a_diagonal(peer, size, 1, 0).to_dense() for peer in range(size))
        assert torch.equal(tensor.detach().to_dense(), expected)


def test_results_of_copies_reach_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "on_cpu", lambda tensors: [each.detach().clone() for each in tensors])
    run("threads", 2, twins_elsewhere)


def in_order(gate: threading.Event) -> None:
    """Sparse and dense ones take their turns, also those nobody waits for."""
    tensor = coo(torch.tensor([[0, 2]]), torch.tensor([1.0, 1.0]), (4,))
    dense = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(tensor, async_op=True)
        dist.all_reduce(dense, async_op=True)
    dist.barrier()
    assert tensor.values().tolist() == [8.0, 8.0]
    assert dense.tolist() == [8.0] * 4


def test_they_keep_the_order_of_the_program() -> None:
    run("threads", 2, in_order, threading.Event())


def a_scalar() -> None:
    tensor = coo(torch.zeros((0, 1), dtype=torch.int64), torch.ones(1), ())
    dist.all_reduce(tensor)
    assert tensor.to_dense().item() == dist.get_world_size()


def test_no_sparse_dimension_at_all() -> None:
    run("threads", 2, a_scalar)


# -- what is refused


def wrong_calls() -> None:
    dense = torch.zeros(1)
    two, four = (coo(torch.tensor([[0]]), torch.ones(1), (length,)) for length in (2, 4))
    integers = coo(torch.tensor([[0]]), torch.tensor([1]), (2,))
    quarter = coo(torch.tensor([[0]]), torch.ones(1).to(torch.float8_e5m2), (2,))
    flat = coo(torch.tensor([[0], [0]]), torch.ones(1), (2, 2))
    hybrid = coo(torch.tensor([[0]]), torch.ones(1, 2), (2, 2))
    for tensors, phrase in (
        ([], "requires non-empty tensor list"),
        ([dense, two], "invalid tensor layout at index 0"),
        ([two, dense], "invalid tensor layout at index 1"),
        ([flat, hybrid], "invalid tensor layout at index 1"),
        ([two, four], "invalid tensor size at index 1"),
        ([two, integers], "invalid tensor type at index 1"),
        (["two"], "expected a list of tensors"),
        ([quarter], "SUM is not defined for tensors of dtype torch.float8_e5m2"),
        ([coo(torch.zeros((17, 1)).long(), torch.ones(1), (1,) * 17)], "may have 16 dimensions"),
    ):
        with pytest.raises(InvalidArgumentError, match=phrase):
            dist.group.WORLD.communicator.all_reduce_sparse(tensors, dist.ReduceOp.SUM)
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
        with pytest.raises(RuntimeError, match=r"unsupported reduction operation .* only works with"):
            dist.all_reduce(two, op)
    into = torch.zeros(2)
    for name, call in {
        "reduce": lambda: dist.reduce(two, 0),
        "broadcast": lambda: dist.broadcast(two, 0),
        "all_gather": lambda: dist.all_gather([into, into.clone()], two),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(into, two),
        "send": lambda: dist.send(two, 1 - dist.get_rank()),
    }.items():
        with pytest.raises(RuntimeError, match=rf"unsupported layout .*: {name} only supports dense tensors"):
            call()
    with pytest.raises(RuntimeError, match=r"unsupported layout torch\.sparse_csr"):
        dist.all_reduce(torch.eye(2).to_sparse_csr())
    dist.all_reduce(two)
    assert two.values().tolist() == [2.0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_what_is_refused_before_anything_is_sent() -> None:
    run("threads", 2, wrong_calls)


def wrong_calls_of_the_method() -> None:
    """The same in torch's C++ form."""
    group = dist.group.WORLD
    dense = torch.zeros(1)
    two, four = (coo(torch.tensor([[0]]), torch.ones(1), (length,)) for length in (2, 4))
    for tensors, phrase in (
        ([], "requires non-empty tensor list"),
        ([dense, two], "invalid tensor layout"),
        ([two, dense], "invalid tensor layout"),
        ([two, four], "invalid tensor size"),
    ):
        with pytest.raises(RuntimeError, match=phrase):
            group.allreduce(tensors, dist.AllreduceOptions())
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        options = dist.AllreduceOptions()
        options.reduceOp = op
        with pytest.raises(RuntimeError, match="unsupported reduction operation"):
            group.allreduce([four], options)
    with pytest.raises(RuntimeError, match="only supports dense tensors"):
        group.reduce([two], dist.ReduceOptions())
    with pytest.raises(RuntimeError, match="only supports dense tensors"):
        group.broadcast([two], dist.BroadcastOptions())
    work = group.allreduce([two, two.clone()])
    assert [result.values().tolist() for result in work.get_future().wait()] == [[4.0], [4.0]]


def test_what_the_method_refuses() -> None:
    run("threads", 2, wrong_calls_of_the_method)


def summed(tensor: torch.Tensor, async_op: bool) -> None:
    work = dist.all_reduce(tensor, async_op=async_op)
    if work is not None:
        work.wait()


def different_tensors() -> None:
    rank = dist.get_rank()
    for wrong, phrase in (
        (coo(torch.tensor([[0]]), torch.ones(1), (3 + rank,)), r"rank 1 has float32, shape \(4,\), 1 sparse"),
        (
            coo(torch.tensor([[0]]), torch.ones(1, dtype=[torch.int32, torch.float16][rank]), (3,)),
            "has int32",
        ),
        (
            coo(torch.zeros((2 - rank, 1)).long(), torch.ones([1] + [2] * rank), (2, 2)),
            r"shape \(2, 2\), 2 sparse dimensions, 1 entries\n  rank 1 has",
        ),
    ):
        before = wrong.to_dense()
        for async_op in (False, True):
            with pytest.raises(CollectiveMismatchError, match=phrase) as caught:
                summed(wrong, async_op)
            assert "test_sparse.py" in str(caught.value)
        assert torch.equal(wrong.to_dense(), before)
    tensor = torch.ones(3) if rank else coo(torch.tensor([[0]]), torch.ones(1), (3,))
    with pytest.raises(CollectiveMismatchError, match="rank 0 called sparse_all_reduce"):
        dist.all_reduce(tensor)
    dist.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_whose_tensors_differ_are_told_so(kind: str) -> None:
    run(kind, 2, different_tensors)


def test_in_a_fake_world_a_rank_keeps_its_own() -> None:
    dist.init_process_group("fake", rank=1, world_size=4)
    try:
        tensor = coo(torch.tensor([[0, 0]]), torch.ones(2), (3,))
        dist.all_reduce(tensor)
        assert tensor.to_dense().tolist() == [2, 0, 0]
        with pytest.raises(RuntimeError, match="unsupported reduction operation"):
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
    finally:
        dist.destroy_process_group()
