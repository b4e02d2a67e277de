"""Sparse gradients: averaged rows, however many each rank has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import torchestra as dist
from torchestra.errors import GradientReductionError
from torchestra.nn.parallel import DistributedDataParallel, GradBucket
from worlds import run

VIEWS = pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])


class Bag(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.EmbeddingBag) -> None:
        super().__init__()
        torch.manual_seed(1337)
        self.table = kind(10, 3, sparse=True)
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.table(x)
        return self.layer(found if found.dim() == 2 else found.mean(1))


def lookups(size: int) -> torch.Tensor:
    return torch.randint(0, 10, [2 * size, 2], generator=torch.Generator().manual_seed(7))


def check(kind: type[nn.Module] = nn.EmbeddingBag, hook: Any = None, size: int = 2, **options: Any) -> None:
    """The gradients of three steps are those of one process on everybody's samples."""
    model = Bag(kind)
    alone, samples = copy.deepcopy(model), lookups(size)
    alone(samples).square().mean().backward()

    def body() -> None:
        own = copy.deepcopy(model)
        wrapped = DistributedDataParallel(own, **options)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        for _ in range(3):
            wrapped.zero_grad()
            wrapped(samples.split(2)[dist.get_rank()]).square().mean().backward()
            assert own.table.weight.grad.layout is torch.sparse_coo
            for found, expected in zip(own.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(found.grad.to_dense(), expected.grad.to_dense())

    run("threads", size, body)


@VIEWS
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_are_averaged(kind: type[nn.Module], views: bool) -> None:
    check(kind, gradient_as_bucket_view=views)


@pytest.mark.parametrize("size", [1, 3])
def test_by_any_number_of_ranks(size: int) -> None:
    check(size=size)


@VIEWS
def test_with_a_communication_hook(views: bool) -> None:
    """A hook gets the sparse gradient itself, and its future holds a sparse tensor."""

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if buffer.layout is torch.strided:
            work = dist.all_reduce(buffer, dist.ReduceOp.AVG, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])
        assert bucket.gradients() == [buffer]
        dense = buffer.to_dense()
        dist.all_reduce(dense, dist.ReduceOp.AVG)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(dense.to_sparse(1))
        return future

    check(hook=hook, gradient_as_bucket_view=views)


class Maybe(Bag):
    def forward(self, x: torch.Tensor, look_up: bool) -> torch.Tensor:
        return super().forward(x) if look_up else self.layer(torch.ones(2, 3))


@VIEWS
def test_a_table_that_some_ranks_do_not_use(views: bool) -> None:
    model = Maybe()

    def body() -> None:
        own = copy.deepcopy(model)
        wrapped = DistributedDataParallel(own, find_unused_parameters=True, gradient_as_bucket_view=views)
        wrapped(lookups(1), False).sum().backward()
        assert own.table.weight.grad is None, "used by nobody"
        wrapped(lookups(1), dist.get_rank() == 1).sum().backward()
        alone = copy.deepcopy(model)
        alone(lookups(1), True).sum().backward()
        found, expected = own.table.weight.grad.to_dense(), alone.table.weight.grad.to_dense()
        torch.testing.assert_close(found, expected / 2)

    run("threads", 2, body)


def test_a_dense_gradient_of_a_sparse_module_is_named() -> None:
    class Tied(Bag):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.table.weight)

    def body() -> None:
        wrapped = DistributedDataParallel(Tied())
        with pytest.raises(GradientReductionError, match=r"'table\.weight' .* sparse=True.*torch\.strided"):
            wrapped(lookups(1)).sum().backward()

    run("threads", 1, body)


def test_ranks_train_alike() -> None:
    def body() -> list[torch.Tensor]:
        torch.manual_seed(dist.get_rank())
        own = Bag()
        wrapped = DistributedDataParallel(own)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        for step in range(10):
            optimizer.zero_grad()
            samples = torch.arange(step, step + 4).remainder(10).view(2, 2) * (1 + dist.get_rank()) % 10
            wrapped(samples).square().mean().backward()
            optimizer.step()
        return [each.detach() for each in own.parameters()]

    zero, one, two = run("threads", 3, body)
    for first, *others in zip(zero, one, two, strict=True):
        assert all(torch.equal(first, other) for other in others)
