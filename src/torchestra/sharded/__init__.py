"""Tensors whose shards are on different ranks."""

from __future__ import annotations

from torchestra.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from torchestra.sharded.specification import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec
from torchestra.sharded.tensor import Shard, ShardedTensor, init_from_local_shards

__all__ = [
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "ShardingSpec",
    "TensorProperties",
    "init_from_local_shards",
]
