"""Note the copies that torch makes for an operation, and make none of large tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchestra.performance.rank_log import current_log


class TorchCopies(TorchFunctionMode):
    """Within it, copies, concatenations and fills on this thread are written into the rank's log.

    Integers are copied all the same, as ranks tell each other by them how they go on. Floating-point numbers
    are not: of them only addresses and lengths matter.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _COPIES:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.__setitem__:
            if isinstance(args[2], torch.Tensor):
                current_log().copy_elsewhere(args[2].nbytes)
            return func(*args)
        result = _without_copying(func, args)
        if result is None:
            result = func(*args, **(kwargs or {}))
        current_log().copy_elsewhere(result.nbytes)
        return result


def _without_copying(func: Any, args: Any) -> torch.Tensor | None:
    """Return a result of the right size for floating-point numbers, else None."""
    first: torch.Tensor = args[0][0] if func is torch.cat else args[0]
    if not (isinstance(first, torch.Tensor) and first.is_floating_point()):
        return None
    if func is torch.Tensor.copy_:
        return first
    if func is torch.cat:
        return first.new_empty(sum(each.numel() for each in args[0]))
    return torch.empty_like(first) if func is torch.Tensor.clone else None


_COPIES = frozenset(
    {
        torch.cat,
        torch.zeros,
        torch.Tensor.__setitem__,
        torch.Tensor.clone,
        torch.Tensor.copy_,
        torch.Tensor.new_zeros,
    }
)
