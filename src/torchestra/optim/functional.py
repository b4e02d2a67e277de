"""Optimizers that take gradients as arguments, instead of from ``.grad``.

So several of them, on several threads, and programs that use ``.grad``, can have gradients for the same
parameters at the same time. Here torch's optimizer works on *aliases*: tensors that share a parameter's
memory and version, but not its ``.grad``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torchestra.errors import InvalidArgumentError
from torchestra.optim.subset import step_some


class FunctionalOptimizer:
    """Any optimizer of torch's, with gradients as arguments of its steps.

    Args:
        optimizer_class: a class of torch.optim, or one like those.
        params: parameters, not groups. Parameters that are not given here are added when they are stepped.
        args, kwargs: arguments of the optimizer.

    Attributes:
        optimizer: torch's optimizer of the aliases; None before it has parameters.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[torch.Tensor] = (),
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._class, self._args, self._kwargs = optimizer_class, args, kwargs
        self._params = list(params)
        self._aliases = {id(param): _alias(param) for param in self._params}
        self.optimizer: torch.optim.Optimizer | None = None
        if self._params:
            self.optimizer = optimizer_class(list(self._aliases.values()), *args, **kwargs)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that it updates."""
        return list(self._params)

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Update all parameters.

        Args:
            gradients: the gradient of each; None leaves a parameter unchanged.

        Raises:
            InvalidArgumentError: there are more or fewer gradients than parameters.
        """
        if len(gradients) != len(self._params):
            raise InvalidArgumentError(
                "the gradients passed in does not equal to the size of the parameters! Params length:"
                f" {len(self._params)}. Gradients length: {len(gradients)}"
            )
        if self.optimizer is None:
            return
        aliases = [self._alias_of(param) for param in self._params]
        try:
            for alias, gradient in zip(aliases, gradients, strict=True):
                alias.grad = gradient
            self.optimizer.step()
        finally:
            for alias in aliases:
                alias.grad = None

    def step_param(self, param: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Update one parameter."""
        if id(param) not in self._aliases:
            self._params.append(param)
            alias = self._aliases[id(param)] = _alias(param)
            if self.optimizer is None:
                self.optimizer = self._class([alias], *self._args, **self._kwargs)
            else:
                self.optimizer.add_param_group({"params": [alias]})
        if grad is not None and self.optimizer is not None:
            step_some(self.optimizer, [self._alias_of(param)], [grad])

    def _alias_of(self, param: torch.Tensor) -> torch.Tensor:
        alias = self._aliases[id(param)]
        if alias.data_ptr() != param.data_ptr():  # its ``data`` has been replaced
            alias.data = param.data
        return alias


def _alias(param: torch.Tensor) -> torch.Tensor:
    return param.detach().requires_grad_(param.requires_grad)
