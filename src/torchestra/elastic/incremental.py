"""Bring a large state to ranks that join while the others train, some of it in each step.

A rank that joins takes part in the reduction of gradients from then on, without any shards of its own. At the
beginning of each step the ranks that have the whole state begin to send some of it, and when they have
computed their shards, before the reduction, they wait until this has gone.

First come the parameters, with the optimizer's state of each. Between two updates these do not change, and
the rank that joins makes the step's update of all that it has (units.py says when it can). So none is sent
twice, and nobody keeps a copy. What else there is comes block by block (prefetch_buffer.py), as it is then;
so does all of a state that an update may change in another way: then a rank makes no updates before it has
all. In the end it fetches what has changed of those blocks, and gets shards as the others do.

Every rank knows how much each of these ranks has, so all find the same plan. How much is sent in a step
follows from how long those that sent the last had to wait. A rank that dies changes nothing of this: what has
arrived stays, what was on its way is sent again in the next group. If all die that have the whole state, it
is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from torchestra.collectives.functions import irecv, isend
from torchestra.communicator.work import Work
from torchestra.elastic.blocks import Receiving, TensorBlocks, blocks_of, bytes_of
from torchestra.elastic.fetching import gathered, new_tensor, wait_for
from torchestra.elastic.parts import (
    flatten_tensors,
    have_same_tensors,
    paths_of,
    tensor_specs_of,
    unflatten_tensors,
)
from torchestra.elastic.prefetch_buffer import PrefetchBuffer
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
_PREFETCHED_BYTES = 4 << 20
"""Of what is not in units less than this is fetched at the end, at once."""


class _Stretch(NamedTuple):
    """Hold what is sent to one rank in a step.

    Attributes:
        skeleton: of the units' values, or of all that is not in units.
        tensors: of these.
        numbers: of the blocks that are sent.
        pieces: how many units, or blocks, these are.
        last: whether nothing is left then.
    """

    skeleton: Any
    tensors: list[torch.Tensor]
    numbers: range
    pieces: int
    last: bool


class _Offer(NamedTuple):
    """Say what a rank sends to one that joins.

    Attributes:
        skeleton: the stretch's; from the first source only.
        numbers, pieces, last: the stretch's.
        checksums: of the blocks that this rank sends, by number.
    """

    skeleton: Any
    numbers: range
    pieces: int
    last: bool
    checksums: dict[int, int]


class _Progress(NamedTuple):
    """Say how a rank gets on.

    Attributes:
        filled: how many pieces it has; None if all.
        is_ready: whether nothing is left to be sent to it.
        failures: how often units came damaged, in a row.
        waited_s: how long it waited for what it sent.
    """

    filled: int | None
    is_ready: bool
    failures: int
    waited_s: float


class _ArrivingUnits:
    """Receive units, which are taken over when all are whole."""

    def __init__(self, units: list[Unit], skeleton: Any) -> None:
        self._units, self._skeleton = units, skeleton
        specs = tensor_specs_of(skeleton)
        self._tensors: list[torch.Tensor] = []
        for path, number in paths_of(skeleton).items():
            own = units[path[0]].parameter.detach() if path[1:] == ("parameter",) else None
            if own is None or not own.is_contiguous():
                own = new_tensor(specs[number].shape, specs[number].dtype, specs[number].device)
            self._tensors.append(own)
        self.blocks, self.tensor_blocks = blocks_of(specs), TensorBlocks(self._tensors)
        self._is_whole = True

    def arrived(self, number: int, checksum: int) -> None:
        self._is_whole = self._is_whole and self.tensor_blocks.checksum(self.blocks[number]) == checksum

    def take_over(self) -> bool:
        """Load the units, unless a block was damaged; return whether they are loaded."""
        if self._is_whole:
            for unit, value in zip(
                self._units, unflatten_tensors(self._skeleton, self._tensors), strict=True
            ):
                unit.load(value)
        return self._is_whole


class _Arriving(NamedTuple):
    """Hold what this rank receives: how much it is, what takes it, and the works of each block."""

    offer: _Offer
    into: _ArrivingUnits | PrefetchBuffer
    blocks: list[tuple[int, int, Receiving, list[Work | None]]]


class IncrementalTransfer:
    """Move a state to the ranks that lack some; all ranks call each method, at the same points of a step.

    Args:
        state: of this rank.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._budget = float(_FIRST_BYTES)
        self._waited_s, self._failures = 0.0, 0
        self._sending: list[Work | None] = []
        self._arriving: _Arriving | None = None
        self._prefetched: PrefetchBuffer | None = None
        self._is_ready = False

    def reset(self) -> None:
        """Begin anew, as the members have changed: what was on its way is not waited for."""
        self._budget, self._waited_s = float(_FIRST_BYTES), 0.0
        self._sending, self._arriving, self._is_ready = [], None, False
        if not self._state.filled:
            self._prefetched = None

    def begin(self, group: ProcessGroup) -> None:
        """Begin to send, and to receive, what comes next."""
        filling, me = self._state.filling, group.rank()
        if not filling:
            return
        self._waited_s = 0.0
        sources = [rank for rank in range(group.size()) if rank not in filling]
        offers: dict[int, _Offer] = {}
        outgoing: list[tuple[int, torch.Tensor]] = []
        if me in sources:
            began = time.perf_counter()
            for target, first in filling.items():
                offers[target], messages = self._offer(first, sources.index(me), len(sources))
                outgoing += [(target, each) for each in messages]
            self._waited_s = time.perf_counter() - began
        told: list[dict[int, _Offer]] = gathered(group, offers)
        self._sending = [isend(each, group=group, group_dst=target) for target, each in outgoing]
        if me in filling:
            self._receive(group, sources, [told[source][me] for source in sources])

    def _offer(self, first: int, index: int, sources: int) -> tuple[_Offer, list[torch.Tensor]]:
        """Return what this rank sends of the pieces from ``first`` on, and the messages."""
        stretch = self._stretch(first)
        tensor_blocks = TensorBlocks([each.contiguous() for each in stretch.tensors])
        blocks = blocks_of(tensor_specs_of(stretch.skeleton))
        mine = [number for number in stretch.numbers if number % sources == index]
        checksums = {number: tensor_blocks.checksum(blocks[number]) for number in mine}
        messages = [message for number in mine for message in tensor_blocks.to_send(blocks[number])]
        skeleton = None if index else stretch.skeleton
        return _Offer(skeleton, stretch.numbers, stretch.pieces, stretch.last, checksums), messages

    def _stretch(self, first: int) -> _Stretch:
        """Return what is sent to a rank that has some pieces: units, or blocks of the rest."""
        units = [] if self._state.units is None else self._state.units.all
        skeleton, tensors = flatten_tensors(self._state.others())
        blocks = blocks_of(tensor_specs_of(skeleton))
        if sum(map(bytes_of, blocks)) < _PREFETCHED_BYTES:
            blocks = []
        if first >= len(units):
            start = first - len(units)
            pieces = self._within_budget(map(bytes_of, blocks[start:]))
            numbers = range(start, start + pieces)
        else:
            pieces = self._within_budget(each.bytes for each in units[first:])
            skeleton, tensors = flatten_tensors([each.value() for each in units[first : first + pieces]])
            numbers = range(len(blocks_of(tensor_specs_of(skeleton))))
        return _Stretch(skeleton, tensors, numbers, pieces, first + pieces >= len(units) + len(blocks))

    def _within_budget(self, sizes: Iterable[int]) -> int:
        """Return how many of these are sent in a step: as many as reach the budget, or all."""
        count = sent = 0
        for size in sizes:
            if sent >= self._budget:
                break
            count, sent = count + 1, sent + size
        return count

    def _receive(self, group: ProcessGroup, sources: list[int], offers: list[_Offer]) -> None:
        first = offers[0]
        into = self._into(first)
        blocks = []
        for number in first.numbers:
            receiving, place = into.tensor_blocks.to_receive(into.blocks[number]), number % len(sources)
            works = [irecv(each, group=group, group_src=sources[place]) for each in receiving.messages]
            blocks.append((number, offers[place].checksums[number], receiving, works))
        self._arriving = _Arriving(first, into, blocks)

    def _into(self, offer: _Offer) -> _ArrivingUnits | PrefetchBuffer:
        """Return what takes the blocks that are offered."""
        filled, units = self._state.filled, self._state.units
        assert filled is not None
        if units is not None and filled < len(units.all):
            return _ArrivingUnits(units.all[filled : filled + offer.pieces], offer.skeleton)
        if self._prefetched is None or not have_same_tensors(self._prefetched.skeleton, offer.skeleton):
            self._prefetched = PrefetchBuffer(offer.skeleton, self._state.others())
        return self._prefetched

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until all has gone, or has come; what has come is taken over."""
        began, sending, arriving = time.perf_counter(), self._sending, self._arriving
        self._sending, self._arriving = [], None
        wait_for(sending)
        if sending:
            self._waited_s += time.perf_counter() - began
        if arriving is not None:
            self._take_over(arriving)

    def _take_over(self, arriving: _Arriving) -> None:
        for number, checksum, receiving, works in arriving.blocks:
            wait_for(works)
            receiving.finish()
            arriving.into.arrived(number, checksum)
        if not arriving.into.take_over():
            self._failures += 1
            return
        self._failures = 0
        assert self._state.filled is not None
        self._state.filled += arriving.offer.pieces
        self._is_ready = arriving.offer.last

    def settle(self, group: ProcessGroup) -> bool:
        """Have ranks that lack nothing take part as the others do; return whether this is one of them.

        Raises:
            DistError: a rank got damaged units again and again; raised on all.
        """
        filling = self._state.filling
        if not filling:
            return False
        mine = _Progress(self._state.filled, self._is_ready, self._failures, self._waited_s)
        told: list[_Progress] = gathered(group, mine)
        if bad := [rank for rank, each in enumerate(told) if each.failures >= _MAX_FAILURES]:
            raise DistError(
                f"elastic.State: parameters arrived with another checksum {_MAX_FAILURES} times, on"
                f" {named(bad)} of group {group.group_name!r}. Does something beside the optimizers change"
                " them, or is memory damaged?"
            )
        self._state.filling = {rank: told[rank].filled or 0 for rank in filling}
        ready = [rank for rank in filling if told[rank].is_ready]
        if ready:
            self._state.finish_filling(group, ready, self._prefetched)
            _log.info("step %d: %s of %d have the whole state", self._state.step, named(ready), group.size())
        if group.rank() in ready:
            self._prefetched, self._is_ready = None, False
        waited_s = max(each.waited_s for rank, each in enumerate(told) if rank not in filling)
        factor = 2.0 if waited_s < _AIM_S / 2 else min(1.0, _AIM_S / waited_s)
        self._budget = min(max(self._budget * factor, _LEAST_BYTES), _MOST_BYTES)
        return group.rank() in ready

    def complete(self, group: ProcessGroup) -> bool:
        """Bring all that is left as the training ends; return whether this rank lacked some."""
        was_lacking = False
        while self._state.filling:
            self._budget = float("inf")
            self.begin(group)
            self.finish()
            was_lacking = self.settle(group) or was_lacking
        return was_lacking

    def clear_gradients(self) -> None:
        """Have this rank's update leave alone the parameters that it has not."""
        if self._state.units is not None and self._state.filled is not None:
            for unit in self._state.units.all[self._state.filled :]:
                unit.parameter.grad = None
