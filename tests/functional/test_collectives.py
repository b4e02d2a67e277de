"""The functional collectives, run eagerly: values, shapes, what is left alone, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchestra as dist
import torchestra.functional as funcol
from worlds import KINDS, outcomes, run

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(torch.cuda.device_count() < 4, reason="not enough CUDA devices")
    ),
]


def same(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result.cpu() + 0, expected)


def every_collective(device: str) -> None:
    rank, mesh = dist.get_rank(), dist.DeviceMesh(device, torch.arange(4))
    table = dist.DeviceMesh(device, torch.arange(4).view(2, 2))
    ones = torch.ones(4, device=device)

    same(funcol.broadcast(ones * (rank + 1), 2, mesh), torch.full((4,), 3.0))

    same(funcol.all_reduce(ones, "sum", mesh), torch.full((4,), 4.0))
    same(funcol.all_reduce(ones, "SUM", (table, 1)), torch.full((4,), 2.0))
    same(funcol.all_reduce(ones * rank, dist.ReduceOp.MAX, mesh), torch.full((4,), 3.0))
    first, second = funcol.all_reduce_coalesced([ones * rank, torch.ones(6, device=device) + 2], "sum", mesh)
    same(first, torch.full((4,), 6.0))
    same(second, torch.full((6,), 12.0))

    for group, size in ((mesh, 4), (table, 2)):
        place = group.get_local_rank(0)
        for dim in (0, 1, 2, -1):
            pieces = [torch.full((3, 3, 3), float(each)) for each in group.get_group(0).ranks]
            mine = torch.full((3, 3, 3), float(rank), device=device)
            same(funcol.all_gather_tensor(mine, dim, (group, 0)), torch.cat(pieces, dim))
        for dim in (0, 1, -1):
            shape = [3, 3]
            shape[dim] *= size
            whole = torch.arange(9.0 * size, device=device).view(shape)
            expected = whole.cpu().chunk(size, dim)[place] * size
            same(funcol.reduce_scatter_tensor(whole, "sum", dim, (group, 0)), expected)

    gathered = funcol.all_gather_into_tensor_coalesced([ones, ones + 1], mesh)
    assert len(gathered) == 2
    same(gathered[0], torch.ones(16))
    same(gathered[1], torch.full((16,), 2.0))

    numbers = torch.arange(4, dtype=torch.int64, device=device)
    pieces = funcol.reduce_scatter_tensor_coalesced([numbers, numbers.view(1, 4) + 1], "sum", [0, 1], mesh)
    same(pieces[0], torch.tensor([4 * rank]))
    same(pieces[1], torch.tensor([[4 * rank + 4]]))

    for columns in ((), (5,)):
        splits = [(each + 1) * (rank + 1) for each in range(4)]
        sent = torch.full((sum(splits), *columns), rank + 1.0, device=device)
        received = funcol.all_to_all_single(sent, splits, splits, mesh)
        rows = [torch.full((length, *columns), each + 1.0) for each, length in enumerate(splits)]
        same(received, torch.cat(rows))
    even = funcol.all_to_all_single(torch.full((4, 4), rank + 1.0, device=device), None, None, mesh)
    same(even, torch.arange(1.0, 5).view(4, 1).expand(4, 4))

    pair = torch.arange(2.0, device=device)
    for dim in (0, 1):
        place = table.get_local_rank(dim)
        moved = funcol.permute_tensor(pair + 2 * place, [1, 0], (table, dim))
        same(moved, torch.arange(2.0) + 2 * (1 - place))
    same(funcol.permute_tensor(pair * rank, [1, 2, 3, 0], mesh), torch.arange(2.0) * ((rank - 1) % 4))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_collective(kind: str, device: str) -> None:
    run(kind, 4, every_collective, device)


def leaves_inputs_alone() -> None:
    group = dist.group.WORLD
    assert group is not None
    source = torch.arange(12.0).view(4, 3)
    strided, kept = source.t()[:, ::2], source.clone()
    scalar = torch.tensor(float(dist.get_rank()))
    for call in (
        lambda: funcol.all_reduce(strided, "sum", group),
        lambda: funcol.all_gather_tensor(strided, 1, group),
        lambda: funcol.reduce_scatter_tensor(strided, "sum", 1, group),
        lambda: funcol.all_to_all_single(strided.t(), None, None, group),
        lambda: funcol.broadcast(strided, 1, group),
        lambda: funcol.permute_tensor(strided, [1, 0], group),
    ):
        result = call()
        assert result.is_contiguous()
        funcol.wait_tensor(result)
    same(funcol.all_gather_tensor(scalar, 0, group), torch.tensor([0.0, 1.0]))
    same(funcol.all_reduce(scalar, "max", group), torch.tensor(1.0))
    assert torch.equal(source, kept)
    assert funcol.all_reduce(torch.ones(0, 3), "sum", group).shape == (0, 3)


def test_inputs_stay_as_they_are_and_may_be_of_any_layout() -> None:
    run("threads", 2, leaves_inputs_alone)


def reductions(names: list[str], values: list[list[int]]) -> list[list[int]]:
    mine = torch.tensor(values[dist.get_rank()])
    return [funcol.all_reduce(mine, name, dist.group.WORLD).tolist() for name in names]  # type: ignore[arg-type]


@settings(max_examples=10, deadline=None)
@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=2, max_size=4)
    )
)
def test_every_reduction_by_its_name(values: list[list[int]]) -> None:
    names = ["sum", "product", "min", "max", "band", "bor", "bxor"]
    table = torch.tensor(values)
    expected: list[Any] = [table.sum(0), table.prod(0), table.amin(0), table.amax(0)]
    for combine in (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor):
        combined = table[0]
        for row in table[1:]:
            combined = combine(combined, row)
        expected.append(combined)
    for results in run("threads", len(values), reductions, names, values):
        assert results == [each.tolist() for each in expected]


def refusals() -> None:
    group, x = dist.group.WORLD, torch.ones(3, 4)
    assert group is not None
    shape_errors = [
        (
            lambda: funcol.reduce_scatter_tensor(x, "sum", 0, group),
            r"input dimension 0 \(3\) must be a multiple of group_size 2",
        ),
        (
            lambda: funcol.reduce_scatter_tensor_coalesced([x, x], "sum", [1, 0], group),
            r"input dimension 0 \(3\) must be a multiple of group_size 2 for tensor at index 1",
        ),
        (
            lambda: funcol.reduce_scatter_tensor_coalesced([x, x], "sum", [1], group),
            r"Length of scatter_dim \(1\) must equal length of inputs \(2\)",
        ),
        (lambda: funcol.all_to_all_single(x, [1, 2], None, group), "must either be specified together"),
        (lambda: funcol.all_to_all_single(x, [1, 2.0], [1, 2], group), "must be int or SymInt"),
        (lambda: funcol.permute_tensor(x, [0, 0], group), "src_dst must name a rank"),
        (lambda: funcol.permute_tensor(x, [0, 1, 2], group), "src_dst must name a rank"),
        (
            lambda: torch.ops.torchestra.reduce_scatter_tensor(x, "sum", 2, group.group_name),
            "multiple of group_size 2",
        ),
    ]
    for call, message in shape_errors:
        with pytest.raises(AssertionError, match=message):
            call()
    for call, message in (
        (lambda: funcol.all_reduce(x, "mean", group), "unknown reduce operation 'mean'"),
        (
            lambda: funcol.all_to_all_single(x, [1, 1], [1, 1], group),
            "adds up to 2, but dimension 0 has length 3",
        ),
        (lambda: funcol.all_gather_tensor(x, 2, group), "gather_dim is 2, but the tensor has 2 dimensions"),
        (lambda: funcol.broadcast(x, 2, group), "`src` is 2, but the group has ranks 0 to 1"),
        (lambda: funcol.all_reduce_autograd(x.clone().requires_grad_(), "max", group), "have derivatives"),
        (
            lambda: torch.ops.torchestra.all_gather_into_tensor(x, 4, group.group_name),
            "compiled for a group of 4",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    same(funcol.all_reduce(x, "sum", group), torch.full((3, 4), 2.0))  # and all goes on


def test_bad_arguments_are_refused_before_anything_is_sent() -> None:
    run("threads", 2, refusals)


def different_calls() -> None:
    rank = dist.get_rank()
    result = funcol.all_reduce(torch.ones(2 + rank), "sum", dist.group.WORLD)  # type: ignore[arg-type]
    for _ in range(2):  # whoever asks again hears it again
        with pytest.raises(dist.CollectiveMismatchError):
            result.tolist()
    same(funcol.all_reduce(torch.ones(1), "sum", dist.group.WORLD), torch.full((1,), 2.0))  # type: ignore[arg-type]
    raise ZeroDivisionError("got here")


@pytest.mark.filterwarnings("ignore:results of functional collectives:RuntimeWarning")
def test_what_a_collective_fails_with_is_raised_where_its_result_is_used() -> None:
    for outcome in outcomes("threads", 2, different_calls):
        assert isinstance(outcome.error, ZeroDivisionError)


# -- gradients


def no_gradient() -> None:
    x, y = torch.rand(4, requires_grad=True), torch.rand(4, requires_grad=True)
    (funcol.all_reduce(x, "sum", dist.group.WORLD) + y).sum().backward()  # type: ignore[arg-type]
    assert x.grad is None
    assert y.grad is not None


def test_plain_collectives_cut_the_graph_of_derivatives() -> None:
    run("threads", 2, no_gradient)


def gradients() -> None:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None

    def gradient_of(result: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert result.requires_grad
        (result * weights).sum().backward()
        assert x.grad is not None
        gradient, x.grad = x.grad, None
        return gradient

    x = torch.rand(2, 3, requires_grad=True)
    per_rank = [torch.arange(6.0).view(2, 3) + each for each in range(size)]
    total = torch.stack(per_rank).sum(0)
    for op, factor in (("sum", 1.0), ("avg", 1 / size)):
        result = funcol.all_reduce_autograd(x * 2, op, group)
        same(gradient_of(result, x, per_rank[rank]), total * 2 * factor)

    for dim in (0, 1):
        weights = torch.arange(6.0 * size).view([2 * size, 3] if dim == 0 else [2, 3 * size])
        result = funcol.all_gather_tensor_autograd(x * 1.0, dim, group)
        same(gradient_of(result, x, weights), weights.chunk(size, dim)[rank] * size)

    wide = torch.rand(2 * size, 3 * size, requires_grad=True)
    for dim in (0, 1):
        for op, factor in (("sum", 1.0), ("avg", 1 / size)):
            result = funcol.reduce_scatter_tensor_autograd(wide * 1.0, op, dim, group)
            shape = result.shape
            weights = [torch.full(shape, each + 1.0) for each in range(size)]
            same(gradient_of(result, wide, weights[rank]), torch.cat(weights, dim) * factor)

    rows = torch.rand(size * (size + 1) // 2, 2, requires_grad=True)
    sent = list(range(1, size + 1))
    received = [rank + 1] * size
    result = funcol.all_to_all_single_autograd(rows * 1.0, received, sent, group)
    gradient = gradient_of(result, rows, torch.full_like(result.detach(), rank + 1.0))
    same(gradient, torch.cat([torch.full((length, 2), float(length)) for length in sent]))


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_collectives_have_the_transposed_collective_as_derivative(kind: str) -> None:
    run(kind, 3, gradients)
