"""Classes of tensors that implement collectives themselves.

A class of tensors that defines ``__torchestra_collective__(communicator, row, output, input, op, root,
splits, async_op, timeout_s)`` has it called, as a class method, in place of :meth:`Communicator.collective`
with one of its tensors. The checks of arguments find it out, so it costs nothing for other tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchestra.errors import InvalidArgumentTypeError

_HOOK = "__torchestra_collective__"


class OverriddenError(InvalidArgumentTypeError):
    """An operation was given a tensor of such a class. Users see it where the class cannot do the operation.

    Attributes:
        handler: the class method.
    """

    def __init__(self, message: str, handler: Callable[..., Any]) -> None:
        super().__init__(message)
        self.handler = handler


def look_for_override(tensor: torch.Tensor, name: str) -> None:
    """Raise OverriddenError if the tensor's class has the method."""
    handler = getattr(type(tensor), _HOOK, None)
    if handler is not None:
        raise OverriddenError(f"{name}: tensors of type {type(tensor).__name__} are not taken", handler)
