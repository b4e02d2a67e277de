"""As ``torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks``."""

from __future__ import annotations

from torchestra.nn.parallel.comm_hooks.debugging_hooks import (
    noop_hook,
)

__all__ = ["noop_hook"]
