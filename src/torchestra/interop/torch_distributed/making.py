"""Making a group of torch.distributed that runs on torchestra's engine."""

from __future__ import annotations

from typing import Any

from torchestra.interop.torch_distributed.group import TorchestraGroup
from torchestra.interop.torch_distributed.meeting import meet

__all__ = ["make"]


def make(options: Any, backend_options: Any) -> TorchestraGroup:
    """What torch.distributed calls to make a group; returns when all its ranks have come.

    Args:
        options: torch's ``_DistributedBackendOptions``: store, rank, size, time-out, name and ranks.
        backend_options: the ``pg_options`` of the call, which only backends of other devices use.
    """
    return TorchestraGroup(meet(options), options.store, backend_options)
