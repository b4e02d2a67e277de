"""Tracks which gradients of a round are ready: one number per parameter.

========= =================================================================================
READY     its gradient is ready
EXPECTED  it is not ready in this round; n > 1: it arrives n more times (static graph)
UNUSED    it will not arrive
IDLE      there is no round, so the reducer ignores gradients that arrive
RECORDING expected, and its place in the order of arrival is recorded
COUNTING  the first round of a static graph: arrivals are counted, and reduction begins when
          backward has ended
========= =================================================================================
"""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from functools import partial

import torch

from torchestra.errors import GradientReductionError
from torchestra.nn.parallel import messages
from torchestra.nn.parallel.autograd_hooks import weak_method

READY, EXPECTED, UNUSED, IDLE, RECORDING, COUNTING = 0, 1, -1, -2, -3, -4


class ReadyTracker:
    """Tracks the gradients of one reducer's parameters.

    Args:
        bucket_ready: a method called when all gradients of a bucket are ready, as long as its object lives.

    Attributes:
        static: whether every round is like the first.
        record: whether rounds that begin from now on record the order of arrival.
        order: the order of arrival in the last round that recorded it.
        missing: for each bucket, the number of gradients that are not ready.
        unused: the parameters whose gradients will not arrive in this round.
        is_open: whether there is a round.
    """

    def __init__(self, names: Sequence[str], rank: int, bucket_ready: Callable[[], None]) -> None:
        self._names = names
        self._rank = rank
        self._bucket_ready = weak_method(bucket_ready)
        self._count = len(names)
        self._state = self._filled(IDLE)
        self._bucket_of = self._filled(0)
        self._templates = {
            state: self._filled(state) for state in (READY, EXPECTED, IDLE, RECORDING, COUNTING)
        }
        # 1 for each parameter that has had a gradient since the last round ended, reduced or not.
        self._used = self._filled(0)
        self._sizes: list[int] = []
        self.missing: list[int] = []
        self.unused: Sequence[int] = ()
        self.order: list[int] = []
        self.is_open = False
        self.record = True
        self.static = False
        self._arrivals = [0] * self._count
        self._static_template: array.array[int] | None = None
        self._static_unused: Sequence[int] = ()

    def _filled(self, value: int) -> array.array[int]:
        return array.array("i", [value]) * self._count

    def restart(self, rank: int) -> None:
        """Forget all rounds, since ranks may have seen different ones, and go on as this rank."""
        self._rank = rank
        self._static_template, self._static_unused = None, ()
        self.order, self.record = [], True
        self.end()

    def set_buckets(self, plan: Sequence[Sequence[int]]) -> None:
        """Assign the parameters to these buckets. Called between rounds."""
        for number, indices in enumerate(plan):
            for index in indices:
                self._bucket_of[index] = number
        self._sizes = [len(indices) for indices in plan]
        self.missing[:] = self._sizes

    def begin(self, unused: Sequence[int]) -> None:
        """Begin a round, in which the gradients of ``unused`` will not arrive."""
        self.is_open = True
        self.missing[:] = self._sizes
        template = self._templates[RECORDING if self.record else EXPECTED]
        if self._static_template is not None:
            template, unused = self._static_template, self._static_unused
        elif self.static:
            template = self._templates[COUNTING]
            self._arrivals = [0] * self._count
        self._state[:] = template
        if self.record:
            self.order = []
        self.unused = ()
        self.mark_unused(unused)

    def mark_unused(self, unused: Sequence[int]) -> None:
        """Expect no gradients of these parameters either."""
        if unused:
            self.unused = [*self.unused, *unused]
        for index in unused:
            if self._state[index] != READY:
                self.missing[self._bucket_of[index]] -= 1
            self._state[index] = UNUSED

    def mark_undefined(self, indices: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> None:
        """Mark those that are not ready after all: autograd also calls hooks for undefined gradients."""
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient is None and self._state[index] == READY:
                self._used[index] = 0
                self.mark_unused([index])

    def end(self) -> None:
        """End the round."""
        self.is_open = False
        self.unused = ()
        self._state[:] = self._templates[IDLE]
        self._used[:] = self._templates[READY]

    @property
    def has_begun(self) -> bool:
        """Return whether gradients have arrived in the round."""
        return self.is_open and sum(self.missing) + len(self.unused) != self._count

    def outstanding(self) -> list[int]:
        """Return the parameters whose gradients have not arrived."""
        return [index for index, state in enumerate(self._state) if state not in (READY, UNUSED, IDLE)]

    def unused_slots(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the slots of a bucket with these parameters whose gradients will not arrive."""
        if not self.unused:
            return ()
        return [slot for slot, index in enumerate(indices) if self._state[index] == UNUSED]

    def is_unused(self, indices: Sequence[int]) -> bool:
        """Return whether none of these gradients will arrive."""
        return len(self.unused_slots(indices)) == len(indices)

    def used(self) -> torch.Tensor:
        """Return for each parameter 1 if it has had a gradient since the last round, else 0."""
        return torch.frombuffer(self._used, dtype=torch.int32) if self._count else torch.empty(0)

    # -- gradients arrive

    def hook_for(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return the hook that autograd calls when a parameter's gradient is ready, in every step."""
        state, used, missing, bucket_of = self._state, self._used, self.missing, self._bucket_of
        bucket_ready, unexpected = self._bucket_ready, partial(self._arrived_unexpectedly, index)

        def gradient_ready(_: torch.Tensor) -> None:
            used[index] = 1
            if state[index] != EXPECTED:
                unexpected()
                return
            state[index] = READY
            bucket = bucket_of[index]
            missing[bucket] -= 1
            if not missing[bucket]:
                bucket_ready()

        return gradient_ready

    def _arrived_unexpectedly(self, index: int) -> None:
        """Record a gradient whose parameter is not EXPECTED."""
        state = self._state[index]
        if state == IDLE:
            return
        if state == COUNTING:
            self._arrivals[index] += 1
            self.order.append(index)
        elif state == RECORDING:
            self.order.append(index)
            self._state[index] = READY
            self.missing[self._bucket_of[index]] -= 1
            self._bucket_ready()
        elif state > EXPECTED:
            self._state[index] = state - 1
        else:
            name, rank = self._names[index], self._rank
            if self.static:
                raise GradientReductionError(messages.graph_changed(name, index, rank))
            if state == READY:
                raise GradientReductionError(messages.marked_twice(name, index, rank))
            raise GradientReductionError(messages.not_unused(name, index, rank))

    @property
    def is_counting(self) -> bool:
        """Return whether this is the first round of a static graph."""
        return self.static and self._static_template is None

    def finish_counting(self) -> None:
        """Expect in all further rounds what arrived in a static graph's first backward, which has ended."""
        arrivals = self._arrivals
        self._static_unused = [index for index, count in enumerate(arrivals) if not count]
        self._static_template = array.array("i", [max(EXPECTED, count) for count in arrivals])
        self._state[:] = self._templates[READY]
        self.missing[:] = [0] * len(self.missing)
        for index in self._static_unused:
            self._state[index] = UNUSED
        self.unused = self._static_unused
        last_arrival = {index: position for position, index in enumerate(self.order)}
        self.order = sorted(last_arrival, key=last_arrival.__getitem__)
