"""A hook that does nothing, to measure the cost of communication."""

from __future__ import annotations

from typing import Any

import torch

from torchestra.nn.parallel.comm_hooks.interface import GradBucket

__all__ = ["noop_hook"]


def noop_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave each rank its own gradients, so that the models diverge.

    A step with this hook takes the least time that any hook can reach.
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
