"""Hooks that let optimizers step as soon as gradients are averaged, while backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch

from torchestra.errors import InvalidArgumentError
from torchestra.nn.parallel.comm_hooks.default_hooks import allreduce_hook
from torchestra.nn.parallel.comm_hooks.interface import CommHook, GradBucket, put_averages
from torchestra.optim.in_backward import in_backward_optimizers
from torchestra.optim.subset import check_steps_without_closure, step_some

__all__ = ["OptimizerHookState", "apply_optim_in_backward_hook", "hook_then_optimizer"]


@runtime_checkable
class StepsOneParameter(Protocol):
    """A functional optimizer, which updates one parameter by a gradient."""

    def step_param(self, param: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Update the parameter."""


class OptimizerHookState:
    """The optimizer that :func:`hook_then_optimizer` steps, and its parameters.

    Args:
        functional_optim: an optimizer of torch's kind, or anything with a method ``step_param(param, grad)``.
        params: the parameters to update; None: all.

    Raises:
        InvalidArgumentError: the optimizer has no such method, or its steps need a closure.
    """

    def __init__(self, functional_optim: Any, params: Iterable[torch.Tensor] | None = None) -> None:
        if isinstance(functional_optim, torch.optim.Optimizer):
            check_steps_without_closure(type(functional_optim))
        elif not isinstance(functional_optim, StepsOneParameter):
            raise InvalidArgumentError(f"Class {type(functional_optim)} must implement method step_param.")
        self.functional_optimizer = functional_optim
        self.params_to_optimize = None if params is None else set(params)

    def step(self, bucket: GradBucket) -> None:
        """Update the parameters in a bucket."""
        pairs = [
            pair
            for pair in zip(bucket.parameters(), bucket.gradients(), strict=True)
            if self.params_to_optimize is None or pair[0] in self.params_to_optimize
        ]
        if isinstance(self.functional_optimizer, torch.optim.Optimizer):
            step_some(self.functional_optimizer, [each for each, _ in pairs], [each for _, each in pairs])
            return
        for parameter, gradient in pairs:
            self.functional_optimizer.step_param(parameter, gradient)


def hook_then_optimizer(hook: CommHook, optimizer_state: OptimizerHookState) -> CommHook:
    """Return a hook that averages by ``hook``, and then updates the bucket's parameters.

    The optimizer must not be stepped otherwise.
    """
    return _then(hook, optimizer_state.step)


def apply_optim_in_backward_hook(hook: CommHook = allreduce_hook) -> CommHook:
    """Return a hook that averages by ``hook``, and then steps the parameters' own optimizers.

    These are set by :mod:`torchestra.optim.in_backward`. Parameters without one keep their averaged
    gradients.
    """

    def step(bucket: GradBucket) -> None:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            for optimizer in in_backward_optimizers(parameter):
                step_some(optimizer, [parameter], [gradient])

    return _then(hook, step)


def _then(hook: CommHook, step: Callable[[GradBucket], None]) -> CommHook:
    """Return a hook that averages by ``hook``, and then takes a step by the averages in the bucket."""

    def average_then_step(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        def step_by(averaged: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            put_averages(bucket, averaged.value())
            step(bucket)
            return bucket.buffer()

        return hook(state, bucket).then(step_by)

    return average_then_step
