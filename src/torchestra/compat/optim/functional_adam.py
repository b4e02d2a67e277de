"""As ``torch.distributed.optim.functional_adam``."""

from __future__ import annotations

from torchestra.compat.optim.utils import _FunctionalAdam

__all__ = ["_FunctionalAdam"]
