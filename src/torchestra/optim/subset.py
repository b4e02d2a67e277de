"""Steps an optimizer for some of its parameters only."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence

import torch

from torchestra.errors import InvalidArgumentError


def check_steps_without_closure(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer whose steps evaluate the model, and so update all parameters at once.

    Raises:
        InvalidArgumentError: it is one.
    """
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InvalidArgumentError(
            f"{optimizer_class.__name__} needs a closure that evaluates the model in each step, so it cannot"
            " step while backward goes on"
        )


def step_some(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> None:
    """Step the optimizer for these parameters only, by these gradients; ``.grad`` does not change.

    torch's optimizers keep a separate state for each parameter, so this does not affect other parameters.
    """
    before = [parameter.grad for parameter in parameters]
    groups = [list(group["params"]) for group in optimizer.param_groups]
    stepped: Collection[int] = {id(parameter) for parameter in parameters}
    try:
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [parameter for parameter in members if id(parameter) in stepped]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    finally:
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = members
        for parameter, gradient_before in zip(parameters, before, strict=True):
            parameter.grad = gradient_before
