"""As ``torch.distributed.algorithms.join``."""

from __future__ import annotations

from torchestra.algorithms.join import (
    Join,
    Joinable,
    JoinConfig,
    JoinHook,
)

_JoinConfig = JoinConfig

__all__ = ["Join", "JoinHook", "Joinable", "_JoinConfig"]
