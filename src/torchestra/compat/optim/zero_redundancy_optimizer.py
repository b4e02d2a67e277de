"""As ``torch.distributed.optim.zero_redundancy_optimizer``."""

from __future__ import annotations

from torchestra.optim import (
    ZeroRedundancyOptimizer,
)

__all__ = ["ZeroRedundancyOptimizer"]
