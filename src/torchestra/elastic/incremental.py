"""Bring a large state to ranks that join while the others train, some parameters in each step.

A rank that joins gets what is small at once (:meth:`State.sync`), and takes part from then on in the
reduction of gradients, without any shards of its own. Between two updates the parameters do not change. So at
the beginning of each step the ranks that have the whole state begin to send some parameters, with the
optimizer's state of each, and when they have computed their shards, before the reduction, they wait until
these have gone. The rank that joins makes the step's update of all that it has (units.py says why it can).
So nothing is sent twice, and nobody keeps a copy. When it has all, it fetches once more what is not a
parameter, and gets shards as the others do.

Every rank knows how many parameters each of these ranks has, so all find the same plan. How many are sent in
a step follows from how long those that sent the last ones had to wait. A rank that dies changes nothing of
this: what has arrived stays, what was on its way is sent again in the next group. If all die that have the
whole state, it is lost.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

import torch

from torchestra.collectives.functions import irecv, isend
from torchestra.communicator.work import Work
from torchestra.elastic.blocks import Receiving, TensorBlocks, blocks_of
from torchestra.elastic.fetching import gathered
from torchestra.elastic.parts import flatten_tensors, paths_of, tensor_specs_of, unflatten_tensors
from torchestra.elastic.state import State
from torchestra.elastic.units import Unit
from torchestra.errors import DistError, named
from torchestra.process_group import ProcessGroup

_log = logging.getLogger(__name__)
_FIRST_BYTES = 16 << 20
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 30
_AIM_S = 0.02
"""How long those that send may wait in a step."""
_MAX_FAILURES = 4


class _Offer(NamedTuple):
    """Say what a rank sends to one that joins.

    Attributes:
        skeleton: of the units' values; from the first source only.
        checksums: of the blocks that this rank sends, by number.
    """

    skeleton: Any
    checksums: dict[int, int]


class _Progress(NamedTuple):
    """Say how a rank gets on: what it has, how often that came damaged in a row, how long it waited."""

    filled: int | None
    failures: int
    waited_s: float


class _Arriving(NamedTuple):
    """Hold what this rank receives: the units, where to, and each block's works and checksum."""

    units: list[Unit]
    skeleton: Any
    tensors: list[torch.Tensor]
    blocks: dict[int, tuple[Receiving, list[Work | None], int]]


class IncrementalTransfer:
    """Move units to the ranks that lack some; all ranks call each method, at the same points of a step.

    Args:
        state: of this rank.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._budget = float(_FIRST_BYTES)
        self._waited_s, self._failures = 0.0, 0
        self._sending: list[Work | None] = []
        self._arriving: _Arriving | None = None

    def reset(self) -> None:
        """Begin anew, as the members have changed: what was on its way is not waited for."""
        self._budget, self._waited_s = float(_FIRST_BYTES), 0.0
        self._sending, self._arriving = [], None

    def begin(self, group: ProcessGroup) -> None:
        """Begin to send, and to receive, the next units."""
        filling, me = self._state.filling, group.rank()
        if not filling:
            return
        self._waited_s = 0.0
        sources = [rank for rank in range(group.size()) if rank not in filling]
        offers: dict[int, _Offer] = {}
        outgoing: list[tuple[int, TensorBlocks, dict[int, Any]]] = []
        if me in sources:
            began = time.perf_counter()
            for target, first in filling.items():
                offers[target], blocks, mine = self._offer(first, sources.index(me), len(sources))
                outgoing.append((target, blocks, mine))
            self._waited_s = time.perf_counter() - began
        told: list[dict[int, _Offer]] = gathered(group, offers)
        for target, blocks, mine in outgoing:
            for block in mine.values():
                for message in blocks.to_send(block):
                    self._sending.append(isend(message, group=group, group_dst=target))
        if me in filling:
            self._receive(group, sources, [told[source][me] for source in sources])

    def _offer(self, first: int, index: int, sources: int) -> tuple[_Offer, TensorBlocks, dict[int, Any]]:
        """Return what this rank sends of the units from ``first`` on, and the blocks."""
        units = self._next_units(first)
        skeleton, tensors = flatten_tensors([each.value() for each in units])
        tensor_blocks = TensorBlocks([each.contiguous() for each in tensors])
        all_blocks = blocks_of(tensor_specs_of(skeleton))
        mine = {number: all_blocks[number] for number in range(index, len(all_blocks), sources)}
        checksums = {number: tensor_blocks.transfer_checksum(block) for number, block in mine.items()}
        return _Offer(None if index else skeleton, checksums), tensor_blocks, mine

    def _next_units(self, first: int) -> list[Unit]:
        units, count = [], 0
        assert self._state.units is not None
        for unit in self._state.units.all[first:]:
            units.append(unit)
            count += unit.bytes
            if count >= self._budget:
                break
        return units

    def _receive(self, group: ProcessGroup, sources: list[int], offers: list[_Offer]) -> None:
        assert self._state.units is not None
        assert self._state.filled is not None
        skeleton = offers[0].skeleton
        units = self._state.units.all[self._state.filled :][: len(skeleton)]
        specs, tensors = tensor_specs_of(skeleton), []
        for path, number in paths_of(skeleton).items():
            own = units[path[0]].parameter.detach() if path[1:] == ("parameter",) else None
            if own is None or not own.is_contiguous():
                spec = specs[number]
                own = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
            tensors.append(own)
        tensor_blocks, receiving = TensorBlocks(tensors), {}
        for number, block in enumerate(blocks_of(specs)):
            into, place = tensor_blocks.to_receive(block), number % len(sources)
            works = [irecv(each, group=group, group_src=sources[place]) for each in into.messages]
            receiving[number] = into, works, offers[place].checksums[number]
        self._arriving = _Arriving(units, skeleton, tensors, receiving)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until all has gone, or has come; what has come whole is taken over."""
        began, sending, arriving = time.perf_counter(), self._sending, self._arriving
        self._sending, self._arriving = [], None
        for work in sending:
            if work is not None:
                work.wait()
        if sending:
            self._waited_s += time.perf_counter() - began
        if arriving is not None:
            self._take_over(arriving)

    def _take_over(self, arriving: _Arriving) -> None:
        blocks, whole = TensorBlocks(arriving.tensors), True
        for (into, works, checksum), block in zip(
            arriving.blocks.values(), blocks_of(tensor_specs_of(arriving.skeleton)), strict=True
        ):
            for work in works:
                if work is not None:
                    work.wait()
            into.finish()
            whole = whole and blocks.transfer_checksum(block) == checksum
        if not whole:
            self._failures += 1
            return
        self._failures = 0
        values = unflatten_tensors(arriving.skeleton, arriving.tensors)
        for unit, value in zip(arriving.units, values, strict=True):
            unit.load(value)
        assert self._state.filled is not None
        self._state.filled += len(arriving.units)

    def settle(self, group: ProcessGroup) -> bool:
        """Have ranks that lack nothing take part as the others do; return whether this is one of them.

        Raises:
            DistError: a rank got damaged units again and again; raised on all.
        """
        filling = self._state.filling
        if not filling:
            return False
        told = gathered(group, _Progress(self._state.filled, self._failures, self._waited_s))
        if bad := [rank for rank, each in enumerate(told) if each.failures >= _MAX_FAILURES]:
            raise DistError(
                f"elastic.State: parameters arrived with another checksum {_MAX_FAILURES} times, on"
                f" {named(bad)} of group {group.group_name!r}. Does something beside the optimizers change"
                " them, or is memory damaged?"
            )
        self._state.filling = {rank: told[rank].filled or 0 for rank in filling}
        ready = self._state.finish_filling(group)
        waited_s = max(each.waited_s for rank, each in enumerate(told) if rank not in filling)
        factor = 2.0 if waited_s < _AIM_S / 2 else min(1.0, _AIM_S / waited_s)
        self._budget = min(max(self._budget * factor, _LEAST_BYTES), _MOST_BYTES)
        if ready and group.rank() == 0:
            _log.info("step %d: %s of %d have the whole state", self._state.step, named(ready), group.size())
        return group.rank() in ready

    def complete(self, group: ProcessGroup) -> None:
        """Bring all that is left to the ranks that lack it, as the training ends."""
        while self._state.filling:
            self._budget = float("inf")
            self.begin(group)
            self.finish()
            self.settle(group)

    def clear_gradients(self) -> None:
        """Have this rank's update leave alone the parameters that it has not."""
        if self._state.units is not None and self._state.filled is not None:
            for unit in self._state.units.all[self._state.filled :]:
                unit.parameter.grad = None
