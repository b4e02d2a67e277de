"""Tensors that are not handed to the engine: their class implements collectives, or they have no elements.

A class that defines torch's ``__torch_function__`` has it called by the public functions, with the function
as ``func``, as by those of torch.distributed. So has a ``TorchFunctionMode``.

A class of tensors that defines ``__torchestra_collective__(communicator, row, output, input, op, root,
splits, async_op, timeout_s)`` has it called, as a class method, in place of :meth:`Communicator.collective`
with one of its tensors. The checks of arguments find it out, so it costs nothing for other tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import handle_torch_function

from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError

_Result = TypeVar("_Result")
_HOOK = "__torchestra_collective__"


class OverriddenError(InvalidArgumentTypeError):
    """An operation was given a tensor of such a class. Users see it where the class cannot do the operation.

    Attributes:
        handler: the class method.
    """

    def __init__(self, message: str, handler: Callable[..., Any]) -> None:
        super().__init__(message)
        self.handler = handler


class NoElementsError(InvalidArgumentError):
    """An operation was given a fake tensor, or one of the device "meta".

    Users see it where there are others beside it, and where the operation needs elements.
    """


def find_override(tensor: torch.Tensor, name: str) -> None:
    """Raise OverriddenError if the tensor's class has the method."""
    handler = getattr(type(tensor), _HOOK, None)
    if handler is not None:
        raise OverriddenError(f"{name}: tensors of type {type(tensor).__name__} are not supported", handler)


def overridden(
    function: Callable[..., _Result], tensors: Sequence[Any], variables: Mapping[str, Any]
) -> _Result:
    """Return what the ``__torch_function__`` of a mode, or of a tensor's class, makes of a call.

    It gets the arguments without a default by position, the others by name, as from torch.distributed.

    Args:
        function: the public function that was called.
        tensors: those among the arguments that it takes data from.
        variables: the function's local variables, of which its arguments are taken.
    """
    parameters = inspect.signature(function).parameters.values()
    args = [variables[each.name] for each in parameters if each.default is each.empty]
    kwargs = {each.name: variables[each.name] for each in parameters if each.default is not each.empty}
    if any(map(is_lazy, tensors)):
        # Its override refuses all functions, and says less than ours.
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    return handle_torch_function(function, tensors, *args, **kwargs)


def as_tuple(tensors: Any) -> tuple[Any, ...]:
    """Return the tensors of a list or tuple, or the one given."""
    return tuple(tensors) if isinstance(tensors, (list, tuple)) else (tensors,)
