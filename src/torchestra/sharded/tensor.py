"""Tensors whose shards are on different ranks.

They support only the operations below. Keep one in a module with ordinary parameters (DistributedDataParallel
ignores it), use this rank's shards, or gather it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchestra.collectives.functions import recv, send
from torchestra.collectives.objects import all_gather_object
from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError, UnsupportedArgumentError
from torchestra.process_group import ProcessGroup
from torchestra.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from torchestra.sharded.specification import ShardingSpec, check_cover, check_disjoint
from torchestra.world.init import AnyGroup, member_group

_aten = torch.ops.aten


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
        expected = [part for part in parts if _rank_of(part) == group.rank()]
        given = _described(local_shards, sharded_tensor_metadata.size, group.rank()) if local_shards else None
        if list(given.shards_metadata if given else ()) != expected:
            raise InvalidArgumentError(
                f"_init_from_local_shards_and_global_metadata: the metadata place {expected} on rank"
                f" {group.rank()}, got {[shard.metadata for shard in local_shards]}"
            )
        return cls(local_shards, sharded_tensor_metadata, group)

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: torch.Tensor,
        sharding_spec: ShardingSpec,
        *global_size: int | Sequence[int],
        process_group: AnyGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """Make a tensor of which this rank has one shard, by a rule that every rank knows.

        Nothing is sent, so that ranks differ is not seen.

        Args:
            local_tensor: this rank's shard, contiguous.
            sharding_spec: divides the whole; one of its shards must be on this rank.
            *global_size: the size of the whole, as ints or as one sequence.
            process_group: the ranks; None: the default group.
            init_rrefs: must be False.

        Raises:
            UnsupportedArgumentError: the rule gives this rank no shard, or several.
            InvalidArgumentError: the rule does not fit the size, or the tensor what it gives this rank.
        """
        _check_no_rrefs(init_rrefs)
        group = member_group(process_group, "_init_from_local_tensor")
        if not local_tensor.is_contiguous():
            raise InvalidArgumentError(
                "_init_from_local_tensor: `local_tensor` must be contiguous; give its .contiguous()"
            )
        properties = TensorProperties(local_tensor.dtype, requires_grad=local_tensor.requires_grad)
        metadata = sharding_spec.build_metadata(_whole_size(global_size), properties)
        _check_ranks(metadata.shards_metadata, group)
        mine = [part for part in metadata.shards_metadata if _rank_of(part) == group.rank()]
        if len(mine) != 1:
            raise UnsupportedArgumentError(
                f"_init_from_local_tensor: rank {group.rank()} must have one shard, and {sharding_spec} gives"
                f" it {len(mine)}"
            )
        return cls([Shard(local_tensor, mine[0])], metadata, group)

    def local_shards(self) -> list[Shard]:
        """Return this rank's shards."""
        return self._local_shards

    def metadata(self) -> ShardedTensorMetadata:
        """Return the metadata, which are the same on all ranks."""
        return self._metadata

    def local_tensor(self) -> torch.Tensor:
        """Return the tensor of this rank's only shard.

        Raises:
            UnsupportedArgumentError: this rank has several shards.
        """
        if len(self._local_shards) != 1:
            raise UnsupportedArgumentError(
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
    # A rank that is wrong tells the others, which would wait otherwise.
    problem = ""
    try:
        mine = _described(local_shards, _whole_size(global_size), group.rank())
    except (InvalidArgumentError, TypeError) as error:
        problem, mine = str(error), None
    gathered: list[Any] = [None] * group.size()
    all_gather_object(gathered, (problem, mine), group)
    for rank, (trouble, _) in enumerate(gathered):
        if trouble:
            raise InvalidArgumentError(f"init_from_local_shards: rank {rank}: {trouble}")
    metadata = _agreed([described for _, described in gathered])
    return ShardedTensor(local_shards, metadata, group)


def _whole_size(given: tuple[int | Sequence[int], ...]) -> torch.Size:
    """Return a size that is given as ints or as one sequence."""
    sizes = given[0] if len(given) == 1 and not isinstance(given[0], int) else given
    return torch.Size(sizes)  # type: ignore[arg-type]


def _rank_of(part: ShardMetadata) -> int | None:
    return None if part.placement is None else part.placement.rank()


def _check_ranks(parts: Sequence[ShardMetadata], group: ProcessGroup) -> None:
    for part in parts:
        rank = _rank_of(part)
        if rank is None or not 0 <= rank < group.size():
            raise InvalidArgumentError(
                f"_init_from_local_tensor: {part} must be on a rank of the group, of 0 to {group.size() - 1}"
            )


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
    check_disjoint(parts)
    check_cover(parts, first.size)
    return ShardedTensorMetadata(parts, first.size, first.dtype, first.requires_grad)


def _slices(part: ShardMetadata) -> tuple[slice, ...]:
    """Return the index of a part in the whole."""
    pairs = zip(part.shard_offsets, part.shard_sizes, strict=True)
    return tuple(slice(offset, offset + size) for offset, size in pairs)
