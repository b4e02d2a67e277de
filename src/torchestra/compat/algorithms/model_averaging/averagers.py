"""As ``torch.distributed.algorithms.model_averaging.averagers``."""

from __future__ import annotations

from torchestra.algorithms.model_averaging.averagers import (
    ModelAverager,
    PeriodicModelAverager,
)

__all__ = ["ModelAverager", "PeriodicModelAverager"]
