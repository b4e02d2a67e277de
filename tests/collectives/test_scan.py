"""scan and exscan: prefix reductions over the ranks, against a reference in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchestra as dist
from references import DEFINED, reduced, same_bits, sample
from thresholds import use_thresholds
from torchestra.errors import CollectiveMismatchError, InvalidArgumentError
from torchestra.types import ReduceOp
from worlds import KINDS, run

_SETTINGS = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

Function = Callable[..., "dist.Work | None"]


def expected(inputs: list[torch.Tensor], op: ReduceOp, function: Function) -> torch.Tensor:
    rank = dist.get_rank()
    taken = inputs[: rank + (function is dist.scan)]
    return reduced(taken, op) if taken else inputs[rank]


def both(shape: tuple[int, ...], pair: tuple[torch.dtype, ReduceOp], chunk: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype, op = pair
    use_thresholds(0, chunk)
    length = torch.Size(shape).numel()
    inputs = [sample(dtype, length, seed=peer).view(shape) for peer in range(size)]
    for function in (dist.scan, dist.exscan):
        tensor = inputs[rank].clone()
        function(tensor, op)
        signed_zeros = op not in (ReduceOp.MIN, ReduceOp.MAX)
        assert same_bits(tensor, expected(inputs, op, function), signed_zeros=signed_zeros)


@_SETTINGS
@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.sampled_from(DEFINED),
    st.sampled_from([64, 128, 1024]),
)
def test_of_any_dtype_operation_and_shape(
    size: int, shape: tuple[int, ...], pair: tuple[torch.dtype, ReduceOp], chunk: int
) -> None:
    run("threads", size, both, shape, pair, chunk)


def every_form() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    before, upto = rank * (rank + 1) / 2, (rank + 1) * (rank + 2) / 2

    def mine(length: int = 3) -> torch.Tensor:
        return torch.full((length,), rank + 1.0)

    first = 1.0 if rank == 0 else before
    for function, value in ((dist.scan, upto), (dist.exscan, first)):
        tensor = mine(100_000)
        assert function(tensor) is None
        assert (tensor == value).all()
        work = function(tensor := mine(), async_op=True)
        assert work is not None
        work.wait()
        assert tensor.tolist() == [value] * 3
        strided = torch.stack([mine(), mine()])
        function(strided.t()[1:])
        assert strided.tolist() == [[rank + 1.0, value, value]] * 2
        method = getattr(group, function.__name__)
        method([tensor := mine()]).wait()
        assert tensor.tolist() == [value] * 3
        method(tensor := mine(), ReduceOp.MAX).wait()
        assert tensor.tolist() == [max(rank + (function is dist.scan), 1.0)] * 3
    with dist.coalescing_manager():
        dist.scan(inclusive := mine())
        dist.exscan(exclusive := mine())
        dist.all_reduce(total := mine())
    assert (inclusive[0], exclusive[0], total[0]) == (upto, first, size * (size + 1) / 2)
    average = mine()
    dist.scan(average, ReduceOp.AVG)
    assert average.tolist() == [upto / (rank + 1)] * 3
    with pytest.raises(InvalidArgumentError, match="only supports dense tensors"):
        dist.scan(torch.eye(3).to_sparse())
    with pytest.raises(CollectiveMismatchError, match=r"scan\(SUM, float32, 3 elements\)"):
        (dist.scan if rank == 0 else dist.exscan)(mine())
    with pytest.raises(CollectiveMismatchError, match=r"exscan\(SUM, float32, \d elements\)"):
        dist.exscan(mine(3 + (rank == 0)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_form(kind: str) -> None:
    run(kind, 3, every_form)


def test_every_form_on_two_hosts() -> None:
    run("threads", 3, every_form, hosts=("h0", "h1", "h0"))


def test_in_a_fake_world() -> None:
    dist.init_process_group("fake", rank=2, world_size=4, store=dist.FakeStore())
    try:
        for function in (dist.scan, dist.exscan):
            tensor = torch.ones(2)
            assert function(tensor) is None
            work = function(tensor, async_op=True)
            assert work is not None
            assert work.is_completed()
            assert tensor.tolist() == [1, 1]
    finally:
        dist.destroy_process_group()
