"""Optimizers that step while backward goes on, as soon as a parameter's gradient is ready.

Each parameter has an optimizer of its own, so its gradient need not be kept until the others are ready; this
saves the gradients' memory. DistributedDataParallel steps them when the gradient is averaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

# Not as attributes of the parameters, which would be pickled with them.
_handles = WeakTensorKeyDictionary()


def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer],
    params: Iterable[torch.nn.Parameter],
    optimizer_kwargs: dict[str, Any],
    register_hook: bool = True,
) -> None:
    """Let each of the parameters be updated during backward; its ``.grad`` is None afterwards.

    Call it before wrapping the module in DistributedDataParallel. A parameter may be given several
    optimizers, by several calls; they step in that order.

    Args:
        optimizer_class: called with ``([parameter], **optimizer_kwargs)`` for each parameter.
        params: the parameters.
        optimizer_kwargs: the optimizers' options.
        register_hook: if False, the caller steps the optimizers, as DistributedDataParallel does.
    """
    for parameter in params:
        optimizers: list[torch.optim.Optimizer] = in_backward_optimizers(parameter)
        if not optimizers:
            parameter._in_backward_optimizers = optimizers  # type: ignore[attr-defined]
        optimizers.append(optimizer_class([parameter], **optimizer_kwargs))
        if register_hook and parameter not in _handles:
            _handles[parameter] = parameter.register_post_accumulate_grad_hook(_step_and_forget)


def get_in_backward_optimizers(module: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a module's parameters, for saving and loading their state, not for steps."""
    return [each for parameter in module.parameters() for each in in_backward_optimizers(parameter)]


def in_backward_optimizers(parameter: torch.Tensor) -> list[torch.optim.Optimizer]:
    """Return the optimizers that step a parameter during backward."""
    found: list[torch.optim.Optimizer] = getattr(parameter, "_in_backward_optimizers", [])
    return found


def remove_hook(parameter: torch.Tensor) -> None:
    """Stop stepping a parameter's optimizers when its gradient is ready: the caller will step them."""
    if parameter in _handles:
        _handles.pop(parameter).remove()


def _step_and_forget(parameter: torch.Tensor) -> None:
    for optimizer in in_backward_optimizers(parameter):
        optimizer.step()
    parameter.grad = None
