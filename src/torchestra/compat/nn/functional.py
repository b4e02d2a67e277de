"""As ``torch.distributed.nn.functional``."""

from __future__ import annotations

from torchestra.nn.functional import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)

_all_gather_base = all_gather_into_tensor

__all__ = [
    "_all_gather_base",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]
