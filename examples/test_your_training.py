"""Tests of a small distributed training, as users write them: ``pytest examples/test_your_training.py``.

No cluster and no launcher: ranks are threads of the test process, or processes forked from it.
"""

from __future__ import annotations

import pytest
import torch

import torchestra as dist
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.testing import faults, fixture, shuffle

STEPS, FEATURES, PER_RANK = 5, 4, 8


def train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, steps: int = STEPS) -> float:
    """The code under test: some steps of gradient descent; the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


def fresh_model() -> torch.nn.Module:
    """The same weights every time."""
    torch.manual_seed(1)
    return torch.nn.Linear(FEATURES, 1)


@fixture(scope="world")
def data() -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch, made once per test, the same for all ranks."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4 * PER_RANK, FEATURES, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


@pytest.fixture
def shard(data: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of it: a fixture of function scope is made on every rank."""
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    return data[0][rows], data[1][rows]


@pytest.mark.ranks(1, 2, 4, kind=("threads", "processes"))
def test_training_on_shards_equals_training_on_the_whole(
    data: tuple[torch.Tensor, torch.Tensor], shard: tuple[torch.Tensor, torch.Tensor]
) -> None:
    alone = fresh_model()
    train(alone, *data)
    together = DistributedDataParallel(fresh_model())
    train(together, *shard)
    for mine, reference in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, reference)


@pytest.mark.ranks(4)
def test_all_ranks_end_with_the_same_bits(shard: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = DistributedDataParallel(fresh_model())
    train(model, *shard)
    for parameter in model.parameters():
        everybodys = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(everybodys, parameter.detach())
        assert all(torch.equal(other, parameter) for other in everybodys)


@pytest.mark.ranks(3, kind="processes", may_die=[1])
def test_the_death_of_a_rank_is_an_error_that_names_it(shard: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = DistributedDataParallel(fresh_model())
    faults.kill(rank=1, at="all_reduce", nth=3)
    with pytest.raises(dist.RankFailedError, match="rank 1 died"):
        train(model, *shard)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("seed", range(5))
def test_in_any_order_of_the_ranks(seed: int, shard: tuple[torch.Tensor, torch.Tensor]) -> None:
    total = shard[0].sum()
    with shuffle(seed):
        dist.all_reduce(total)
    assert torch.isfinite(total)
