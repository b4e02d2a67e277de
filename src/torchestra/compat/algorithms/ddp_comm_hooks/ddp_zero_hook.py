"""As ``torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook``."""

from __future__ import annotations

from torchestra.nn.parallel.comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]
