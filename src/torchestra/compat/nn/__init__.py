"""As ``torch.distributed.nn``."""

from __future__ import annotations

from torchestra.compat.nn.functional import (
    _all_gather_base,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from torchestra.nn import RemoteModule

__all__ = [
    "RemoteModule",
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
