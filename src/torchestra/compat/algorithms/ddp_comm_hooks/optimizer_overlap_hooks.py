"""As ``torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks``."""

from __future__ import annotations

from torchestra.nn.parallel.comm_hooks.optimizer_overlap_hooks import (
    OptimizerHookState,
    hook_then_optimizer,
)

_OptimizerHookState = OptimizerHookState
_hook_then_optimizer = hook_then_optimizer

__all__ = ["_OptimizerHookState", "_hook_then_optimizer"]
