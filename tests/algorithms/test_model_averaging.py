"""Averaging parameters now and then, among all ranks and in a hierarchy of groups."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import torchestra as dist
from torchestra.algorithms.model_averaging import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)
from torchestra.optim import PostLocalSGDOptimizer
from worlds import KINDS, run


def model(value: float) -> nn.Module:
    """Two dtypes, one parameter without a gradient; all numbers alike."""
    made = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 2, dtype=torch.float64), nn.Linear(1, 1)])
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    for parameter in [*made[0].parameters(), *made[1].parameters()]:
        parameter.grad = torch.zeros_like(parameter)
    return made


def values(module: nn.Module) -> list[float]:
    """The number in each parameter."""
    found = [parameter.detach().unique().tolist() for parameter in module.parameters()]
    assert all(len(numbers) == 1 for numbers in found)
    return [number for (number,) in found]


def averaged_once(groups: bool) -> tuple[list[float], bool]:
    mine = model(float(dist.get_rank()))
    before = [parameter.data_ptr() for parameter in mine.parameters()]
    params: Any = mine.parameters()
    if groups:
        first, *others = mine.parameters()
        params = torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.1).param_groups
    average_parameters_or_parameter_groups(params, None)
    return values(mine), before == [parameter.data_ptr() for parameter in mine.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [False, True])
def test_parameters_with_gradients_become_their_mean_in_place(kind: str, groups: bool) -> None:
    for rank, (found, in_place) in enumerate(run(kind, 4, averaged_once, groups)):
        assert found == [1.5, 1.5, 1.5, 1.5, rank, rank]
        assert in_place


def test_a_rank_that_is_not_in_the_group_keeps_its_own() -> None:
    def body() -> list[float]:
        mine = model(float(dist.get_rank()))
        average_parameters(mine.parameters(), dist.new_group([1, 2]))
        return values(mine)

    assert run("threads", 3, body) == [[0.0] * 6, [1.5] * 6, [1.5] * 6]


def test_strides_in_any_order() -> None:
    def body() -> torch.Tensor:
        weight = nn.Parameter(torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last))
        with torch.no_grad():
            weight += dist.get_rank()
        average_parameters([weight], None)
        assert weight.is_contiguous(memory_format=torch.channels_last)
        return weight.detach()

    for weight in run("threads", 2, body):
        assert torch.equal(weight, torch.arange(24.0).view(2, 3, 2, 2) + 0.5)


def test_what_is_no_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Parameter input of type .*str.* is not supported"):
        get_params_to_average(["weight"])  # type: ignore[list-item]


# -- averagers


def history(averager: Any, steps: int) -> list[float]:
    """A number on each rank after each step, in which one is added on rank 1, two on rank 2, ..."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    found = []
    for _ in range(steps):
        with torch.no_grad():
            parameter += dist.get_rank()
        averager.average_parameters([parameter])
        found.append(parameter.item())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_few_steps_after_the_warmup(kind: str) -> None:
    for rank, found in enumerate(run(kind, 2, periodic)):
        expected, number = [], 0.0
        for step in range(10):
            number += rank
            if step in (3, 6, 9):
                number = (step + 1) / 2
            expected.append(number)
        assert found == expected


def periodic() -> list[float]:
    return history(PeriodicModelAverager(period=3, warmup_steps=3), 10)


def hierarchical(warmup: int) -> tuple[list[float], list[int]]:
    averager = HierarchicalModelAverager({2: 2, 4: 4}, warmup)
    return history(averager, 9), [group.size() for group in averager.period_process_group_dict.values()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0, 3])
def test_pairs_average_often_and_all_ranks_seldom(kind: str, warmup: int) -> None:
    numbers = [0.0] * 4
    expected: list[list[float]] = [[] for _ in range(4)]
    for step in range(9):
        numbers = [number + rank for rank, number in enumerate(numbers)]
        if step >= warmup and step % 4 == 0:
            numbers = [sum(numbers) / 4] * 4
        elif step >= warmup and step % 2 == 0:
            left, right = sum(numbers[:2]) / 2, sum(numbers[2:]) / 2
            numbers = [left, left, right, right]
        for rank in range(4):
            expected[rank].append(numbers[rank])
    assert run(kind, 4, hierarchical, warmup) == [(each, [2, 4]) for each in expected]


def test_a_hierarchy_in_a_group_of_some_ranks() -> None:
    def body() -> tuple[int, ...] | None:
        group = dist.new_group([1, 2, 3, 4])
        if dist.get_rank() == 0:
            return None
        averager = HierarchicalModelAverager({2: 2, 3: 4}, process_group=group)
        return averager.period_process_group_dict[2].ranks

    assert [ranks and tuple(ranks) for ranks in run("threads", 5, body)] == [
        None, (1, 2), (1, 2), (3, 4), (3, 4),
    ]  # fmt: skip


def test_what_averagers_refuse() -> None:
    refused: list[tuple[Any, str]] = [
        (lambda: PeriodicModelAverager(period=0), "Arg ``period`` must be a positive value."),
        (lambda: PeriodicModelAverager(2, warmup_steps=-1), "``warmup_steps`` must be a non-negative number"),
        (lambda: HierarchicalModelAverager({2: 2}, -1), "``warmup_steps`` must be a non-negative number"),
        (lambda: HierarchicalModelAverager({}), "Arg ``period_group_size_dict`` must not be empty."),
        (lambda: HierarchicalModelAverager({0: 2}), "The minimum period in arg ``period_group_size_dict``"),
        (lambda: HierarchicalModelAverager({2: 1}), "must be equal to the size of arg ``process_group`` 2"),
        (lambda: HierarchicalModelAverager({4: 1, 2: 2}), "must grow"),
        (lambda: HierarchicalModelAverager({2: 0, 4: 2}), r"The arg 'group_size' \(0\) must be positive"),
    ]

    def body() -> None:
        for make, text in refused:
            with pytest.raises(ValueError, match=text):
                make()

    run("threads", 2, body)


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PeriodicModelAverager(period=1)
        HierarchicalModelAverager({1: 2})
    assert {each.filename for each in caught} == {__file__}
    return [str(each.message) for each in caught]


def test_a_period_of_one_is_warned_of() -> None:
    for first, second in run("processes", 2, warned):
        assert first.startswith("When period is 1, no need to use model averaging because")
        assert second.startswith("When the maximum period in arg ``period_group_size_dict`` is 1, no need")


# -- the optimizer


def test_the_optimizer_steps_locally_and_averages_now_and_then() -> None:
    def body() -> list[float]:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = PostLocalSGDOptimizer(
            torch.optim.SGD([parameter], lr=1.0), PeriodicModelAverager(2, warmup_steps=1)
        )
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            (-parameter * dist.get_rank()).sum().backward()
            optimizer.step()
            found.append(parameter.item())
        return found

    assert run("threads", 2, body) == [[0, 1, 1, 2], [1, 1, 2, 2]]


def test_the_optimizers_state_is_the_others_with_the_count_of_steps() -> None:
    def make() -> PostLocalSGDOptimizer:
        layer = nn.Linear(2, 2)
        local = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9)
        return PostLocalSGDOptimizer(local, PeriodicModelAverager(4, warmup_steps=1))

    def body() -> None:
        trained, fresh = make(), make()
        for _ in range(3):
            for parameter in trained.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            trained.step()
        trained.param_groups[0]["lr"] = 0.25
        fresh.load_state_dict(trained.state_dict())
        assert fresh.averager.step == 3
        assert fresh.param_groups[0]["lr"] == fresh.optim.param_groups[0]["lr"] == 0.25
        assert fresh.state is fresh.optim.state
        assert fresh.defaults is fresh.optim.defaults
        assert repr(fresh) == repr(fresh.optim)
        torch.testing.assert_close(fresh.state_dict(), trained.state_dict())
        extra = nn.Parameter(torch.zeros(1))
        fresh.add_param_group({"params": [extra], "lr": 3.0})
        assert fresh.optim.param_groups[1]["lr"] == 3.0

    run("threads", 2, body)


def forgotten() -> tuple[str, int]:
    local = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(4))
    optimizer.averager.step = 7
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(local.state_dict())
    return str(caught[0].message), optimizer.averager.step


def test_a_state_without_steps_begins_anew_with_a_warning() -> None:
    for text, step in run("processes", 1, forgotten):
        assert text.startswith("Loaded state dict does not contain a step counter for an averager.")
        assert step == 0


def test_schedulers_and_closures_work_with_it() -> None:
    def body() -> tuple[float, float]:
        parameter = nn.Parameter(torch.ones(1))
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD([parameter], lr=1.0), PeriodicModelAverager(9))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = parameter.sum()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        scheduler.step()
        return loss.item(), optimizer.optim.param_groups[0]["lr"]

    assert run("threads", 1, body) == [(1.0, 0.5)]
