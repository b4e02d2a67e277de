"""As ``torch.distributed.algorithms.model_averaging.hierarchical_model_averager``."""

from __future__ import annotations

from torchestra.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)

__all__ = ["HierarchicalModelAverager"]
