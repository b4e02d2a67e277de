"""The options of a faulty worker, by torch's name."""

from __future__ import annotations

from torchestra.compat.rpc.options import TensorPipeRpcBackendOptions
from torchestra.rpc.faulty import FaultyAgent, FaultyRpcBackendOptions

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions"]

FaultyTensorPipeAgent = FaultyAgent


class FaultyTensorPipeRpcBackendOptions(FaultyRpcBackendOptions, TensorPipeRpcBackendOptions):
    """:class:`torchestra.rpc.faulty.FaultyRpcBackendOptions` by torch's arguments."""
