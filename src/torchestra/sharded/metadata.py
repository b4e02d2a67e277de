"""Where the shards of a tensor are, and how large: what all ranks know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Union

import torch

from torchestra.errors import InvalidArgumentError


class Placement(NamedTuple):
    """The location of a shard: its rank in the group, and its device."""

    on_rank: int
    on_device: torch.device

    def rank(self) -> int:
        """Return the rank."""
        return self.on_rank

    def device(self) -> torch.device:
        """Return the device."""
        return self.on_device

    def __str__(self) -> str:
        return f"rank:{self.on_rank}/{self.on_device}"


@dataclass(eq=True, unsafe_hash=False)
class ShardMetadata:
    """The position, size and placement of a shard.

    Args:
        shard_offsets: for each dimension, the index at which it begins.
        shard_sizes: for each dimension, its length.
        placement: its rank and device: ``"rank:1/cpu"``.

    Raises:
        InvalidArgumentError: there are not as many offsets as sizes, one is negative, or the placement is not
            of that form.
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: Placement | None = None

    def __init__(
        self,
        shard_offsets: Sequence[int],
        shard_sizes: Sequence[int],
        placement: Union[str, Placement, None] = None,
    ) -> None:
        self.shard_offsets = list(shard_offsets)
        self.shard_sizes = list(shard_sizes)
        self.placement = parse_placement(placement) if isinstance(placement, str) else placement
        if len(self.shard_offsets) != len(self.shard_sizes):
            raise InvalidArgumentError(
                "shard_offsets and shard_sizes should have the same number of elements, found"
                f" {len(self.shard_offsets)} and {len(self.shard_sizes)} respectively"
            )
        for name, numbers in (("shard_offsets", self.shard_offsets), ("shard_sizes", self.shard_sizes)):
            if any(number < 0 for number in numbers):
                raise InvalidArgumentError(f"{name} should be >=0, got {numbers}")

    def __hash__(self) -> int:
        return hash((*self.shard_offsets, *self.shard_sizes, self.placement))


def parse_placement(text: str) -> Placement:
    """Parse ``"rank:1/cpu"``.

    Raises:
        InvalidArgumentError: it has another form.
    """
    rank, slash, device = text.partition("/")
    if not rank.startswith("rank:") or not rank[5:].isdecimal() or not slash:
        raise InvalidArgumentError(f"placement must be of the form 'rank:<rank>/<device>', got {text!r}")
    return Placement(int(rank[5:]), torch.device(device))


@dataclass(frozen=True)
class TensorProperties:
    """What a sharded tensor is like, its size aside. Only strided, contiguous ones are served."""

    dtype: torch.dtype
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False


@dataclass(frozen=True)
class ShardedTensorMetadata:
    """A sharded tensor's metadata, the same on all ranks: its shards, size, and dtype."""

    shards_metadata: tuple[ShardMetadata, ...]
    size: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @property
    def tensor_properties(self) -> TensorProperties:
        """Return the dtype and the like, as a sharding specification is told them."""
        return TensorProperties(self.dtype, requires_grad=self.requires_grad)
