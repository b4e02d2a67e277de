"""As ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``."""

from __future__ import annotations

from torchestra.nn.parallel.comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]
