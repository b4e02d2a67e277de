"""Which gradients have come in a round, and which are still to come: a number for each parameter.

========= =================================================================================
READY     its gradient has come
EXPECTED  it has not come in this round; greater numbers: it comes so often (static graph)
UNUSED    it will not come
IDLE      there is no round, so a gradient that comes is none of the reducer's business
RECORDING expected, and it is to be noted in which order they come
COUNTING  the first round of a static graph: how often each comes is counted, and reduction
          begins when backward has ended
========= =================================================================================
"""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from functools import partial

import torch

from torchestra.errors import GradientReductionError
from torchestra.nn.parallel import messages

READY, EXPECTED, UNUSED, IDLE, RECORDING, COUNTING = 0, 1, -1, -2, -3, -4


def _filled(count: int, value: int) -> array.array[int]:
    return array.array("i", [value]) * count


class Expectations:
    """The gradients of one reducer's parameters.

    Args:
        names: of the parameters.
        rank: for messages.
        changed: called when a bucket has become complete.

    Attributes:
        static: every round is like the first.
        record: note the order of arrival in the rounds that begin from now on.
        order: of arrival, in the last round for which it was noted.
        missing: for each bucket, how many gradients are still to come.
        unused: the parameters whose gradients will not come in this round.
        is_open: whether there is a round.
    """

    def __init__(self, names: Sequence[str], rank: int, changed: Callable[[], None]) -> None:
        self._names = names
        self._rank = rank
        self._changed = changed
        self._count = count = len(names)
        self._state = _filled(count, IDLE)
        self._bucket_of = _filled(count, 0)
        self._templates = {
            state: _filled(count, state) for state in (READY, EXPECTED, IDLE, RECORDING, COUNTING)
        }
        # 1 for each parameter that has had a gradient since the last round ended, reduced or not.
        self._used = _filled(count, 0)
        self._sizes: list[int] = []
        self.missing: list[int] = []
        self.unused: Sequence[int] = ()
        self.order: list[int] = []
        self.is_open = False
        self.record = True
        self.static = False
        self._times: list[int] = [0] * count
        self._static_template: array.array[int] | None = None
        self._static_unused: Sequence[int] = ()

    def forget_rounds(self, rank: int) -> None:
        """Begin anew, as this rank, after the rounds so far: what they have shown may differ by rank."""
        self._rank = rank
        self._static_template, self._static_unused = None, ()
        self.order, self.record = [], True
        self.end()

    def lay_out(self, plan: Sequence[Sequence[int]]) -> None:
        """Take it that the parameters are in these buckets. Between rounds."""
        for number, indices in enumerate(plan):
            for index in indices:
                self._bucket_of[index] = number
        self._sizes = [len(indices) for indices in plan]
        self.missing[:] = self._sizes

    def begin(self, unused: Sequence[int]) -> None:
        """Begin a round, in which the gradients of these will not come."""
        self.is_open = True
        self.missing[:] = self._sizes
        state = RECORDING if self.record else EXPECTED
        template = self._templates[state]
        if self.static and self._static_template is None:
            template = self._templates[COUNTING]
            self._times = [0] * self._count
        elif self.static and self._static_template is not None:
            template, unused = self._static_template, self._static_unused
        self._state[:] = template
        if self.record:
            self.order = []
        self.unused = ()
        self.expect_no_more(unused)

    def expect_no_more(self, unused: Sequence[int]) -> None:
        """The gradients of these will not come either."""
        if unused:
            self.unused = [*self.unused, *unused]
        for index in unused:
            if self._state[index] != READY:
                self.missing[self._bucket_of[index]] -= 1
            self._state[index] = UNUSED

    def end(self) -> None:
        """The round is over."""
        self.is_open = False
        self.unused = ()
        self._state[:] = self._templates[IDLE]
        self._used[:] = self._templates[READY]

    @property
    def has_begun(self) -> bool:
        """Whether gradients have come in the round."""
        return self.is_open and sum(self.missing) + len(self.unused) != self._count

    def outstanding(self) -> list[int]:
        """The parameters whose gradients have not come."""
        return [index for index, state in enumerate(self._state) if state not in (READY, UNUSED, IDLE)]

    def unused_in(self, indices: Sequence[int]) -> Sequence[int]:
        """Which places of a bucket are of parameters whose gradients will not come."""
        if not self.unused:
            return ()
        return [place for place, index in enumerate(indices) if self._state[index] == UNUSED]

    def is_undefined(self, index: int) -> None:
        """What came was no gradient: autograd also calls hooks for gradients that are undefined."""
        self._used[index] = 0
        self.expect_no_more([index])

    def is_ready(self, index: int) -> bool:
        """Whether the gradient has come."""
        return self._state[index] == READY

    def used(self) -> torch.Tensor:
        """For each parameter, 1 if it has had a gradient since the last round, else 0."""
        return torch.frombuffer(self._used, dtype=torch.int32) if self._count else torch.empty(0)

    # -- gradients come

    def hook_for(self, index: int) -> Callable[[torch.Tensor], None]:
        """What to call when a parameter's gradient is there. Short: it runs for every parameter and step."""
        state, used, missing, bucket_of = self._state, self._used, self.missing, self._bucket_of
        changed, came_otherwise = self._changed, partial(self._came_otherwise, index)

        def gradient_is_there(_: torch.Tensor) -> None:
            used[index] = 1
            if state[index] != EXPECTED:
                came_otherwise()
                return
            state[index] = READY
            bucket = bucket_of[index]
            missing[bucket] -= 1
            if not missing[bucket]:
                changed()

        return gradient_is_there

    def _came_otherwise(self, index: int) -> None:
        """A gradient came that is not simply the expected one."""
        state = self._state[index]
        if state == IDLE:
            return
        if state == COUNTING:
            self._times[index] += 1
            self.order.append(index)
        elif state == RECORDING:
            self.order.append(index)
            self._state[index] = READY
            self.missing[self._bucket_of[index]] -= 1
            self._changed()
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
        """Whether this is the first round of a static graph."""
        return self.static and self._static_template is None

    def count_is_over(self) -> None:
        """The first backward of a static graph has ended: now it is known what comes, and how often."""
        times = self._times
        self._static_unused = [index for index, count in enumerate(times) if not count]
        self._static_template = array.array("i", [max(EXPECTED, count) for count in times])
        self._state[:] = self._templates[READY]
        self.missing[:] = [0] * len(self.missing)
        for index in self._static_unused:
            self._state[index] = UNUSED
        self.unused = self._static_unused
        last_place = {index: place for place, index in enumerate(self.order)}
        self.order = sorted(last_place, key=last_place.__getitem__)
