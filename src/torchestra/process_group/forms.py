"""The form of the methods that are torch's C++ ones: ``group.allreduce(tensors, opts)`` and so on.

Every method is to be called by all ranks of the group, in the same order, and returns a :class:`Work`. It
takes a tensor, or a list of tensors where its description says what that means, and then an options object
(torchestra.arguments.options) or, instead, what torch's shorter forms take: a reduce operation or a root, and
a time-out. Roots are numbers within the group. An argument that cannot be right is refused at once with
InvalidArgumentError, in torch's phrases, and the group stays usable; whatever else goes wrong is raised by
the Work.

Unlike the functions of the package, the methods begin the operation and return (``asyncOp=False`` in the
options makes them wait), and shapes must be equal where torch wants that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, Union

import torch

from torchestra.arguments.annotations import is_integer
from torchestra.arguments.options import OperationOptions
from torchestra.errors import InvalidArgumentTypeError, shown
from torchestra.tensors import checks
from torchestra.types import ReduceOp, Timeout, timeout_seconds

Tensors = Union[torch.Tensor, Sequence[torch.Tensor]]
TensorLists = Union[Sequence[torch.Tensor], Sequence[Sequence[torch.Tensor]]]
_Options = TypeVar("_Options", bound=OperationOptions)


def options_from(
    kind: type[_Options], given: object, name: str, timeout: Timeout | None = None, **values: object
) -> _Options:
    """The options of a call, a copy.

    Args:
        kind: their type.
        given: what stands at their place: options of this kind or another (of which the attributes that
            this kind has are taken), a reduce operation, a root, a time-out, or None.
        name: of the method, for messages.
        timeout, values: what was given by keyword instead; None for what was not.

    Raises:
        InvalidArgumentTypeError: ``given`` is none of these.
    """
    options = kind()
    if isinstance(given, OperationOptions):
        taken: dict[str, Any] = {key: value for key, value in vars(given).items() if hasattr(options, key)}
        options = replace(options, **taken)
    elif isinstance(given, ReduceOp) and hasattr(options, "reduceOp"):
        options.reduceOp = given
    elif is_integer(given) and hasattr(options, "rootRank"):
        options.rootRank = given
    elif isinstance(given, (timedelta, int, float)) and not isinstance(given, bool):
        timeout_seconds(given, name, "opts")
        options.timeout = given
    elif given is not None:
        raise InvalidArgumentTypeError(
            f"{name}: incompatible function arguments: expected {kind.__name__} as `opts`, got {shown(given)}"
        )
    for key, value in values.items():
        if value is not None:
            setattr(options, key, value)
    if timeout is not None:
        timeout_seconds(timeout, name)
        options.timeout = timeout
    if hasattr(options, "reduceOp"):
        checks.check_op(options.reduceOp, name)
    return options
