"""As ``torch.distributed.algorithms``."""

from __future__ import annotations

from torchestra.compat.algorithms import join
from torchestra.compat.algorithms.join import Join, Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable", "join"]
