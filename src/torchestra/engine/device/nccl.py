"""torch's ProcessGroupNCCL: whether it is available, and its creation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from torchestra.engine.device.torch_store import store_for_torch
from torchestra.store import Store

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""How torch looks after its operations, where the user says nothing else: not by ending the process.

completion.py does it instead: an operation that fails ends with an error. The monitor also has threads that
would ask the store, whose code is Python, while the interpreter ends.
"""

_SLACK_SECONDS = 60.0  # the watch here gives operations up before torch does


def bindings() -> Any:
    """Return torch's own classes."""
    from torch._C import _distributed_c10d

    return _distributed_c10d


def is_nccl_built() -> bool:
    """Return whether this torch has ProcessGroupNCCL."""
    return torch.backends.cuda.is_built() and hasattr(bindings(), "ProcessGroupNCCL")


def why_no_nccl() -> str:
    """Return why this rank cannot use NCCL, or an empty string."""
    if not is_nccl_built():
        return f"torch {torch.__version__} was built without NCCL"
    if not torch.cuda.is_available():
        return "there is no CUDA device that torch can use"
    return ""


def open_nccl(store: Store, rank: int, size: int, name: str, seconds: float) -> tuple[Any, Any]:
    """Return one rank's ProcessGroupNCCL, and its store, which must live as long. Does not connect yet.

    Args:
        store: one that only these ranks, and only for this purpose, use.
        seconds: how long the ranks look for each other.
    """
    c10d = bindings()
    held = store_for_torch(store, seconds)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds + _SLACK_SECONDS)
    options.group_name = name
    with _settings():
        return c10d.ProcessGroupNCCL(held, rank, size, options), held


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Apply SETTINGS to the environment while the constructor reads it."""
    added = {name: value for name, value in SETTINGS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
