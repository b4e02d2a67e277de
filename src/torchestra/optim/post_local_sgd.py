"""An optimizer that averages parameters periodically."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from torchestra.algorithms.model_averaging.averagers import ModelAverager


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Steps another optimizer, and then lets an averager average the parameters, if it is time.

    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", https://arxiv.org/abs/1808.07217; with
    :func:`torchestra.nn.parallel.comm_hooks.post_localSGD_hook.post_localSGD_hook` for the gradients.

    Args:
        optim: the other optimizer.
        averager: the averager; all ranks of its group must step equally often.
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        # Not Optimizer.__init__: the parameters, their state and their options are the other optimizer's.
        self.optim = optim
        self.averager = averager

    param_groups = property(attrgetter("optim.param_groups"), doc="The other optimizer's.")
    state = property(attrgetter("optim.state"), doc="The other optimizer's.")
    defaults = property(attrgetter("optim.defaults"), doc="The other optimizer's.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and average if it is time; return what the other optimizer returns."""
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the other optimizer's."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Call the other optimizer's."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the other optimizer's state, and under ``"step"`` the averager's number of steps."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`. If it has no ``"step"``, warn and count from 0."""
        self.optim.load_state_dict(state_dict)
        if "step" not in state_dict:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to"
                " 0.",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)

    def __repr__(self) -> str:
        return repr(self.optim)
