"""Checks the parameters passed to an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError


def listed(params: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """Return a list of the parameters or parameter groups, and a list of all parameters.

    Raises:
        InvalidArgumentTypeError: they are neither all tensors nor all dicts.
        InvalidArgumentError: there are none, or a group names none.
    """
    if isinstance(params, torch.Tensor):
        raise InvalidArgumentTypeError(
            f"`params` argument should be an iterable of Tensors, but got {torch.typename(params)}"
        )
    try:
        given = list(params)
    except TypeError as error:
        raise InvalidArgumentTypeError(
            f"`params` argument should be an iterable of Tensors or dicts, but got {torch.typename(params)}"
        ) from error
    if not given:
        raise InvalidArgumentError("ZeroRedundancyOptimizer got an empty parameter list")
    if all(isinstance(each, torch.Tensor) for each in given):
        return given, given
    if not all(isinstance(each, dict) for each in given):
        raise InvalidArgumentTypeError("`params` argument should be an iterable of Tensors or dicts")
    groups = []
    for group in given:
        if "params" not in group:
            raise InvalidArgumentError(
                "Each parameter group passed-in via `params` must have a 'params' key mapping to the"
                " parameters in the group"
            )
        members = group["params"]
        groups.append({**group, "params": [members] if isinstance(members, torch.Tensor) else list(members)})
    return groups, [parameter for group in groups for parameter in group["params"]]


def check_same_type(parameters: Sequence[torch.Tensor]) -> None:
    """Refuse sparse tensors, and tensors whose types (device, dtype) differ.

    Raises:
        InvalidArgumentError: they are such.
    """
    names = {torch.typename(parameter): None for parameter in parameters}
    if any(parameter.layout is not torch.strided for parameter in parameters) or len(names) > 1:
        raise InvalidArgumentError(
            "ZeroRedundancyOptimizer only supports using the same dense type for all parameters but got"
            f" {' and '.join(names)}"
        )
    for parameter in parameters:
        if parameter.device.type != "cpu":
            raise InvalidArgumentError(
                f"ZeroRedundancyOptimizer: a parameter is on device {parameter.device}, and only the CPU is"
                " served"
            )
