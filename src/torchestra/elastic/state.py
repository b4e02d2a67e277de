"""What a training has to hand on: model, optimizer and whatever else has a state, and the step it is at."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchestra.collectives.functions import barrier
from torchestra.elastic.checkpoints import Checkpoints, Writer
from torchestra.elastic.fetching import Item, Signature, fetch, gathered
from torchestra.elastic.membership import MembershipChange
from torchestra.elastic.parts import Part, flatten_tensors, part_of
from torchestra.elastic.prefetch_buffer import PrefetchBuffer
from torchestra.elastic.sharded_optimizer import Holders, Move, ShardedOptimizer, assign_holders
from torchestra.elastic.units import Units
from torchestra.errors import DistError, InvalidArgumentError, named, shown
from torchestra.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from torchestra.process_group import ProcessGroup
from torchestra.world.init import default_group

_log = logging.getLogger(__name__)
_AT_ONCE_BYTES = 4 << 20
"""A rank that joins a training gets more than this bit by bit."""


class StateSummary(NamedTuple):
    """Hold what a rank says of its state.

    Attributes:
        step: that it is at; None if it has no state.
        checkpoint: the newest one's step, if it may have to be read.
        held: by sharded optimizer, the parameters whose part it has.
        partial: it has parameters that others have updated, as they were before the step.
        filled: how many pieces it has, if it lacks some.
        units: the digest of its units, if it has any.
        bytes: of all its tensors.
        trains: it has been in the training before.
    """

    step: int | None
    checkpoint: int | None
    held: tuple[frozenset[int], ...]
    partial: bool
    filled: int | None
    units: str | None
    bytes: int
    trains: bool

    @property
    def whole(self) -> bool:
        """Return whether the rank has a state, and lacks no part of it that it can have alone."""
        return self.step is not None and self.filled is None


class Synced(NamedTuple):
    """Say what :meth:`State.sync` has done on this rank.

    Attributes:
        step: the step that all ranks are at.
        bytes: how many bytes this rank has received.
        sources: the ranks that had the newest state.
        behind: the ranks that fetched it.
        restored: the checkpoint that was read, if no rank had a state.
        seconds: how long it took.
    """

    step: int
    bytes: int
    sources: tuple[int, ...]
    behind: tuple[int, ...]
    restored: str | None
    seconds: float


class State:
    """Hold a training's state, which ranks that join or are a step behind fetch from the others.

    Args:
        parts: modules, optimizers, schedulers, tensors, torch.Generators, and anything with ``state_dict()``
            and ``load_state_dict()``; the same, in the same order, on every rank.
        checkpoints: where to write the state from time to time, and to read it when no rank has it.
        replicas: on how many other ranks each part of a ZeroRedundancyOptimizer's state is kept, on other
            hosts where there are several. So many ranks may die at once, or hosts if there are more than
            that; when they are replaced, or left out, as many may again.
        named_parts: the same, with names for messages and files.

    Modules and tensors are loaded in place, by reference. A part with a state_dict should return its own
    tensors from it, not copies, as optimizers do. A ZeroRedundancyOptimizer must be new, and its steps be
    made by :func:`shards`.

    Attributes:
        step: how many steps the state has made. Whoever trains without :func:`shards` counts it up after
            each update.
        parts: the objects, by name.
        loss: the mean loss of the last step of :func:`shards`; nan before.
        changes: of the members, while :func:`shards` ran, as this rank saw them; may be emptied.
        loop: the run of :func:`shards` that trains this state; its own.
        units: the parameters that a rank can update while it lacks others; None if it can not. Like what
            follows, it is the package's own.
        trains: whether this rank has been in the present run of :func:`shards` before.
        filled: how many pieces of the state this rank has got, units or blocks; None if it has all.
        filling: the ranks of the group that lack some, and how many each has.

    Raises:
        InvalidArgumentTypeError: a part has no state.
        InvalidArgumentError: there is none, a ZeroRedundancyOptimizer has made steps, or ``replicas`` is not
            a number from 0.
    """

    def __init__(
        self, *parts: Any, checkpoints: Checkpoints | None = None, replicas: int = 1, **named_parts: Any
    ) -> None:
        numbered = {f"{index}:{type(each).__name__}": each for index, each in enumerate(parts)}
        self.parts: dict[str, Any] = {**numbered, **named_parts}
        if not self.parts:
            raise InvalidArgumentError("elastic.State: give it a model, an optimizer, ...; got nothing")
        if not isinstance(replicas, int) or replicas < 0:
            raise InvalidArgumentError(
                f"elastic.State: `replicas` must be a number from 0, got {shown(replicas)}"
            )
        self.checkpoints, self.replicas = checkpoints, replicas
        self.step = 0
        self.loss = float("nan")
        self._sharded: list[ShardedOptimizer] = []
        self._parts: dict[str, Part] = {name: self._part(name, each) for name, each in self.parts.items()}
        self._valid = self._partial = False
        self.changes: list[MembershipChange] = []
        self.loop: object = None
        self.units: Units | None = None
        self.trains = False
        self.filled: int | None = None
        self.filling: dict[int, int] = {}

    def _part(self, name: str, thing: Any) -> Part:
        if not isinstance(thing, ZeroRedundancyOptimizer):
            return part_of(name, thing)
        self._sharded.append(ShardedOptimizer(name, thing))
        return self._sharded[-1]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the parts that are optimizers."""
        return [each for each in self.parts.values() if isinstance(each, torch.optim.Optimizer)]

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Return the parts that are modules."""
        return [each for each in self.parts.values() if isinstance(each, torch.nn.Module)]

    @property
    def newest_step(self) -> int | None:
        """Return the step that this rank's state is of; None if it has no state yet."""
        return self.step if self._valid else None

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the value of each part; tensors are those in use, not copies.

        Of a ZeroRedundancyOptimizer it has the options only.
        """
        return {"step": self.step, "parts": self._values()}

    def _values(self) -> dict[str, Any]:
        return {name: part.value() for name, part in self._parts.items()}

    def _load(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self._parts[name].load(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; :meth:`sync` then has others follow this rank.

        Raises:
            InvalidArgumentError: it is of other parts; nothing was changed.
        """
        if set(state_dict["parts"]) != set(self._parts):
            raise InvalidArgumentError(
                f"elastic.State: this state has {sorted(state_dict['parts'])}, expected {sorted(self._parts)}"
            )
        self._valid = False
        self._load(state_dict["parts"])
        self.step = int(state_dict["step"])
        self._valid, self.filled = True, None

    @torch.no_grad()
    def sync(self, group: ProcessGroup | None = None, summaries: list[StateSummary] | None = None) -> Synced:
        """Bring all ranks of a group to the newest state that one of them has. Must be called by all.

        To be called before the first step, and whenever the members have changed. Ranks that have no state,
        or are behind, fetch it from all that have the newest, each of which sends a share; checksums are
        compared. If no rank has a state, the newest checkpoint is read, and without one the lowest rank's
        present state is step 0 for all.

        A rank's state is kept if this is interrupted, unless it had none; then call it again in a new group.

        Args:
            group: default: the default group.
            summaries: what :meth:`summary` returns on each rank, where the package has told them already.

        Raises:
            GroupAbortedError: a rank died meanwhile. Shrink the group, and call this again in the new one.
            InvalidArgumentError, DistError: the ranks' models differ.
        """
        began = time.perf_counter()
        member = default_group() if group is None else group
        if self._sharded and self.loop is None:
            raise InvalidArgumentError(
                "elastic.State.sync: the state has a ZeroRedundancyOptimizer, whose steps elastic.shards()"
                " must make, so that a death within one loses nothing"
            )
        restored = None
        summaries = summaries or gathered(member, self.summary())
        if lost := self._lost(summaries):
            if all(summary.checkpoint is None for summary in summaries):
                raise DistError(lost)
            self._valid, self.filled = False, None
            summaries = gathered(member, self.summary())
        if all(summary.step is None for summary in summaries):
            restored = self._begin(member, summaries, lost)
            summaries = gathered(member, self.summary())
        newest = max(summary.step for summary in summaries if summary.step is not None and summary.whole)
        sources = tuple(
            rank for rank, summary in enumerate(summaries) if summary.step == newest and summary.whole
        )
        behind = tuple(rank for rank in range(len(summaries)) if rank not in sources)
        count = self._redistribute(member, summaries, sources, behind, newest)
        return Synced(newest, count, sources, behind, restored, time.perf_counter() - began)

    def summary(self) -> StateSummary:
        """Return what this rank says of its state: the package calls it."""
        held = tuple(each.held for each in self._sharded)
        newest = None
        if self.checkpoints is not None and (self._sharded or not self._valid or self.filled is not None):
            newest = self.checkpoints.newest_step()
        return StateSummary(
            self.newest_step,
            newest,
            held,
            self._valid and self._partial,
            self.filled,
            None if self.units is None else self.units.digest,
            sum(tensor.nbytes for tensor in flatten_tensors(self._values())[1]),
            self.trains,
        )

    def _begin(self, group: ProcessGroup, summaries: list[StateSummary], lost: str) -> str | None:
        """Read the newest checkpoint on one rank, or begin with what there is; return the checkpoint's name.

        Raises:
            DistError: there is none that is whole, and the state is ``lost``.
        """
        first = max(range(len(summaries)), key=lambda rank: (summaries[rank].checkpoint or 0, -rank))
        restored = self._restore(bool(lost)) if group.rank() == first else None
        told: list[str | None] = gathered(group, restored)
        restored = told[first]
        if lost and restored is None:
            raise DistError(f"{lost}; and no checkpoint is whole")
        return restored

    def _redistribute(
        self,
        group: ProcessGroup,
        summaries: list[StateSummary],
        sources: tuple[int, ...],
        behind: tuple[int, ...],
        newest: int,
    ) -> int:
        """Bring ranks that are behind to the newest step, and parts of sharded optimizers to new holders.

        Returns:
            How many bytes this rank has received.
        """
        had = [self._holders(index, summaries, sources) for index in range(len(self._sharded))]
        if any(summaries[rank].partial for rank in sources):
            self._valid = self._valid and self.step == newest  # what it has is written over
            for sharded, holders in zip(self._sharded, had, strict=True):
                sharded.send_from(holders, group)
            self._partial = False
        hosts = group.communicator.engine.hosts
        host_of = [0] * group.size() if hosts is None else hosts.host_of
        new = [
            assign_holders(sharded.sizes, holders, host_of, self.replicas + 1)
            for sharded, holders in zip(self._sharded, had, strict=True)
        ]
        moves = [
            (sharded, move)
            for sharded, before, after in zip(self._sharded, had, new, strict=True)
            for move in sharded.moves(before, after)
        ]
        items = [
            Item(sharded.states(move.parameters), move.sources, move.targets, whole=False)
            for sharded, move in moves
        ]
        self.filling = {}
        if behind:
            values = self._values()
            if self._moves_bit_by_bit(summaries, sources, behind):
                self.filling = {rank: summaries[rank].filled or 0 for rank in behind}
                fresh = tuple(rank for rank in behind if summaries[rank].filled is None)
                if fresh and self.units is not None:
                    items.append(Item(self.units.needed(values), sources, fresh, whole=False))
            else:
                whole = self._valid and self.filled is None
                items.append(Item(values, sources, behind, whole))
        count = self._take_over(group, items, moves, newest) if items else 0
        if group.rank() in self.filling and self.filled is None:
            self.step, self._valid, self.filled = newest, True, 0
            self._partial = False
        for sharded, holders in zip(self._sharded, new, strict=True):
            sharded.divide(holders, group)
        return count

    def _take_over(
        self,
        group: ProcessGroup,
        items: list[Item],
        moves: list[tuple[ShardedOptimizer, Move]],
        newest: int,
    ) -> int:
        fetched = fetch(group, items)
        for number, (sharded, _) in enumerate(moves):
            if number in fetched.values:
                sharded.adopt(fetched.values[number])
        if (whole := fetched.values.get(len(moves))) is not None:
            if self.filling:
                self._load(self._completed(whole))
            else:
                self.load_state_dict({"step": newest, "parts": whole})
                self._partial = False
        if moves:
            barrier(group=group)  # only when all have adopted theirs may any rank drop what it had
        return fetched.bytes

    def _moves_bit_by_bit(
        self, summaries: list[StateSummary], sources: tuple[int, ...], behind: tuple[int, ...]
    ) -> bool:
        """Return whether ranks that are behind get the state while the others train; all find the same."""
        first = summaries[sources[0]]
        if not first.trains or self._sharded or any(each.units != first.units for each in summaries):
            return False
        filling = [rank for rank in behind if summaries[rank].filled is not None]
        if any(summaries[rank].step != (first.step if rank in filling else None) for rank in behind):
            return False
        return bool(filling) or first.bytes > _AT_ONCE_BYTES

    def _holders(self, index: int, summaries: list[StateSummary], sources: tuple[int, ...]) -> Holders:
        """Return the ranks that have the newest part of each parameter of a sharded optimizer."""
        return [
            [rank for rank in sources if number in summaries[rank].held[index]]
            for number in range(len(self._sharded[index].sizes))
        ]

    def _lost(self, summaries: list[StateSummary]) -> str:
        """Return what of the newest state no rank has any more; "" if nothing, or if no rank has a state."""
        steps = [summary.step for summary in summaries if summary.step is not None and summary.whole]
        if not steps and (
            left := [rank for rank, summary in enumerate(summaries) if summary.filled is not None]
        ):
            return (
                f"elastic.State: the state is lost: all ranks that had it whole are gone, while {named(left)}"
                " still got parts of it. Give elastic.State checkpoints"
            )
        sources = tuple(
            rank for rank, summary in enumerate(summaries) if summary.whole and summary.step == max(steps)
        )
        had = [
            each for index in range(len(self._sharded)) for each in self._holders(index, summaries, sources)
        ]
        count = sum(not each for each in had)
        if not sources or count == 0:
            return ""
        return (
            f"elastic.State: the optimizer's state of {count} of {len(had)} parameters is lost: all ranks"
            f" that kept it are gone. Each part was kept on {self.replicas + 1} ranks: give elastic.State"
            " more `replicas`, or checkpoints"
        )

    def _restore(self, lost: bool) -> str | None:
        """Read the newest checkpoint that is whole, or begin with what there is; return the file's name."""
        found = None if self.checkpoints is None else self.checkpoints.load()
        if found is None and lost:
            return None
        for each in self._sharded:
            each.begin()
        if found is None:
            self._valid = True
            return None
        self.load_state_dict(found.state)
        return str(found.path)

    def others(self) -> dict[str, Any]:
        """Return the values of all parts, without the units: the package calls it."""
        return self._values() if self.units is None else self.units.others(self._values())

    def _completed(self, others: dict[str, Any]) -> dict[str, Any]:
        return others if self.units is None else self.units.completed(others, self._values())

    def finish_filling(
        self, group: ProcessGroup, ready: list[int], prefetched: PrefetchBuffer | None
    ) -> None:
        """Have ranks fetch what has changed, and what has not come yet: the package calls it, on all ranks.

        Args:
            group: of all ranks.
            ready: these ranks; they have all units, and then they lack nothing any more.
            prefetched: what this rank has got of what is not in units, if it is one of them.

        Raises:
            GroupAbortedError: a rank died meanwhile.
        """
        sources = [rank for rank in range(group.size()) if rank not in self.filling]
        own, signature = self.others(), Signature({}, {})
        if prefetched is not None and group.rank() in ready:
            own, signature = prefetched.value(), prefetched.signature()
        fetched = fetch(group, [Item(own, sources, ready, whole=False, signature=signature)])
        if 0 in fetched.values:
            self._load(self._completed(fetched.values[0]))
            self.filled = None
        self.filling = {rank: count for rank, count in self.filling.items() if rank not in ready}

    def advance(self, loss: float) -> None:
        """Count a step, after its update: the package calls it."""
        self.step += 1
        self.loss = loss
        self._partial = bool(self._sharded)

    @contextlib.contextmanager
    def local_updates(self) -> Iterator[None]:
        """Have sharded optimizers update what this rank holds, and send nothing: the package calls it."""
        for each in self._sharded:
            each.optimizer.exchange_in_step = False
        try:
            yield
        finally:
            for each in self._sharded:
                each.optimizer.exchange_in_step = True

    def exchange(self) -> None:
        """Receive the parameters that others have updated, after an update: all ranks of the package call it.

        Raises:
            GroupAbortedError: a rank died meanwhile; :meth:`sync` does it again.
        """
        for each in self._sharded:
            each.optimizer.exchange()
        self._partial = False

    def save_when_due(self, group: ProcessGroup | None = None) -> None:
        """Begin to write a checkpoint if this is a step for one; every rank calls it, after an update.

        It is left out, with a warning, while an earlier one is being written.

        Args:
            group: default: the default group.

        Raises:
            InvalidArgumentError: the ranks write to different directories; raised on all.
            OSError: the one before could not be written.
            GroupAbortedError: a rank died meanwhile; there is no checkpoint of this step then.
        """
        checkpoints = self.checkpoints
        if checkpoints is None or self.step % checkpoints.every:
            return
        member = default_group() if group is None else group
        directory = str(checkpoints.directory.absolute())
        told = gathered(member, (checkpoints.busy, secrets.token_hex(4), directory, checkpoints.failed))
        if len({each for _, _, each, _ in told}) > 1:
            raise InvalidArgumentError(
                "elastic.Checkpoints: all ranks must give the same directory, as they write a checkpoint"
                f" together; got {[each for _, _, each, _ in told]}"
            )
        if any(failed for *_, failed in told):
            checkpoints.abandon()
        if any(busy for busy, *_ in told):
            _log.warning("no checkpoint of step %d: the one before is still being written", self.step)
            return
        writers = [rank for rank in range(member.size()) if rank not in self.filling]
        if member.rank() in writers:
            own = {each.name: {"state": each.sent_states()} for each in self._sharded}
            writer = Writer(writers.index(member.rank()), len(writers), told[0][1])
            checkpoints.save(self.step, self._values(), own, writer)
