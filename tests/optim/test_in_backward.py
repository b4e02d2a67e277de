"""Optimizers that step as soon as a parameter's gradient is there."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from torchestra.optim import apply_optimizer_in_backward, get_in_backward_optimizers
from torchestra.optim.in_backward import remove_hook
from torchestra.optim.subset import step_some


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def backward(model: nn.Module, step: int) -> None:
    samples = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
    model(samples).square().mean().backward()


@pytest.mark.parametrize(
    ("optimizer_class", "options"), [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {})]
)
def test_parameters_end_where_an_ordinary_optimizer_puts_them(optimizer_class: Any, options: Any) -> None:
    model, alone = network(), network()
    apply_optimizer_in_backward(optimizer_class, model.parameters(), options)
    ordinary = optimizer_class(alone.parameters(), **options)
    for step in range(4):
        backward(model, step)
        assert all(parameter.grad is None for parameter in model.parameters())
        ordinary.zero_grad()
        backward(alone, step)
        ordinary.step()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_each_parameter_has_optimizers_of_its_own_and_several_step_in_order() -> None:
    model = network()
    first, *others = model.parameters()
    apply_optimizer_in_backward(torch.optim.SGD, [first], {"lr": 0.5})
    apply_optimizer_in_backward(torch.optim.SGD, [first], {"lr": 0.25})
    apply_optimizer_in_backward(torch.optim.Adam, others, {"lr": 0.1})
    found = get_in_backward_optimizers(model)
    assert [type(each).__name__ for each in found] == ["SGD", "SGD", *["Adam"] * len(others)]
    assert [each.param_groups[0]["lr"] for each in found[:2]] == [0.5, 0.25]
    before, reference = first.detach().clone(), network()
    backward(model, 0)
    backward(reference, 0)
    torch.testing.assert_close(before - first, 0.75 * next(reference.parameters()).grad)


def test_a_weight_that_is_used_twice_is_stepped_once_by_the_whole_gradient() -> None:
    weight = nn.Parameter(torch.ones(3))
    apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 1.0})
    (weight.sum() + (2 * weight).sum()).backward()
    assert weight.tolist() == [-2, -2, -2]


def test_who_registers_no_hook_steps_by_themselves() -> None:
    for forget in (False, True):
        weight = nn.Parameter(torch.ones(3))
        apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 1.0}, register_hook=forget)
        remove_hook(weight)
        weight.sum().backward()
        assert weight.tolist() == [1, 1, 1]
        assert weight.grad is not None
        (optimizer,) = get_in_backward_optimizers(nn.ParameterList([weight]))
        optimizer.step()
        assert weight.tolist() == [0, 0, 0]


def test_parameters_can_be_forgotten_and_pickled() -> None:
    weight = nn.Parameter(torch.ones(3))
    apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 1.0})
    assert torch.equal(pickle.loads(pickle.dumps(weight.detach())), weight)
    gone = weakref.ref(weight)
    del weight
    gc.collect()
    assert gone() is None


# -- stepping some parameters of an optimizer


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_stepping_some_parameters_leaves_the_others_and_all_gradients_alone(optimizer_class: Any) -> None:
    """In any order, with the same result as all at once."""
    model, alone = network(), network()
    groups = list(model.parameters())
    optimizer = optimizer_class([{"params": groups[:2], "lr": 0.3}, {"params": groups[2:]}], lr=0.1)
    theirs = list(alone.parameters())
    ordinary = optimizer_class([{"params": theirs[:2], "lr": 0.3}, {"params": theirs[2:]}], lr=0.1)
    for step in range(3):
        ordinary.zero_grad()
        backward(alone, step)
        gradients = [parameter.grad.clone() for parameter in theirs]
        ordinary.step()
        for place in (3, 0, 5, 1, 4, 2):
            groups[place].grad = torch.full_like(groups[place], 7.0)
            step_some(optimizer, [groups[place]], [gradients[place]])
            assert (groups[place].grad == 7).all()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
    for mine, other in zip(groups, theirs, strict=True):
        torch.testing.assert_close(mine, other)
    torch.testing.assert_close(optimizer.state_dict(), ordinary.state_dict())


def test_an_error_in_a_step_leaves_the_optimizer_whole() -> None:
    weight, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.SGD([weight, other], lr=1.0)
    with pytest.raises(RuntimeError, match="gradient of size"):
        step_some(optimizer, [weight], [torch.ones(4)])
    assert optimizer.param_groups[0]["params"] == [weight, other]
    assert weight.grad is None
