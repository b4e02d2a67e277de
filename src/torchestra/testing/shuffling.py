"""Thread ranks in an order that a seed decides, to expose and reproduce races.

Inside :func:`shuffle` one rank runs at a time, from one synchronisation point to the next: the beginning and
the end of an operation of the group, and every moment within one when the rank would have to wait. There the
seed decides which rank runs next. So every interleaving of ranks, except for two copies at the very same
moment, is one of the orders, and the same seed gives the same order again.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torchestra.engine import layout as at
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.errors import CollectiveTimeoutError, InvalidArgumentError
from torchestra.process_group import ProcessGroup
from torchestra.store import Store
from torchestra.testing.faults import intercept
from torchestra.world.init import default_group

_STUCK_SECONDS = 20.0


class Schedule:
    """The order in which ranks run: one object for all ranks of a :func:`shuffle`.

    Attributes:
        seed: the seed that decides the order.
        turns: the ranks in the order in which they ran.
        entered: the ranks that have entered, including those that have left.
    """

    def __init__(self, seed: int, size: int) -> None:
        self.seed = seed
        self.turns: list[int] = []
        self.entered: set[int] = set()
        self._size = size
        self._random = random.Random(seed)
        self._inside: set[int] = set()
        self._left = 0
        self._given_up = ""
        self._changed = threading.Condition()
        self._turn: int | None = None

    def enter(self, rank: int) -> None:
        """Wait until all ranks have entered and it is this rank's turn."""
        with self._changed:
            self._inside.add(rank)
            if len(self._inside) == self._size:
                self._hand_on(None)
            self._await_turn(rank)

    def step(self, rank: int, waits: bool = False) -> None:
        """Synchronise: let the seed decide which rank runs next; not this one if it ``waits``."""
        with self._changed:
            if rank in self._inside:
                self._hand_on(rank if waits else None)
                self._await_turn(rank)

    def leave(self, rank: int) -> bool:
        """Note that a rank has left; return whether all have."""
        with self._changed:
            self._inside.discard(rank)
            self._left += 1
            if self._turn == rank:
                self._hand_on(None)
            return self._left == self._size

    def give_up(self, why: str) -> None:
        """Make the calling rank, and every rank that waits for its turn now or later, raise."""
        with self._changed:
            self._given_up = why
            self._changed.notify_all()
        raise InvalidArgumentError(f"shuffle: {why}")

    def _hand_on(self, but: int | None) -> None:
        candidates = sorted(self._inside - {but}) or sorted(self._inside)
        self._turn = self._random.choice(candidates) if candidates else None
        if self._turn is not None:
            self.turns.append(self._turn)
        self._changed.notify_all()

    def _await_turn(self, rank: int) -> None:
        before = -1
        deadline = 0.0
        while self._turn != rank or self._given_up:
            if self._given_up:
                raise InvalidArgumentError(f"shuffle: {self._given_up}")
            if before != len(self.turns):
                before, deadline = len(self.turns), time.monotonic() + _STUCK_SECONDS
            if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() > deadline:
                self._inside.discard(rank)
                raise CollectiveTimeoutError(
                    f"shuffle: it was rank {self._turn}'s turn for {_STUCK_SECONDS:g} s, and rank {rank}"
                    " waits for its own: does that rank wait for another outside torchestra's operations,"
                    " or has one not entered shuffle()?"
                )


_schedules: WeakKeyDictionary[Store, list[Schedule]] = WeakKeyDictionary()
_lock = threading.Lock()


@contextlib.contextmanager
def shuffle(seed: int, group: ProcessGroup | None = None) -> Iterator[Schedule]:
    """Run the block on all thread ranks of a group in an order that ``seed`` decides.

    Every rank of the group must enter it, with the same seed. Covers synchronous operations of the group
    and blocking send and recv; asynchronous ones run on threads of their own, outside the order.

    Args:
        seed: decides the order.
        group: by default the default group.

    Yields:
        The schedule, whose ``turns`` tell the order afterwards.

    Raises:
        InvalidArgumentError: the ranks are processes, which cannot be ordered in this way.
        CollectiveTimeoutError: a rank waits for another outside torchestra's operations, or did not enter.
    """
    group = default_group() if group is None else group
    here = current_thread_rank()
    if here is None:
        raise InvalidArgumentError("shuffle: the ranks must be threads of one process; these are processes")
    rank = group.rank()
    with _lock:
        open_ones = _schedules.setdefault(here.store, [])
        schedule = next((each for each in open_ones if rank not in each.entered), None)
        if schedule is None:
            schedule = Schedule(seed, group.size())
            open_ones.append(schedule)
        schedule.entered.add(rank)
    try:
        if schedule.seed != seed:
            schedule.give_up(f"rank {rank} has seed {seed}, another rank {schedule.seed}")
        with _stepping_group(group, schedule, rank):
            schedule.enter(rank)
            yield schedule
    finally:
        if schedule.leave(rank):
            with _lock, contextlib.suppress(ValueError):
                open_ones.remove(schedule)


@contextlib.contextmanager
def _stepping_group(group: ProcessGroup, schedule: Schedule, rank: int) -> Iterator[None]:
    """Make every wait of the group's kernels return to Python at once and take a step of the schedule."""
    communicator = group.communicator
    context = communicator.engine.context
    words = {offset: context.load_word(offset) for offset in (at.SPINS, at.YIELDS)}
    longest_s, first_s = context.sleep_times.longest_s, context.sleep_times.first_s
    check = context.check

    @functools.wraps(check)
    def stepping_check(*args: Any, **kwargs: Any) -> Any:
        schedule.step(rank, waits=True)
        return check(*args, **kwargs)

    undo = intercept(communicator, lambda _: schedule.step(rank), lambda _: schedule.step(rank))
    for offset in words:
        context.store_word(offset, 0)
    context.sleep_times.set(1e-9)
    setattr(context, "check", stepping_check)  # noqa: B010
    try:
        yield
    finally:
        del context.__dict__["check"]
        context.sleep_times.set(longest_s, first_s)
        for offset, value in words.items():
            context.store_word(offset, value)
        undo()
