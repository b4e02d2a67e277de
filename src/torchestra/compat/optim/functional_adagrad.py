"""As ``torch.distributed.optim.functional_adagrad``."""

from __future__ import annotations

from torchestra.compat.optim.utils import _FunctionalAdagrad

__all__ = ["_FunctionalAdagrad"]
