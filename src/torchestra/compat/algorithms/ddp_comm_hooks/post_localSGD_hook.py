"""As ``torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook``."""

from __future__ import annotations

from torchestra.nn.parallel.comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]
