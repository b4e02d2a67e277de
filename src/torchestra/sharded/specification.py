"""Rules by which a tensor is divided among ranks: into equal pieces of one dimension, or piece by piece."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Union

import torch

from torchestra.errors import InvalidArgumentError, UnsupportedArgumentError
from torchestra.sharded.metadata import (
    Placement,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    parse_placement,
)


class ShardingSpec(ABC):
    """A rule by which tensors are divided. Programs may derive their own."""

    @abstractmethod
    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """Return where the shards of a tensor of this size are."""


@dataclass
class ChunkShardingSpec(ShardingSpec):
    """Divide one dimension into pieces of one length, as :func:`torch.chunk` does; the last may be shorter.

    Where there are more placements than pieces, the rest get empty ones.

    Args:
        dim: the dimension, which may be counted from the end.
        placements: where the pieces are, in their order: ``["rank:0/cpu", "rank:1/cpu"]``.

    Raises:
        UnsupportedArgumentError: the dimension is given by a name.
        InvalidArgumentError: it is no integer, there is no placement, or one is not of that form.
    """

    dim: int
    placements: list[Placement]

    def __init__(self, dim: int, placements: Sequence[Union[str, Placement]]) -> None:
        if isinstance(dim, str):
            raise UnsupportedArgumentError(f"ChunkShardingSpec: `dim` must be a number, got the name {dim!r}")
        if not isinstance(dim, int):
            raise InvalidArgumentError(f"ChunkShardingSpec: `dim` must be an integer, got {dim!r}")
        self.dim = dim
        self.placements = [parse_placement(each) if isinstance(each, str) else each for each in placements]
        if not self.placements:
            raise InvalidArgumentError("ChunkShardingSpec: `placements` must name a rank, got none")

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """Return where the pieces are.

        Raises:
            InvalidArgumentError: the tensor has no such dimension.
        """
        dimensions = len(tensor_sizes)
        if not -dimensions <= self.dim < dimensions:
            raise InvalidArgumentError(
                f"ChunkShardingSpec: `dim` is {self.dim}, and the tensor has {dimensions} dimensions"
            )
        length = tensor_sizes[self.dim]
        piece = -(-length // len(self.placements))
        shards = []
        for number, placement in enumerate(self.placements):
            begin = min(number * piece, length)
            offsets, sizes = [0] * dimensions, list(tensor_sizes)
            offsets[self.dim], sizes[self.dim] = begin, min(piece, length - begin)
            shards.append(ShardMetadata(offsets, sizes, placement))
        return _metadata(shards, tensor_sizes, tensor_properties)


@dataclass
class EnumerableShardingSpec(ShardingSpec):
    """Divide as a list of shards says, each with its place and size.

    Raises:
        InvalidArgumentError: there are none, or two overlap.
    """

    shards: list[ShardMetadata]

    def __post_init__(self) -> None:
        if not self.shards:
            raise InvalidArgumentError("EnumerableShardingSpec: `shards` must have a shard, got none")
        if len({len(each.shard_sizes) for each in self.shards}) > 1:
            raise InvalidArgumentError("EnumerableShardingSpec: shards have different numbers of dimensions")
        check_disjoint(self.shards)

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """Return the list, once it is found to make up a tensor of this size.

        Raises:
            InvalidArgumentError: a shard exceeds the tensor, or they do not cover it.
        """
        check_cover(self.shards, tensor_sizes)
        return _metadata(self.shards, tensor_sizes, tensor_properties)


def _metadata(
    shards: Sequence[ShardMetadata], size: torch.Size, properties: TensorProperties
) -> ShardedTensorMetadata:
    return ShardedTensorMetadata(tuple(shards), size, properties.dtype, properties.requires_grad)


def check_disjoint(parts: Sequence[ShardMetadata]) -> None:
    """Refuse parts of which two overlap.

    Raises:
        InvalidArgumentError: two do.
    """
    for one, other in combinations(parts, 2):
        if _overlap(one, other):
            raise InvalidArgumentError(f"Shards {one} and {other} overlap")


def check_cover(parts: Sequence[ShardMetadata], size: torch.Size) -> None:
    """Refuse parts, of which no two overlap, that are not the whole of a tensor.

    Raises:
        InvalidArgumentError: one exceeds the tensor, or together they have another volume.
    """
    for part in parts:
        ends = [sum(pair) for pair in zip(part.shard_offsets, part.shard_sizes, strict=True)]
        if len(ends) != len(size) or any(end > length for end, length in zip(ends, size, strict=True)):
            raise InvalidArgumentError(f"Shard {part} exceeds tensor dim: a tensor of size {tuple(size)}")
    volume = sum(math.prod(part.shard_sizes) for part in parts)
    if volume != size.numel():
        raise InvalidArgumentError(
            f"Total volume of shards: {volume} does not match tensor volume: {size.numel()}, in other"
            " words all the individual shards do not cover the entire tensor"
        )


def _overlap(one: ShardMetadata, other: ShardMetadata) -> bool:
    return all(
        begin < other_begin + other_size and other_begin < begin + size and size and other_size
        for begin, size, other_begin, other_size in zip(
            one.shard_offsets, one.shard_sizes, other.shard_offsets, other.shard_sizes, strict=True
        )
    )
