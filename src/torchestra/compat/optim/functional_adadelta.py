"""As ``torch.distributed.optim.functional_adadelta``."""

from __future__ import annotations

from torchestra.compat.optim.utils import _FunctionalAdadelta

__all__ = ["_FunctionalAdadelta"]
