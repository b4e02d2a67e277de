"""The backend's name, and how torch.distributed comes to know it. Loads nothing of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BACKEND = "torchestra"
"""The name of the backend."""


def register_backend(creator: Callable[[Any, Any], Any]) -> None:
    """Make ``"torchestra"`` known to torch.distributed as a backend; doing it again changes nothing.

    It serves tensors of the CPU, and those of CUDA where torch has that (through pinned memory). What other
    backends are the default for stays with them.
    """
    import torch
    from torch.distributed.distributed_c10d import Backend

    if hasattr(Backend, BACKEND.upper()):
        return  # Older versions of torch (2.6 is one) refuse a name that they know.
    devices = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]
    Backend.register_backend(BACKEND, creator, extended_api=True, devices=devices)
