"""Tensors whose shards are on different ranks."""

from __future__ import annotations

from torchestra.sharded.tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    init_from_local_shards,
)

__all__ = ["Shard", "ShardMetadata", "ShardedTensor", "ShardedTensorMetadata", "init_from_local_shards"]
