"""Where gradients are: the one place that a reducer reads them from and writes averages to.

A program that calls ``loss.backward()`` finds them in ``parameter.grad``. A distributed autograd context
keeps them to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from torchestra.rpc.thread_state import here


class GradientSink(Protocol):
    """Where a reducer finds and leaves gradients."""

    def take(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradient of each parameter, None where there is none."""

    def put(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Make this tensor the parameter's gradient; with None, it has none."""


class WhereTheyLand:
    """Gradients in the context whose backward pass this thread runs, else in ``parameter.grad``."""

    def take(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """See :class:`GradientSink`."""
        if here.part is None:
            return [parameter.grad for parameter in parameters]
        gradients = here.part.context.gradients
        return [gradients.get(parameter) for parameter in parameters]

    def put(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """See :class:`GradientSink`."""
        if here.part is None:
            parameter.grad = gradient
        else:
            here.part.context.gradients.put(parameter, gradient)
