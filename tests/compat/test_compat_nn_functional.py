"""Collectives with gradients: each gradient is that of one program that has all ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.worlds import run

import torchestra.compat as dist
import torchestra.compat.nn.functional as F

SIZE = 3
ROOT = 1
Program = Callable[[list[torch.Tensor]], list[list[torch.Tensor]]]


def inputs(rank: int) -> torch.Tensor:
    return torch.arange(6, dtype=torch.double).reshape(3, 2) + 10 * rank + 1


def weight(rank: int, place: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(like.numel(), dtype=torch.double).reshape(like.shape) + rank * 5 + place * 3 + 1


def here(name: str, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what a rank gets from an operation."""
    rows = list(x.unbind())
    if name == "broadcast":
        return [F.broadcast(x, ROOT)]
    if name == "gather":
        return list(F.gather(x, ROOT))
    if name == "scatter":
        return [F.scatter(rows, ROOT)]
    if name == "reduce":
        return [F.reduce(x, ROOT)]
    if name == "all_reduce":
        return [F.all_reduce(x)]
    if name == "reduce_scatter":
        return [F.reduce_scatter(torch.empty(2, dtype=torch.double), rows)]
    if name == "all_gather":
        return list(F.all_gather(x))
    if name == "_all_gather_base":
        return [F._all_gather_base(torch.empty(9, 2, dtype=torch.double), x)]
    if name == "all_to_all":
        return list(F.all_to_all([torch.empty(2, dtype=torch.double) for _ in rows], rows))
    assert name == "all_to_all_single"
    sizes = [0, 1, 2]  # every rank sends none to rank 0, one row to rank 1, two to rank 2
    received = [sizes[dist.get_rank()]] * SIZE
    output = torch.empty(sum(received), 2, dtype=torch.double)
    return [F.all_to_all_single(output, x, received, sizes)]


def everywhere(name: str, xs: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The same on one rank, for all: by rank."""
    total = torch.stack(xs).sum(0)
    ranks = range(SIZE)
    if name == "broadcast":
        return [[xs[ROOT]] for _ in ranks]
    if name == "gather":
        return [xs if rank == ROOT else [torch.zeros_like(x) for x in xs] for rank in ranks]
    if name == "scatter":
        return [[xs[ROOT][rank]] for rank in ranks]
    if name == "reduce":
        return [[total if rank == ROOT else xs[rank].detach()] for rank in ranks]
    if name == "all_reduce":
        return [[total] for _ in ranks]
    if name == "reduce_scatter":
        return [[total[rank]] for rank in ranks]
    if name == "all_gather":
        return [xs for _ in ranks]
    if name == "_all_gather_base":
        return [[torch.cat(xs)] for _ in ranks]
    if name == "all_to_all":
        return [[x[rank] for x in xs] for rank in ranks]
    bounds = [0, 0, 1, 3]
    return [[torch.cat([x[bounds[rank] : bounds[rank + 1]] for x in xs])] for rank in ranks]


def loss(rank: int, outputs: list[torch.Tensor]) -> torch.Tensor:
    """Square, so that there are second derivatives."""
    parts = [(weight(rank, place, output) * output**2).sum() for place, output in enumerate(outputs)]
    return torch.stack(parts).sum()


NAMES = [*F.__all__]


def gradients() -> dict[str, tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]]:
    found = {}
    for name in NAMES:
        rank = dist.get_rank()
        x = inputs(rank).requires_grad_()
        outputs = here(name, x)
        (first,) = torch.autograd.grad(loss(rank, outputs), x, create_graph=True)
        (second,) = torch.autograd.grad((first * weight(rank, 7, first)).sum(), x)
        found[name] = [output.detach() for output in outputs], first.detach(), second
    return found


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]]]:
    return run("threads", SIZE, gradients)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "reduce"])
def test_values_and_derivatives(
    name: str, by_rank: list[dict[str, tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]]]
) -> None:
    xs = [inputs(rank).requires_grad_() for rank in range(SIZE)]
    outputs = everywhere(name, xs)
    total = torch.stack([loss(rank, outputs[rank]) for rank in range(SIZE)]).sum()
    firsts = torch.autograd.grad(total, xs, create_graph=True, materialize_grads=True)
    again = torch.stack([(first * weight(rank, 7, first)).sum() for rank, first in enumerate(firsts)]).sum()
    seconds = torch.autograd.grad(again, xs, materialize_grads=True)
    for rank in range(SIZE):
        values, first, second = by_rank[rank][name]
        torch.testing.assert_close(values, [output.detach() for output in outputs[rank]])
        torch.testing.assert_close(first, firsts[rank].detach())
        torch.testing.assert_close(second, seconds[rank])


def test_a_reduction_to_one_rank_sends_that_ranks_gradient_to_all(
    by_rank: list[dict[str, tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]]],
) -> None:
    total = sum((inputs(rank) for rank in range(SIZE)), torch.zeros(3, 2, dtype=torch.double))
    expected = 2 * weight(ROOT, 0, total) * total
    for rank in range(SIZE):
        values, first, _ = by_rank[rank]["reduce"]
        torch.testing.assert_close(first, expected)
        torch.testing.assert_close(values[0], total if rank == ROOT else inputs(rank))
