"""As ``torch.distributed.optim``."""

from __future__ import annotations

from torchestra.compat.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward,
    _get_in_backward_optimizers,
)
from torchestra.compat.optim.post_localSGD_optimizer import PostLocalSGDOptimizer
from torchestra.compat.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = [
    "PostLocalSGDOptimizer",
    "ZeroRedundancyOptimizer",
    "_apply_optimizer_in_backward",
    "_get_in_backward_optimizers",
]
