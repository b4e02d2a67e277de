"""As ``torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks``."""

from __future__ import annotations

from torchestra.nn.parallel.comm_hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]
