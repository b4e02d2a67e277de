"""Averages the parameters of the ranks' models once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Union

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from torchestra.collectives.functions import all_reduce
from torchestra.errors import InvalidArgumentTypeError
from torchestra.process_group import NonMember
from torchestra.types import ReduceOp
from torchestra.world.init import AnyGroup

__all__ = ["average_parameters", "average_parameters_or_parameter_groups", "get_params_to_average"]

Parameters = Union[Iterable[torch.nn.Parameter], Iterable[dict[str, Any]]]
"""The parameters of a model, or the parameter groups of an optimizer."""


@torch.no_grad()
def average_parameters(params: Iterable[torch.Tensor], process_group: AnyGroup | None) -> None:
    """Replace each parameter by its mean over the ranks, in place, with one all_reduce per dtype.

    Must be called by all ranks of the group, with parameters of the same shapes and dtypes in the same
    order. Needs memory for all parameters once more. A rank that is not in the group keeps its parameters.

    Args:
        process_group: the group; None: the default group.
    """
    if isinstance(process_group, NonMember):
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in params:
        by_dtype.setdefault(parameter.dtype, []).append(parameter.detach())
    for tensors in by_dtype.values():
        flat = _flatten_dense_tensors(tensors)
        all_reduce(flat, ReduceOp.AVG, process_group)
        torch._foreach_copy_(tensors, _unflatten_dense_tensors(flat, tensors))


def get_params_to_average(params: Parameters) -> list[torch.Tensor]:
    """Return the parameters that have a gradient, and so may differ between the ranks.

    Raises:
        InvalidArgumentTypeError: an item is neither a parameter nor a parameter group.
    """
    found: list[torch.Tensor] = []
    for each in params:
        if isinstance(each, torch.nn.Parameter):
            found.append(each)
        elif isinstance(each, dict):
            found.extend(each["params"])
        else:
            raise InvalidArgumentTypeError(f"Parameter input of type {type(each)} is not supported")
    return [parameter for parameter in found if parameter.grad is not None]


def average_parameters_or_parameter_groups(params: Parameters, process_group: AnyGroup | None) -> None:
    """Average the parameters that have a gradient; see :func:`average_parameters`."""
    average_parameters(get_params_to_average(params), process_group)
