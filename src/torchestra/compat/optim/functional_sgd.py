"""As ``torch.distributed.optim.functional_sgd``."""

from __future__ import annotations

from torchestra.compat.optim.utils import _FunctionalSGD

__all__ = ["_FunctionalSGD"]
