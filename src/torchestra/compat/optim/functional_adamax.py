"""As ``torch.distributed.optim.functional_adamax``."""

from __future__ import annotations

from torchestra.compat.optim.utils import _FunctionalAdamax

__all__ = ["_FunctionalAdamax"]
