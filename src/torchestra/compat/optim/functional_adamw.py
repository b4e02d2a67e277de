"""As ``torch.distributed.optim.functional_adamw``."""

from __future__ import annotations

from torchestra.compat.optim.utils import _FunctionalAdamW

__all__ = ["_FunctionalAdamW"]
