"""Updating parameters bucket by bucket, while DistributedDataParallel still averages other buckets.

The unit is a *piece*: consecutive parameters of one bucket, which one rank updates. Their data are parts of
one tensor, which that rank broadcasts afterwards. Either a bucket is one piece, and buckets go round; or
buckets are cut where a piece would get larger than an equal share of everything, and pieces go to the rank
that has least, smaller buckets first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchestra.collectives.functions import broadcast
from torchestra.communicator.work import Work
from torchestra.errors import InvalidArgumentError
from torchestra.nn.parallel.comm_hooks.interface import GradBucket
from torchestra.optim.shards import flattened
from torchestra.optim.subset import step_some

if TYPE_CHECKING:
    from torchestra.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["OverlapPlan"]


class Cut(NamedTuple):
    """Where a piece lies: in which bucket, which of its parameters, and whose it is."""

    bucket: int
    start: int
    stop: int
    rank: int


class Piece(NamedTuple):
    """A piece: where it lies, and the tensor that its parameters are parts of."""

    cut: Cut
    flat: torch.Tensor


class OverlapPlan:
    """What each rank does with each bucket of a model, from when the buckets are final.

    Args:
        zero: the optimizer whose parameters the buckets hold.

    Attributes:
        shard_buckets: whether buckets are cut.
    """

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero
        self.shard_buckets = False
        self._buckets: list[list[torch.Tensor]] = []
        self._pieces: list[list[Piece]] = []

    def begin_anew(self) -> None:
        """Have no plan, and learn the buckets again."""
        self._buckets, self._pieces = [], []

    def see(self, bucket: GradBucket, final: bool) -> bool:
        """Learn of a bucket; whether the plan is made, so that it is to be updated.

        Args:
            bucket: buckets are seen in their order, all in each step.
            final: whether they will be the same in all steps from now on.

        Raises:
            InvalidArgumentError: it has parameters that the optimizer was not given, or it has changed.
        """
        parameters = bucket.parameters()
        if not self._pieces:
            if not final:
                return False
            if bucket.index() != 0 or not self._buckets:
                self._buckets.append(list(parameters))
                return False
            self._make()
        expected = self._buckets[bucket.index()] if bucket.index() < len(self._buckets) else []
        if [id(parameter) for parameter in parameters] != [id(parameter) for parameter in expected]:
            raise InvalidArgumentError(
                f"ZeroRedundancyOptimizer: the parameters in bucket {bucket.index()} are not those that were"
                " in it when the optimizer's state was divided between the ranks; with"
                " `overlap_with_ddp=True` it serves one model, whose parameters stay the same"
            )
        if not all(parameter.requires_grad for parameter in parameters):
            raise InvalidArgumentError(
                "ZeroRedundancyOptimizer with `overlap_with_ddp=True` does not support changing parameter"
                " trainability at run time"
            )
        return True

    def update(self, bucket: GradBucket, averaged: torch.Tensor) -> None:
        """Step the parameters in a bucket that are this rank's, by the gradients that a hook has averaged."""
        if averaged.data_ptr() != bucket.buffer().data_ptr():
            bucket.buffer().copy_(averaged.view(-1))
        gradients = bucket.gradients()
        for cut, _ in self._pieces[bucket.index()]:
            if cut.rank == self._zero.rank:
                place = slice(cut.start, cut.stop)
                self._zero.follow_options()
                step_some(self._zero.optim, self._buckets[cut.bucket][place], gradients[place])

    def exchange(self, bucket: GradBucket, async_op: bool) -> list[Work]:
        """Take over the parameters in a bucket from those that update them. Must be called by all ranks."""
        group = self._zero.process_group
        works = [
            broadcast(flat, group_src=cut.rank, group=group, async_op=async_op)
            for cut, flat in self._pieces[bucket.index()]
        ]
        return [work for work in works if work is not None]

    def _make(self) -> None:
        size = self._zero.world_size
        sizes = [[parameter.numel() for parameter in parameters] for parameters in self._buckets]
        cuts = cut_buckets(sizes, size) if self.shard_buckets else whole_buckets(sizes, size)
        shares: list[list[torch.Tensor]] = [[] for _ in range(size)]
        for cut in cuts:
            shares[cut.rank].extend(self._buckets[cut.bucket][cut.start : cut.stop])
        self._zero.assign(shares)
        pieces: list[list[Piece]] = [[] for _ in self._buckets]
        with torch.no_grad():
            for cut in cuts:
                parameters = self._buckets[cut.bucket][cut.start : cut.stop]
                pieces[cut.bucket].append(Piece(cut, flattened(parameters, parameters[0].dtype)))
        self._pieces = pieces


def whole_buckets(sizes: Sequence[Sequence[int]], ranks: int) -> list[Cut]:
    """Each bucket one piece, given to the ranks in turn.

    Args:
        sizes: for each bucket, the numbers of elements of its parameters.
        ranks: how many there are.
    """
    return [Cut(number, 0, len(bucket), number % ranks) for number, bucket in enumerate(sizes)]


def cut_buckets(sizes: Sequence[Sequence[int]], ranks: int) -> list[Cut]:
    """Pieces of less than an equal share (or of one parameter), each for the rank that has least so far."""
    share = sum(map(sum, sizes)) / ranks
    loads = [0] * ranks
    cuts: list[Cut] = []

    def give(bucket: int, start: int, stop: int) -> None:
        rank = loads.index(min(loads))
        loads[rank] += sum(sizes[bucket][start:stop])
        cuts.append(Cut(bucket, start, stop, rank))

    for bucket in sorted(range(len(sizes)), key=lambda number: sum(sizes[number])):
        start = 0
        for place in range(1, len(sizes[bucket])):
            if sum(sizes[bucket][start : place + 1]) >= share:
                give(bucket, start, place)
                start = place
        give(bucket, start, len(sizes[bucket]))
    return cuts
