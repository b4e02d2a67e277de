"""As ``torch.distributed.optim.post_localSGD_optimizer``."""

from __future__ import annotations

from torchestra.optim import (
    PostLocalSGDOptimizer,
)

__all__ = ["PostLocalSGDOptimizer"]
