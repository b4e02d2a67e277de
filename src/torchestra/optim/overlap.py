"""Updates parameters bucket by bucket, while DistributedDataParallel still averages other buckets.

The unit is a *piece*: consecutive parameters of one bucket, which one rank updates. Their data are parts of
one tensor, which that rank broadcasts afterwards. Either each bucket is one piece, and the ranks take turns;
or buckets are cut where a piece would get larger than an equal share of everything, and each piece goes to
the rank with the least so far, smaller buckets first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from torchestra.collectives.functions import broadcast
from torchestra.communicator.work import Work
from torchestra.errors import InvalidArgumentError
from torchestra.optim.shards import Partition, flattened
from torchestra.optim.subset import step_some
from torchestra.process_group import ProcessGroup


class PiecePosition(NamedTuple):
    """The position of a piece: its bucket, a range of the bucket's parameters, and the rank updating it."""

    bucket: int
    start: int
    stop: int
    rank: int


class Piece(NamedTuple):
    """A piece: its position, and the tensor of which its parameters are views."""

    cut: PiecePosition
    flat: torch.Tensor


class ShardedOptimizer(Protocol):
    """The part of a ZeroRedundancyOptimizer that a plan uses."""

    process_group: ProcessGroup

    @property
    def optim(self) -> torch.optim.Optimizer:
        """This rank's optimizer."""

    def follow_options(self) -> None:
        """Give this rank's optimizer the options of all parameter groups."""

    def assign(self, shares: Partition) -> None:
        """Assign the parameters to the ranks that update them."""


class OverlapPlan:
    """Assigns parts of a model's buckets to the ranks, once the buckets are final.

    Args:
        optimizer: updates the parameters in the buckets.

    Attributes:
        shard_buckets: whether buckets are cut.
    """

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        self.shard_buckets = False
        self._buckets: list[list[torch.Tensor]] = []
        self._pieces: list[list[Piece]] = []

    def reset(self) -> None:
        """Forget the plan and the buckets."""
        self._buckets, self._pieces = [], []

    def record(self, bucket: int, parameters: Sequence[torch.Tensor], final: bool) -> bool:
        """Record a bucket, or check it; return whether the plan is made, and the bucket is to be updated.

        Args:
            bucket: its index; the caller passes all buckets in each step, in their order.
            final: whether buckets will be the same in all further steps.

        Raises:
            InvalidArgumentError: the bucket has parameters that the optimizer does not, or has changed.
        """
        if not self._pieces:
            if not final:
                return False
            if bucket != 0 or not self._buckets:
                self._buckets.append(list(parameters))
                return False
            self._make()
        expected = self._buckets[bucket] if bucket < len(self._buckets) else []
        if list(map(id, parameters)) != list(map(id, expected)):
            raise InvalidArgumentError(
                f"ZeroRedundancyOptimizer: the parameters in bucket {bucket} are not those that were in it"
                " when the optimizer's state was divided between the ranks; with `overlap_with_ddp=True` it"
                " serves one model, whose parameters stay the same"
            )
        if not all(parameter.requires_grad for parameter in parameters):
            raise InvalidArgumentError(
                "ZeroRedundancyOptimizer with `overlap_with_ddp=True` does not support changing parameter"
                " trainability at run time"
            )
        return True

    def update(self, bucket: int, gradients: Sequence[torch.Tensor]) -> None:
        """Step this rank's parameters in a bucket, by the bucket's averaged gradients."""
        for cut, _ in self._pieces[bucket]:
            if cut.rank == self._optimizer.process_group.rank():
                piece = slice(cut.start, cut.stop)
                self._optimizer.follow_options()
                step_some(self._optimizer.optim, self._buckets[bucket][piece], gradients[piece])

    def exchange(self, bucket: int, async_op: bool) -> list[Work]:
        """Broadcast a bucket's parameters from the ranks that update them. Must be called by all ranks."""
        group = self._optimizer.process_group
        works = [
            broadcast(flat, group_src=cut.rank, group=group, async_op=async_op)
            for cut, flat in self._pieces[bucket]
        ]
        return [work for work in works if work is not None]

    def _make(self) -> None:
        size = self._optimizer.process_group.size()
        sizes = [[parameter.numel() for parameter in parameters] for parameters in self._buckets]
        cuts = cut_buckets(sizes, size) if self.shard_buckets else whole_buckets(sizes, size)
        shares: list[list[torch.Tensor]] = [[] for _ in range(size)]
        for cut in cuts:
            shares[cut.rank].extend(self._buckets[cut.bucket][cut.start : cut.stop])
        self._optimizer.assign(shares)
        pieces: list[list[Piece]] = [[] for _ in self._buckets]
        with torch.no_grad():
            for cut in cuts:
                parameters = self._buckets[cut.bucket][cut.start : cut.stop]
                pieces[cut.bucket].append(Piece(cut, flattened(parameters, parameters[0].dtype)))
        self._pieces = pieces


def whole_buckets(sizes: Sequence[Sequence[int]], ranks: int) -> list[PiecePosition]:
    """Make each bucket one piece; the ranks take turns.

    Args:
        sizes: for each bucket, the numbers of elements of its parameters.
    """
    return [PiecePosition(index, 0, len(bucket), index % ranks) for index, bucket in enumerate(sizes)]


def cut_buckets(sizes: Sequence[Sequence[int]], ranks: int) -> list[PiecePosition]:
    """Cut buckets into pieces below an equal share (or of one parameter) for the ranks with the least."""
    share = sum(map(sum, sizes)) / ranks
    loads = [0] * ranks
    cuts: list[PiecePosition] = []

    def give(bucket: int, start: int, stop: int) -> None:
        rank = loads.index(min(loads))
        loads[rank] += sum(sizes[bucket][start:stop])
        cuts.append(PiecePosition(bucket, start, stop, rank))

    for bucket in sorted(range(len(sizes)), key=lambda index: sum(sizes[index])):
        start = 0
        for position in range(1, len(sizes[bucket])):
            if sum(sizes[bucket][start : position + 1]) >= share:
                give(bucket, start, position)
                start = position
        give(bucket, start, len(sizes[bucket]))
    return cuts
