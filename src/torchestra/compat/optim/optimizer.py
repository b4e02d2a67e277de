"""As ``torch.distributed.optim.optimizer``."""

from __future__ import annotations

from torchestra.optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
