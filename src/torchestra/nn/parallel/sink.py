"""Where gradients are: the one place that a reducer reads them from and writes averages to.

A program that calls ``loss.backward()`` finds them in ``parameter.grad``. A distributed autograd context
keeps them to itself; it can give a reducer a sink of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class GradientSink(Protocol):
    """Where a reducer finds and leaves gradients."""

    def take(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradient of each parameter, None where there is none."""

    def put(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Make this tensor the parameter's gradient; with None, it has none."""


class GradAttribute:
    """Gradients in ``parameter.grad``."""

    def take(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """See :class:`GradientSink`."""
        return [parameter.grad for parameter in parameters]

    def put(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """See :class:`GradientSink`."""
        parameter.grad = gradient
