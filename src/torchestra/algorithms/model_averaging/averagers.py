"""Averages parameters every few steps."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod

from torchestra.algorithms.model_averaging.parameters import (
    Parameters,
    average_parameters_or_parameter_groups,
)
from torchestra.errors import InvalidArgumentError
from torchestra.world.init import AnyGroup, default_group

__all__ = ["ModelAverager", "PeriodicModelAverager"]


class ModelAverager(ABC):
    """Averages parameters after some steps of the optimizer, and is called after each.

    Args:
        process_group: the ranks that average; None: the default group.

    Attributes:
        step: the number of steps so far.
    """

    def __init__(self, process_group: AnyGroup | None = None) -> None:
        self.process_group: AnyGroup = default_group() if process_group is None else process_group
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Parameters) -> None:
        """Count a step, and average if it is time. Must be called by all ranks after each step."""
        ...


class PeriodicModelAverager(ModelAverager):
    """Averages in every ``period``-th step, beginning with step ``warmup_steps``.

    Post-local SGD (https://arxiv.org/abs/1808.07217) is this with
    :func:`torchestra.nn.parallel.comm_hooks.post_localSGD_hook.post_localSGD_hook`, whose
    ``start_localSGD_iter`` is the same number as ``warmup_steps``.

    Raises:
        InvalidArgumentError: ``period`` is less than 1, or ``warmup_steps`` than 0.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: AnyGroup | None = None) -> None:
        super().__init__(process_group)
        check_warmup(warmup_steps)
        if period < 1:
            raise InvalidArgumentError(f"Arg ``period`` must be a positive value. Got {period}")
        if period == 1:
            warn_of_period_one("period")
        self.warmup_steps = warmup_steps
        self.period = period

    def average_parameters(self, params: Parameters) -> None:
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            average_parameters_or_parameter_groups(params, self.process_group)
        self.step += 1


def check_warmup(warmup_steps: int) -> None:
    """Refuse a negative number of steps."""
    if warmup_steps < 0:
        raise InvalidArgumentError(f"Arg ``warmup_steps`` must be a non-negative number. Got {warmup_steps}")


def warn_of_period_one(what: str) -> None:
    """Warn that averaging parameters in each step costs what averaging gradients costs."""
    warnings.warn(
        f"When {what} is 1, no need to use model averaging because the communication cost of all-reducing"
        " parameters will be no less than the cost of all-reducing gradients by DistributedDataParallel in"
        " the backward pass. Therefore, only DistributedDataParallel should be used for this case.",
        stacklevel=3,
    )
