"""Gradient stores: a reducer reads gradients from one, and writes averages to it.

After ``loss.backward()`` they are in ``parameter.grad``. A distributed autograd context has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

import torch

from torchestra.rpc.thread_state import thread_state

_grad_of = attrgetter("grad")


class GradientStore(Protocol):
    """Holds the gradients that a reducer reads and writes."""

    def take(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the gradient of each parameter, None where there is none."""

    def put(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Make this tensor the parameter's gradient; with None, it has none."""


class ThreadGradientStore:
    """Uses the gradients of the context whose backward pass this thread runs, else ``parameter.grad``."""

    def take(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """See :class:`GradientStore`."""
        if thread_state.graph_task is None:
            return list(map(_grad_of, parameters))
        return list(map(thread_state.graph_task.context.gradients.get, parameters))

    def put(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """See :class:`GradientStore`."""
        if thread_state.graph_task is None:
            parameter.grad = gradient
        else:
            thread_state.graph_task.context.gradients.put(parameter, gradient)
