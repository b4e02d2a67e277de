"""The sum of a step's gradients over all shards, with the same bits for any number of ranks.

Each rank adds up the gradients of its shards as the tree of shards says (shard_tree.py), and keeps a flat
buffer for each subtree that it has whole. At the end of the step the ranks exchange equal shares of these:
rank p receives share p of every subtree, adds them up to the root, divides by the number of samples, and all
gather the result. What a rank sends is the same whatever has happened to others, so after a death only
the shards of the dead are computed again.

Buffers of modules take part, as statistics of BatchNorm must not depend on who computes what: every shard
begins with the buffers as they were before the step, and what it adds to a floating-point buffer is averaged
over the shards, by samples, with the gradients. Of other buffers the largest value counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchestra.collectives.functions import (
    all_gather_into_tensor,
    all_to_all_single,
    reduce_scatter_tensor,
)
from torchestra.elastic.flat_buffers import BufferPool, FlatBuffer, FlatLayout
from torchestra.elastic.shard_tree import Node, ShardTree
from torchestra.errors import NotReadyError
from torchestra.process_group import ProcessGroup

_NOT_HERE = -1.0  # as a shard's weight: this rank has not computed it


class ShardSum:
    """Sum the gradients of one step after the other.

    Args:
        parameters: those that are trained, the same on every rank.
        buffers: of the modules.
        shards: of a step.

    Attributes:
        tree: of the shards.
        loss: after :meth:`reduce`, the mean loss of the step's samples.
        joiners: after it, what rank 0 has said there.
        reduced: whether the step's sum over all shards is complete, and :meth:`install` may be called.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], shards: int
    ) -> None:
        self.tree = ShardTree(shards)
        self.loss = 0.0
        self.joiners = 0
        self.reduced = False
        self._parameters = parameters
        self._floating = [each for each in buffers if each.is_floating_point() or each.is_complex()]
        self._others = [each for each in buffers if not (each.is_floating_point() or each.is_complex())]
        self._buffers = [*self._floating, *self._others]
        self._before = [each.clone() for each in self._buffers]
        self._layouts = FlatLayout.all_of([*parameters, *self._floating])
        self._pools: list[BufferPool] = []
        self._sums: dict[Node, list[FlatBuffer]] = {}
        self._own = _OwnResults(shards, len(parameters), self._others)
        self._result: list[FlatBuffer] = []
        self._group: ProcessGroup | None = None

    @property
    def done(self) -> frozenset[int]:
        """Return the shards of the step that this rank has computed."""
        return frozenset(shard for node in self._sums for shard in range(*node))

    def use(self, group: ProcessGroup) -> None:
        """Exchange with the ranks of this group from now on; what has been computed stays."""
        if group is self._group:
            return
        self._group = group
        if not self._pools:
            self._pools = [BufferPool(layout, group) for layout in self._layouts]
        for pool in self._pools:
            pool.use(group)
        if self._result:
            self._give_back(self._result)
        self._result, self.reduced = [], False
        for buffers in self._sums.values():
            buffers[:] = [pool.adopt(buffer) for pool, buffer in zip(self._pools, buffers, strict=True)]

    def renew_buffers(self) -> None:
        """Get on with replacing buffers of a former group; to be called between two steps, now and then."""
        for pool in self._pools:
            pool.renew()

    def begin_step(self) -> None:
        """Forget all that was computed: the state is that before a step."""
        for buffers in filter(None, (*self._sums.values(), self._result)):
            self._give_back(buffers)
        self._sums.clear()
        self._result, self.reduced = [], False
        self._own.clear()
        self.clear_gradients()
        for before, buffer in zip(self._before, self._buffers, strict=True):
            before.copy_(buffer)

    def rewind(self) -> None:
        """Bring the modules to where they were before the step; what shards have computed stays."""
        self.clear_gradients()
        for before, buffer in zip(self._before, self._buffers, strict=True):
            buffer.copy_(before)

    def clear_gradients(self) -> None:
        """Let no parameter have a gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def add(self, shard: int, weight: float, loss: float) -> None:
        """Take the gradients of a shard, and the changes of buffers.

        Args:
            shard: its number.
            weight: its samples, by which the gradients have been multiplied.
            loss: the sum over its samples.
        """
        values = [*(each.grad for each in self._parameters), *self._changes(weight)]
        self._own.enter(shard, weight, loss, [each.grad is not None for each in self._parameters])
        for index, other in enumerate(self._others):
            self._own.raise_counter(index, other)
        buffers = [pool.take() for pool in self._pools]
        for layout, buffer in zip(self._layouts, buffers, strict=True):
            _write(buffer, [values[slot.tensor] for slot in layout.slots])
        self.tree.insert(self._sums, (shard, shard + 1), buffers, self._added)
        self.rewind()

    def _changes(self, weight: float) -> list[torch.Tensor]:
        """Return what the shard has added to buffers, times its weight; where they are equal, 0 (inf too)."""
        return [
            torch.where(buffer == before, torch.zeros_like(buffer), (buffer - before) * weight)
            for before, buffer in zip(self._before, self._floating, strict=False)  # the others come after
        ]

    def _added(self, into: list[FlatBuffer], other: list[FlatBuffer]) -> list[FlatBuffer]:
        for left, right in zip(into, other, strict=True):
            left.flat.add_(right.flat)
        self._give_back(other)
        return into

    def _give_back(self, buffers: list[FlatBuffer]) -> None:
        for pool, buffer in zip(self._pools, buffers, strict=True):
            pool.give_back(buffer)

    @torch.no_grad()
    def reduce(self, group: ProcessGroup, joiners: int = 0) -> None:
        """Sum over all shards, and average; every rank calls this when it has added its own.

        Nothing of the modules changes before :meth:`install`: if this raises, ranks can go on in a new group
        (:meth:`use`).

        Args:
            group: of all ranks.
            joiners: how many ranks wait to be let in; what rank 0 says is told to all.

        Raises:
            NotReadyError: no shard of the step had any samples; raised on every rank.
        """
        results = self._own.exchange(group, joiners)
        covers = [self.tree.cover(each) for each in results.done]
        if results.samples <= 0:
            raise NotReadyError(
                "elastic.shards: no shard of this step called shard.backward(), on any rank; each that has"
                " samples must"
            )
        mine = [self._sums[node] for node in covers[group.rank()]]
        self._result = [
            self._total([buffers[index] for buffers in mine], covers, results.samples, pool, group)
            for index, pool in enumerate(self._pools)
        ]
        self._results = results
        self.loss, self.joiners = results.loss, results.joiners
        self.reduced = True

    def _total(
        self,
        mine: list[FlatBuffer],
        covers: list[list[Node]],
        samples: float,
        pool: BufferPool,
        group: ProcessGroup,
    ) -> FlatBuffer:
        result = pool.take()
        if group.size() == 1:
            torch.div(mine[0].flat, samples, out=result.flat)
            return result
        received = [pool.take() for _ in range(max(map(len, covers)))]
        try:
            share = self._share([each.flat for each in mine], covers, received, pool.layout, group)
            all_gather_into_tensor(result.flat, share.div_(samples), group=group)
        except BaseException:
            pool.give_back(result)
            raise
        finally:
            for buffer in received:
                pool.give_back(buffer)
        return result

    def _share(
        self,
        mine: list[torch.Tensor],
        covers: list[list[Node]],
        received: list[FlatBuffer],
        layout: FlatLayout,
        group: ProcessGroup,
    ) -> torch.Tensor:
        """Return this rank's share of the sum over all shards, in memory of ``received``."""
        size = group.size()
        length = layout.padded(size) // size
        if size == 2 and len(covers[0]) == len(covers[1]) == 1 and layout.dtype in _ADDED_AS_TORCH_DOES:
            share = received[0].flat[:length]
            reduce_scatter_tensor(share, mine[0], group=group)  # two values have one sum
            return share
        values: dict[Node, torch.Tensor] = {}
        for turn, buffer in enumerate(received):
            senders = [rank for rank in range(size) if turn < len(covers[rank])]
            parts = buffer.flat[: length * len(senders)]
            all_to_all_single(
                parts,
                mine[turn] if turn < len(mine) else parts[:0],
                [length * (rank in senders) for rank in range(size)],
                [length * (turn < len(mine))] * size,
                group=group,
            )
            for sender, part in zip(senders, parts.split(length), strict=True):
                self.tree.insert(values, covers[sender][turn], part, torch.Tensor.add_)
        return values[self.tree.root]

    @torch.no_grad()
    def install(self) -> None:
        """Give the parameters their averaged gradients and the buffers their new values."""
        count = len(self._parameters)
        for layout, buffer in zip(self._layouts, self._result, strict=True):
            for slot, view in zip(layout.slots, buffer.views, strict=True):
                if slot.tensor >= count:
                    self._floating[slot.tensor - count].add_(view)
                elif self._results.present[slot.tensor]:
                    self._parameters[slot.tensor].grad = view
        for other, value in zip(self._others, self._results.counters, strict=True):
            other.copy_(value)


_ADDED_AS_TORCH_DOES = (torch.float32, torch.float64)


def _write(buffer: FlatBuffer, values: list[torch.Tensor | None]) -> None:
    dense = [(view, value) for view, value in zip(buffer.views, values, strict=True) if value is not None]
    if dense:
        torch._foreach_copy_(
            [view for view, _ in dense],
            [value.to_dense() if value.layout is not torch.strided else value for _, value in dense],
        )
    for view, value in zip(buffer.views, values, strict=True):
        if value is None:
            view.zero_()


class _StepResults:
    """Hold what all ranks have said about a step.

    Attributes:
        done: by rank, the shards that it has computed.
        samples, loss: of all shards; the mean loss.
        present: by parameter, whether any shard gave it a gradient.
        counters: the largest values of the buffers that are not floating-point.
        joiners: how many ranks wait to be let in, as rank 0 has seen.
    """

    def __init__(self, rows: torch.Tensor, shards: int, parameters: int, others: list[torch.Tensor]) -> None:
        numbers = rows[:, : 2 * shards].contiguous().view(torch.float64)
        weights, losses = numbers[:, :shards], numbers[:, shards:]
        here = weights >= 0
        self.done = [frozenset(row.nonzero().flatten().tolist()) for row in here]
        # Each shard is one rank's; the others add exact zeros.
        self.samples = sum(torch.where(here, weights, 0.0).sum(0).tolist())
        self.loss = sum(losses.sum(0).tolist()) / self.samples if self.samples > 0 else 0.0
        self.present = rows[:, 2 * shards : 2 * shards + parameters].any(0).tolist()
        self.joiners = int(rows[0, -1])
        largest = rows[:, 2 * shards + parameters : -1].amax(0).split([each.numel() for each in others])
        self.counters = [value.view(each.shape) for value, each in zip(largest, others, strict=True)]


class _OwnResults:
    """Hold what this rank tells the others about its shards: words, of which the first are doubles."""

    def __init__(self, shards: int, parameters: int, others: list[torch.Tensor]) -> None:
        self._shards, self._parameters, self._others = shards, parameters, others
        counted = sum(each.numel() for each in others)
        self._words = torch.zeros(2 * shards + parameters + counted + 1).long()
        self._numbers = self._words[: 2 * shards].view(torch.float64)
        self._present, counters, self._joiners = self._words[2 * shards :].split([parameters, counted, 1])
        self._counters = counters.split([each.numel() for each in others])
        self.clear()

    def clear(self) -> None:
        self._words.zero_()
        self._numbers[: self._shards] = _NOT_HERE
        for counter in self._counters:
            counter.fill_(torch.iinfo(torch.int64).min)

    def enter(self, shard: int, weight: float, loss: float, present: list[bool]) -> None:
        self._numbers[shard] = weight
        self._numbers[self._shards + shard] = loss
        self._present |= torch.tensor(present, dtype=torch.int64)

    def raise_counter(self, index: int, value: torch.Tensor) -> None:
        counter = self._counters[index]
        torch.maximum(counter, value.flatten().to("cpu", torch.int64), out=counter)

    def exchange(self, group: ProcessGroup, joiners: int) -> _StepResults:
        self._joiners.fill_(joiners)
        rows = torch.empty(group.size(), len(self._words), dtype=torch.int64)
        all_gather_into_tensor(rows, self._words, group=group)
        return _StepResults(rows, self._shards, self._parameters, self._others)
