"""As ``torch.distributed.optim.apply_optimizer_in_backward``."""

from __future__ import annotations

from torchestra.optim import (
    apply_optimizer_in_backward,
    get_in_backward_optimizers,
)

_apply_optimizer_in_backward = apply_optimizer_in_backward
_get_in_backward_optimizers = get_in_backward_optimizers

__all__ = ["_apply_optimizer_in_backward", "_get_in_backward_optimizers"]
