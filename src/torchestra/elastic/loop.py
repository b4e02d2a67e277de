"""A training loop whose ranks may die and join at any moment, and whose result does not show it.

What makes it so: (1) a step's batch is cut into a fixed number of shards, each computed from the same
parameters, buffers and random numbers wherever it is, and summed by a fixed tree (shard_sum.py). (2) Nothing
of the state changes before a barrier after the sum, and then it changes at once, by computation that needs no
other rank. So each rank is before or after an update, never within one; and if one is after it, all have the
sum. (3) After a change of members those that are before an update which another has made, make it too. If
none has made it, all still have what they computed in the step, and the shards of the lost are divided among
them. (4) Ranks that join fetch the state (state.py), a large one bit by bit while the others train
(incremental.py). Of an optimizer whose state is divided between ranks the
update is that of a rank's own part. The parameters are exchanged after it, and if that fails, once more after
the change of members: each part has been updated by all that hold it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from torchestra.collectives.functions import barrier
from torchestra.elastic.fetching import gathered
from torchestra.elastic.incremental import IncrementalTransfer
from torchestra.elastic.membership import Members
from torchestra.elastic.randomness import epoch_order, seed_all
from torchestra.elastic.shard import Shard
from torchestra.elastic.shard_sum import ShardSum
from torchestra.elastic.shard_tree import assign
from torchestra.elastic.state import State, StateSummary, Synced
from torchestra.elastic.units import Units
from torchestra.errors import DistError, GroupAbortedError, InvalidArgumentError, RankExcludedError, shown
from torchestra.process_group import ProcessGroup
from torchestra.system import phases


def shards(
    state: State,
    steps: int,
    shards: int = 8,
    *,
    seed: int = 0,
    update: Callable[[], object] | None = None,
    minimum: int = 1,
) -> Iterator[Shard]:
    """Train until the state has made some steps, on whatever ranks the default group has from step to step.

    To be called by every rank, also by one that joins. Yields this rank's shards of each step; the body
    computes a loss and calls :meth:`Shard.backward`, and must not call collectives, as ranks have different
    numbers of shards. When all shards of a step are done, the iterator averages gradients over all ranks,
    calls the update, counts ``state.step`` up, and lets in who waits to join. When a rank dies the others
    shrink the group, and go on with the step; its shards are computed by others. Parameters are bit-identical
    to those of one process that computes all shards, whatever the number of ranks, if processors and the
    number of threads are the same.

    If the body raises, or is left, the state is as before the step, and ``shards`` may be called again.

    Args:
        state: with the modules to train, not wrapped, and their optimizers.
        steps: where to end, counted from the beginning of the training.
        shards: of a step, a multiple of the usual number of ranks; another number is another training.
        seed: of random numbers.
        update: called instead of ``step()`` of each optimizer and learning-rate scheduler among the parts
            of the state, in their order. Gradients are those of all shards. Must give the same on all ranks.
        minimum: with fewer ranks, wait for others to join, for the group's time-out; also at the beginning.

    Raises:
        InvalidArgumentError: an argument is wrong, or a module reduces by itself.
        NotReadyError: no shard of a step called ``backward``; on every rank.
        RankExcludedError: the others go on without this rank.
        CollectiveTimeoutError: a rank lives but does not come; or, with ``minimum``, none has joined.
    """
    _check(state, steps, shards, minimum)
    loop = _Loop(state, steps, shards, seed, update or functools.partial(_update, state), minimum)
    state.loop, state.trains = loop, False
    state.units = Units.of(state.parts) if update is None else None
    try:
        yield from loop.run()
    finally:
        if state.loop is loop:
            loop.leave()
            state.loop, state.units = None, None


class _Loop:
    """Hold what one call of :func:`shards` knows."""

    def __init__(
        self,
        state: State,
        steps: int,
        shards: int,
        seed: int,
        update: Callable[[], object],
        minimum: int,
    ) -> None:
        self.state, self.steps, self.shards, self.seed = state, steps, shards, seed
        self.update, self.minimum = update, minimum
        buffers = [each for module in state.modules for each in module.buffers()]
        self.sum = ShardSum(_trained(state), buffers, shards)
        self._members = Members()
        self._transfer = IncrementalTransfer(state)
        self._order = functools.lru_cache(maxsize=2)(functools.partial(epoch_order, seed))
        self._todo: list[int] | None = None  # None: the members have changed, or are new
        self._changed = True  # since the last step

    @property
    def group(self) -> ProcessGroup:
        return self._members.group

    def run(self) -> Iterator[Shard]:
        """Yield the shards of this rank, step by step."""
        while True:
            try:
                if self._todo is None:
                    self._members.wait_for(self.minimum)
                    self._sync()
                if self.state.step >= self.steps:
                    if self._transfer.complete(self.group):
                        self.sum.begin_step()
                    barrier(group=self.group)  # so that nobody leaves while another might need its state
                    return
                self._transfer.begin(self.group)
                while self._todo:
                    shard = self._shard(self._todo[0])
                    yield shard
                    self.sum.add(shard.index, shard.samples, shard.loss)
                    del self._todo[0]
                self._finish_step()
                self._admit()
            except GroupAbortedError as error:
                self._recover(error)

    def leave(self) -> None:
        """End in the middle of a step, with the state as before it."""
        with contextlib.suppress(DistError):
            self._transfer.finish()
        self.sum.rewind()
        self._members.leave()

    def _shard(self, index: int) -> Shard:
        key = seed_all(self.seed, self.state.step, index)
        self.sum.clear_gradients()
        return Shard(self.state.step, index, self.shards, key, self._order)

    def _finish_step(self) -> None:
        self._transfer.finish()
        admission = self.group.admission
        self.sum.reduce(self.group, 0 if admission is None else admission.seen())
        barrier(group=self.group)  # when a rank has passed it, all have the sum
        self._make_update()
        self.state.exchange()
        if self._changed:
            self._changed = False
            phases.report("trains")
        else:
            self.sum.renew_buffers()
        self.state.save_when_due(self.group)
        if self._transfer.settle(self.group):
            self.sum.begin_step()
        self._todo = self._shares([frozenset()] * self.group.size())

    def _make_update(self) -> None:
        seed_all(self.seed, self.state.step, self.shards)
        self.sum.install()
        self._transfer.clear_gradients()
        # Without units an update might read, or change, what this rank has not got yet.
        if self.state.filled is None or self.state.units is not None:
            with self.state.local_updates():
                self.update()
        self.state.advance(self.sum.loss)
        self.sum.begin_step()

    def _shares(self, done: list[frozenset[int]]) -> list[int]:
        able = [rank for rank in range(self.group.size()) if rank not in self.state.filling]
        if self.group.rank() not in able:
            return []
        return assign([done[rank] for rank in able], self.shards)[able.index(self.group.rank())]

    # -- changes of members

    def _admit(self) -> None:
        if self.state.step < self.steps and self.sum.joiners:
            began = time.perf_counter()
            self._members.grow()
            self._resume(began, "")

    def _recover(self, error: GroupAbortedError) -> None:
        """Go on with who is left; those that die meanwhile are left out too."""
        self.sum.rewind()
        if self.state.checkpoints is not None:
            self.state.checkpoints.abandon()
        began, reason = time.perf_counter(), str(error).splitlines()[0]
        while True:
            if isinstance(error, RankExcludedError):
                raise error
            try:
                self._members.shrink()
                self._resume(began, reason)
                return
            except GroupAbortedError as another:
                error = another

    def _resume(self, began: float, reason: str) -> None:
        self._todo, self._changed = None, True
        self._members.wait_for(self.minimum)
        agreed = time.perf_counter()
        synced = self._sync()
        self.state.changes.append(
            self._members.take_change(
                self.state.step, agreed - began, time.perf_counter() - agreed, synced.bytes, reason
            )
        )

    def _sync(self) -> Synced:
        """Bring all ranks of the group to one state, and divide the shards that are not done."""
        step, told = self.state.step, self._tell()
        if any(_lacks_update(each, other) for each in told for other in told):
            if any(_lacks_update(told[self.group.rank()], other) for other in told):
                self._make_update()
            step, told = self.state.step, self._tell()
        synced = self.state.sync(self.group, [each.summary for each in told])
        self.state.trains = True
        self._transfer.reset()
        self.sum.use(self.group)
        if self.state.step != step or self.group.rank() in synced.behind or not self.sum.done:
            self.sum.begin_step()
        done = [frozenset() if rank in synced.behind else each.done for rank, each in enumerate(told)]
        self._todo = self._shares([frozenset()] * len(done) if synced.restored else done)
        return synced

    def _tell(self) -> list[_Told]:
        """Tell the others how far this rank is, and return what each tells."""
        summed = self.state.step if self.sum.reduced else None
        return gathered(self.group, _Told(self.state.summary(), summed, self.sum.done))


class _Told(NamedTuple):
    """Hold what a rank says of itself after a change of members.

    Attributes:
        summary: of its state.
        summed: the step of its state, if it has the sum for that step's update.
        done: the shards of its step that it has computed.
    """

    summary: StateSummary
    summed: int | None
    done: frozenset[int]


def _lacks_update(one: _Told, other: _Told) -> bool:
    """Return whether one rank has the sum for an update that the other one has made."""
    return one.summed is not None and other.summary.step == one.summed + 1


def _trained(state: State) -> list[torch.Tensor]:
    """Return the parameters of modules and optimizers that are trained, each once."""
    of_modules = [each for module in state.modules for each in module.parameters()]
    of_optimizers = [
        each for one in state.optimizers for group in one.param_groups for each in group["params"]
    ]
    unique = {id(each): each for each in (*of_modules, *of_optimizers) if each.requires_grad}
    return list(unique.values())


def _update(state: State) -> None:
    for part in state.parts.values():
        if isinstance(part, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
            part.step()


_REDUCE_THEMSELVES = (torch.nn.parallel.DistributedDataParallel, torch.nn.SyncBatchNorm)


def _check(state: State, steps: int, shards: int, minimum: int) -> None:
    if not isinstance(state, State):
        raise InvalidArgumentError(f"elastic.shards: `state` must be an elastic.State, got {shown(state)}")
    for name, value, least in (("steps", steps, 0), ("shards", shards, 1), ("minimum", minimum, 1)):
        if not isinstance(value, int) or value < least:
            raise InvalidArgumentError(
                f"elastic.shards: `{name}` must be a number from {least}, got {shown(value)}"
            )
    for module in (inner for each in state.modules for inner in each.modules()):
        if isinstance(module, _REDUCE_THEMSELVES):
            raise InvalidArgumentError(
                f"elastic.shards: the state has a {type(module).__name__}, which calls collectives in forward"
                " or backward, and ranks have different numbers of shards. Give the module as it is:"
                " gradients are averaged over the shards of all ranks, and BatchNorm's running statistics too"
            )
    if not state.modules and not state.optimizers:
        raise InvalidArgumentError("elastic.shards: the state has neither a module nor an optimizer")
