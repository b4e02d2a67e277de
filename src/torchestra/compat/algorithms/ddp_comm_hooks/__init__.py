"""As ``torch.distributed.algorithms.ddp_comm_hooks``."""

from __future__ import annotations

from torchestra.nn.parallel.comm_hooks import DDPCommHookType, register_ddp_comm_hook

from . import debugging_hooks as debugging
from . import default_hooks as default
from . import optimizer_overlap_hooks as optimizer_overlap
from . import powerSGD_hook as powerSGD
from . import quantization_hooks as quantization

__all__ = [
    "DDPCommHookType",
    "debugging",
    "default",
    "optimizer_overlap",
    "powerSGD",
    "quantization",
    "register_ddp_comm_hook",
]
