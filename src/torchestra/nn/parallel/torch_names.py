"""torch's private names around DistributedDataParallel, which other programs and tests import."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchestra.errors import InvalidShapeError
from torchestra.nn.parallel.buckets import BUCKET_CAP_MB, FIRST_BUCKET_BYTES
from torchestra.nn.parallel.buffer_hooks import BufferCommHook, BufferCommHookLocation
from torchestra.nn.parallel.joining import DDPJoinHook
from torchestra.nn.parallel.mixed_precision import MixedPrecision
from torchestra.nn.parallel.outputs import tensors_in

_DEFAULT_BUCKET_CAP_MB = int(BUCKET_CAP_MB)
_MB_TO_BYTES = 1 << 20
_BufferCommHook = BufferCommHook
_BufferCommHookLocation = BufferCommHookLocation
_DDPJoinHook = DDPJoinHook
_MixedPrecision = MixedPrecision

_SETTINGS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "GLOO_DEVICE_TRANSPORT",
    "NCCL_SOCKET_IFNAME",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_TOPO_DUMP_FILE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_DISTRIBUTED_DEBUG",
)


def _find_tensors(obj: Any) -> Iterable[torch.Tensor]:
    """Return the tensors in an output of any type."""
    return tensors_in(obj)


def _dump_DDP_relevant_env_vars() -> None:
    """Print the environment variables that launchers and backends read, one ``env:NAME=VALUE`` per line."""
    print("\n".join(f"env:{name}={os.environ.get(name, 'N/A')}" for name in _SETTINGS))


@dataclass(frozen=True)
class _BucketCapacityConfig:
    """torch's bucket sizes in bytes, from DistributedDataParallel's arguments.

    Only for programs that read them: our first bucket has at most 1 MiB whatever the cap is.
    """

    bucket_bytes_cap: int
    per_bucket_bytes_caps: tuple[int, ...]
    first_bucket_bytes_cap: int

    @classmethod
    def create(
        cls, bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None, use_python_reducer: bool
    ) -> _BucketCapacityConfig:
        """Make it from a cap in MiB, or a list, which wins; torch's reducer in Python takes no list."""
        if bucket_cap_mb_list and use_python_reducer:
            raise InvalidShapeError("with bucket_cap_mb_list, python reducer is not supported")
        each = tuple(int(cap * _MB_TO_BYTES) for cap in bucket_cap_mb_list or ())
        if each:
            return cls(max(each), each, max(each))
        if bucket_cap_mb is None:
            return cls(_DEFAULT_BUCKET_CAP_MB * _MB_TO_BYTES, (), FIRST_BUCKET_BYTES)
        cap = int(bucket_cap_mb * _MB_TO_BYTES)
        return cls(cap, (), cap)

    @property
    def bucket_cap_mb(self) -> int:
        """Return the cap in MiB."""
        return self.bucket_bytes_cap // _MB_TO_BYTES

    @property
    def has_custom_per_bucket_caps(self) -> bool:
        """Return whether a list was given."""
        return bool(self.per_bucket_bytes_caps)

    def compute_bucket_size_limits(
        self, static_graph: bool, find_unused_parameters: bool
    ) -> tuple[list[int], list[int]]:
        """Return the limits of the first buckets, and of those after the first step (empty: the usual)."""
        if self.per_bucket_bytes_caps:
            return list(self.per_bucket_bytes_caps), list(self.per_bucket_bytes_caps)
        if static_graph or not find_unused_parameters:
            return [sys.maxsize], []
        return sorted({self.first_bucket_bytes_cap, self.bucket_bytes_cap}), []
