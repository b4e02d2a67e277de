"""As ``torch.distributed.optim.functional_rprop``."""

from __future__ import annotations

from torchestra.compat.optim.utils import _FunctionalRprop

__all__ = ["_FunctionalRprop"]
