"""Tensors whose shards are on different ranks.

They support only the operations below. Keep one in a module with ordinary parameters (DistributedDataParallel
ignores it), use this rank's shards, or gather it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple, Union

import torch

from torchestra.collectives.functions import recv, send
from torchestra.collectives.objects import all_gather_object
from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError
from torchestra.process_group import ProcessGroup
from torchestra.world.init import AnyGroup, member_group

_aten = torch.ops.aten


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
        self.placement = _placed(placement) if isinstance(placement, str) else placement
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


def _placed(text: str) -> Placement:
    rank, slash, device = text.partition("/")
    if not rank.startswith("rank:") or not rank[5:].isdecimal() or not slash:
        raise InvalidArgumentError(f"placement must be of the form 'rank:<rank>/<device>', got {text!r}")
    return Placement(int(rank[5:]), torch.device(device))


@dataclass
class Shard:
    """A part of a tensor, on this rank.

    Raises:
        InvalidArgumentError: the tensor has another size, or is on another device, than the metadata say.
    """

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        if list(self.tensor.size()) != self.metadata.shard_sizes:
            raise InvalidArgumentError(
                "Shard tensor size does not match with metadata.shard_lengths! Found shard tensor size:"
                f" {list(self.tensor.size())}, metadata.shard_lengths: {self.metadata.shard_sizes}"
            )
        placement = self.metadata.placement
        if placement is not None and placement.device() != self.tensor.device:
            raise InvalidArgumentError(
                "Local shard tensor device does not match with local Shard's placement! Found local shard"
                f" tensor device: {self.tensor.device}, local shard metadata placement device:"
                f" {placement.device()}"
            )

    @classmethod
    def from_tensor_and_offsets(cls, tensor: torch.Tensor, shard_offsets: list[int], rank: int) -> Shard:
        """Make a shard from a tensor of this rank."""
        return cls(tensor, ShardMetadata(shard_offsets, tensor.size(), f"rank:{rank}/{tensor.device}"))


@dataclass(frozen=True)
class ShardedTensorMetadata:
    """A sharded tensor's metadata, the same on all ranks: its shards, size, and dtype."""

    shards_metadata: tuple[ShardMetadata, ...]
    size: torch.Size
    dtype: torch.dtype
    requires_grad: bool


class ShardedTensor(torch.Tensor):
    """A tensor whose shards are on the ranks of a group. :func:`init_from_local_shards` makes it.

    It has the shape and dtype of the whole tensor, and no memory of its own.
    """

    _local_shards: list[Shard]
    _metadata: ShardedTensorMetadata
    _process_group: ProcessGroup

    @staticmethod
    def __new__(
        cls: type[ShardedTensor], shards: list[Shard], metadata: ShardedTensorMetadata, group: ProcessGroup
    ) -> ShardedTensor:
        made: ShardedTensor = torch.Tensor._make_wrapper_subclass(
            cls, metadata.size, dtype=metadata.dtype, requires_grad=metadata.requires_grad
        )
        made._local_shards, made._metadata, made._process_group = shards, metadata, group
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def _init_from_local_shards(
        cls,
        local_shards: list[Shard],
        *global_size: int | Sequence[int],
        process_group: AnyGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """Call :func:`init_from_local_shards`."""
        return init_from_local_shards(
            local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs
        )

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: AnyGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """Make a tensor from this rank's shards and the metadata of all, which every rank must know.

        Nothing is sent.

        Raises:
            InvalidArgumentError: the shards are not those that the metadata place on this rank.
        """
        _check_no_rrefs(init_rrefs)
        group = member_group(process_group, "_init_from_local_shards_and_global_metadata")
        parts = sharded_tensor_metadata.shards_metadata
        expected = [
            part for part in parts if part.placement is not None and part.placement.rank() == group.rank()
        ]
        given = _described(local_shards, sharded_tensor_metadata.size, group.rank()) if local_shards else None
        if list(given.shards_metadata if given else ()) != expected:
            raise InvalidArgumentError(
                f"_init_from_local_shards_and_global_metadata: the metadata place {expected} on rank"
                f" {group.rank()}, got {[shard.metadata for shard in local_shards]}"
            )
        return cls(local_shards, sharded_tensor_metadata, group)

    def local_shards(self) -> list[Shard]:
        """Return this rank's shards."""
        return self._local_shards

    def metadata(self) -> ShardedTensorMetadata:
        """Return the metadata, which are the same on all ranks."""
        return self._metadata

    def local_tensor(self) -> torch.Tensor:
        """Return the tensor of this rank's only shard.

        Raises:
            InvalidArgumentError: this rank has several shards.
        """
        if len(self._local_shards) != 1:
            raise InvalidArgumentError(
                f"Only single local shard is supported, and this rank has {len(self._local_shards)}"
            )
        return self._local_shards[0].tensor

    @torch.no_grad()
    def gather(self, dst: int = 0, out: torch.Tensor | None = None) -> None:  # type: ignore[override]
        """Copy all shards into a tensor of rank ``dst``. Must be called by all ranks.

        Args:
            dst: the rank, in the group's numbering.
            out: on that rank, the tensor; on others, None.

        Raises:
            InvalidArgumentError: on rank ``dst``, ``out`` is missing or of another size; on others, it is
                given.
        """
        group = self._process_group
        own = group.rank()
        if own != dst:
            if out is not None:
                raise InvalidArgumentError(
                    "Argument ``dst_tensor`` must NOT be specified on non-destination ranks."
                )
            for shard in self._local_shards:
                send(shard.tensor.detach(), group=group, group_dst=dst)
            return
        if out is None:
            raise InvalidArgumentError(f"Argument ``dst_tensor`` must be specified on destination rank {dst}")
        if out.size() != self._metadata.size:
            raise InvalidArgumentError(
                f"Argument ``dst_tensor`` have size {tuple(out.size())}, but should be"
                f" {tuple(self._metadata.size)}"
            )
        mine = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in self._local_shards}
        for part in self._metadata.shards_metadata:
            assert part.placement is not None
            if part.placement.rank() == own:
                tensor = mine[tuple(part.shard_offsets)].detach()
            else:
                tensor = torch.empty(part.shard_sizes, dtype=self._metadata.dtype)
                recv(tensor, group=group, group_src=part.placement.rank())
            out.detach()[_slices(part)] = tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in (_aten.detach.default, _aten.alias.default, _aten.clone.default):
            raise InvalidArgumentTypeError(
                f"torch function '{func}' is not supported for ShardedTensor; use local_shards() or gather()"
            )
        old: ShardedTensor = args[0]
        shards = [Shard(func(shard.tensor), shard.metadata) for shard in old._local_shards]
        metadata = ShardedTensorMetadata(
            old._metadata.shards_metadata, old._metadata.size, old._metadata.dtype, requires_grad=False
        )
        return ShardedTensor(shards, metadata, old._process_group)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = [str(part.placement) for part in self._metadata.shards_metadata]
        return (
            f"<ShardedTensor of size {tuple(self.shape)}, dtype {self.dtype}, shards on {', '.join(parts)}>"
        )


def init_from_local_shards(
    local_shards: list[Shard],
    *global_size: int | Sequence[int],
    process_group: AnyGroup | None = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """Make a tensor from the ranks' shards. Must be called by all ranks of the group.

    Args:
        local_shards: this rank's shards; at least one on every rank.
        *global_size: the size of the whole, as ints or as one sequence.
        process_group: the ranks; None: the default group.
        init_rrefs: must be False.

    Raises:
        InvalidArgumentError: something is wrong with a shard (on its rank alone, where it can be seen there),
            or (on all ranks) they differ in size, dtype or whether they require gradients, overlap, or do not
            cover the whole.
    """
    _check_no_rrefs(init_rrefs)
    group = member_group(process_group, "init_from_local_shards")
    size = global_size[0] if len(global_size) == 1 and not isinstance(global_size[0], int) else global_size
    # A rank that is wrong tells the others, which would wait otherwise.
    problem = ""
    try:
        mine = _described(local_shards, torch.Size(size), group.rank())  # type: ignore[arg-type]
    except (InvalidArgumentError, TypeError) as error:
        problem, mine = str(error), None
    gathered: list[Any] = [None] * group.size()
    all_gather_object(gathered, (problem, mine), group)
    for rank, (trouble, _) in enumerate(gathered):
        if trouble:
            raise InvalidArgumentError(f"init_from_local_shards: rank {rank}: {trouble}")
    metadata = _agreed([described for _, described in gathered])
    return ShardedTensor(local_shards, metadata, group)


def _check_no_rrefs(init_rrefs: bool) -> None:
    if init_rrefs:
        raise InvalidArgumentError("init_rrefs: remote references to shards are not served")


def _described(shards: Sequence[Shard], size: torch.Size, rank: int) -> ShardedTensorMetadata:
    """Return this rank's part of the metadata."""
    if not shards:
        raise InvalidArgumentError("must have local shards!")
    first = shards[0].tensor
    for shard in shards:
        tensor, placement = shard.tensor, shard.metadata.placement
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise InvalidArgumentError(
                "Only torch.strided layout and torch.contiguous_format memory_format are currently"
                f" supported, but found {tensor.layout} with strides"
            )
        if placement is None or placement.rank() != rank:
            raise InvalidArgumentError(
                "Local shard metadata's rank does not match with the rank in its process group! Found current"
                f" rank in the process group: {rank}, local ShardMetadata placement: {placement}"
            )
        for name in ("dtype", "requires_grad"):
            if getattr(tensor, name) != getattr(first, name):
                raise InvalidArgumentError(
                    f"Local shards' tensor {name} property need to be the same on rank:{rank}! Found one"
                    f" local shard tensor {name}={getattr(first, name)}, the other local shard tensor"
                    f" {name}={getattr(tensor, name)}."
                )
    return ShardedTensorMetadata(
        tuple(shard.metadata for shard in shards), size, first.dtype, first.requires_grad
    )


def _agreed(gathered: Sequence[ShardedTensorMetadata]) -> ShardedTensorMetadata:
    """Return the metadata of the whole."""
    first = gathered[0]
    for rank, each in enumerate(gathered):
        for name in ("size", "dtype", "requires_grad"):
            if getattr(each, name) != getattr(first, name):
                raise InvalidArgumentError(
                    f"ShardedTensor {name} property does not match from different ranks! Found"
                    f" {name}={getattr(first, name)} on rank:0, and {name}={getattr(each, name)} on"
                    f" rank:{rank}."
                )
    parts = tuple(part for each in gathered for part in each.shards_metadata)
    for part in parts:
        ends = [sum(pair) for pair in zip(part.shard_offsets, part.shard_sizes, strict=True)]
        if len(ends) != len(first.size) or any(
            end > length for end, length in zip(ends, first.size, strict=True)
        ):
            raise InvalidArgumentError(
                f"Shard {part} exceeds tensor dim: a tensor of size {tuple(first.size)}"
            )
    for one, other in combinations(parts, 2):
        if _overlap(one, other):
            raise InvalidArgumentError(f"Shards {one} and {other} overlap")
    volume = sum(math.prod(part.shard_sizes) for part in parts)
    if volume != first.size.numel():
        raise InvalidArgumentError(
            f"Total volume of shards: {volume} does not match tensor volume: {first.size.numel()}, in other"
            " words all the individual shards do not cover the entire tensor"
        )
    return ShardedTensorMetadata(parts, first.size, first.dtype, first.requires_grad)


def _slices(part: ShardMetadata) -> tuple[slice, ...]:
    """Return the index of a part in the whole."""
    pairs = zip(part.shard_offsets, part.shard_sizes, strict=True)
    return tuple(slice(offset, offset + size) for offset, size in pairs)


def _overlap(one: ShardMetadata, other: ShardMetadata) -> bool:
    return all(
        begin < other_begin + other_size and other_begin < begin + size and size and other_size
        for begin, size, other_begin, other_size in zip(
            one.shard_offsets, one.shard_sizes, other.shard_offsets, other.shard_sizes, strict=True
        )
    )
