"""As ``torch.distributed.rpc._testing``: workers that lose and delay messages (see torchestra.rpc.faulty)."""

from __future__ import annotations

from torchestra.compat.rpc._testing import faulty_agent_backend_registry
from torchestra.compat.rpc._testing.options import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions

__all__ = [
    "FaultyTensorPipeAgent",
    "FaultyTensorPipeRpcBackendOptions",
    "faulty_agent_backend_registry",
    "is_available",
]


def is_available() -> bool:
    """Return True: such workers are always available."""
    return True
