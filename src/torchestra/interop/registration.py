"""The backend's name, and its registration with torch.distributed. Does not load the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BACKEND = "torchestra"
"""The name of the backend."""


def register_backend(creator: Callable[[Any, Any], Any]) -> None:
    """Register ``"torchestra"`` as a backend of torch.distributed; doing so again changes nothing.

    It serves CPU tensors, and CUDA tensors where torch has CUDA (through pinned memory). The default backends
    of all devices stay unchanged.
    """
    import torch
    from torch.distributed.distributed_c10d import Backend

    if hasattr(Backend, BACKEND.upper()):
        return  # Older versions of torch (2.6 is one) refuse a name that is already registered.
    devices = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]
    Backend.register_backend(BACKEND, creator, extended_api=True, devices=devices)
