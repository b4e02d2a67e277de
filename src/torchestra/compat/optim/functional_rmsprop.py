"""As ``torch.distributed.optim.functional_rmsprop``."""

from __future__ import annotations

from torchestra.compat.optim.utils import _FunctionalRMSprop

__all__ = ["_FunctionalRMSprop"]
