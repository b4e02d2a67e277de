"""Search the states that events lead to: all of them, or along random paths."""

from __future__ import annotations

import gc
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from verification.execution import Stop
from verification.memory import Known, KnowsMore
from verification.violations import Deadlock, NeverEnds, Violation
from verification.world import UNASKED, Event


class State(Protocol):
    """A state of all ranks."""

    @property
    def stops(self) -> Sequence[Stop | None]:
        """By rank, the operation that it does next; None if it has ended."""

    @property
    def asleep(self) -> Sequence[object]:
        """By rank, what it sleeps on, if it sleeps."""

    @property
    def crashed(self) -> frozenset[int]:
        """The ranks that have."""

    def copy(self) -> State:
        """Return a state that can be changed without this one."""

    def key(self) -> int:
        """Return a hash of all data that determine the possible futures."""

    def has_ended(self) -> bool:
        """Return whether every rank has ended, or crashed."""

    def events(self) -> Iterator[Event]:
        """Yield the possible next events."""

    def apply(self, event: Event) -> None:
        """Let an event happen."""


Make = Callable[[Known], State]
"""Makes the first state, given the known facts about its words."""
_LONGEST_WALK = 20_000


@dataclass
class Outcome:
    """The outcome of a search.

    Attributes:
        states: how many different states it has seen.
        steps: how many events it has tried.
        ends: in how many states all ranks have ended.
        complete: whether it has seen all states, within its rules.
        seconds: how long it took, in seconds of the processor: what else runs on the machine changes nothing.
        violation: the violated property, if any.
        path: the events that lead there.
    """

    states: int = 0
    steps: int = 0
    ends: int = 0
    complete: bool = False
    seconds: float = 0.0
    violation: Violation | None = None
    path: list[Event] = field(default_factory=list)


def search(make: Make, most_states: int = 10**9, seconds: float = 1e9) -> Outcome:
    """Visit every state once, up to a number of states or for some seconds of the processor.

    A complete search has also shown that the ranks can end from every state. A 64-bit hash distinguishes
    states.
    """
    known = Known()
    began = time.process_time()
    # Almost nothing becomes garbage in a search, and to look for it among millions of objects takes long.
    collects = gc.isenabled()
    gc.disable()
    try:
        while True:
            try:
                outcome = _Search(make(known)).run(most_states, seconds)
            except KnowsMore:
                continue
            outcome.seconds = time.process_time() - began
            return outcome
    finally:
        if collects:
            gc.enable()


class _Search:
    def __init__(self, first: State) -> None:
        self._outcome = Outcome(states=1)
        self._first = first.key()
        self._waiting = [(self._first, first)]
        self._origins: dict[int, tuple[int, Event] | None] = {self._first: None}  # of each state
        self._before: dict[int, list[int]] = defaultdict(list)
        self._ends: list[int] = []

    def run(self, most_states: int, seconds: float) -> Outcome:
        began = time.process_time()
        outcome = self._outcome
        while self._waiting and outcome.violation is None:
            if outcome.states >= most_states or time.process_time() - began > seconds:
                break
            self._expand(*self._waiting.pop())
        outcome.complete = not self._waiting and outcome.violation is None
        if outcome.complete:
            self._refuse_livelock()
        outcome.states, outcome.ends = len(self._origins), len(self._ends)
        return outcome

    def _expand(self, key: int, world: State) -> None:
        events = list(world.events())
        event = None
        try:
            _refuse_deadlock(world, events)
            for event in events:
                self._outcome.steps += 1
                after = world if event is events[-1] else world.copy()
                after.apply(event)
                new = after.key()
                self._before[new].append(key)
                if new in self._origins:
                    continue
                self._origins[new] = (key, event)
                self._outcome.states += 1
                if after.has_ended():
                    self._ends.append(new)
                else:
                    self._waiting.append((new, after))
        except Violation as violation:
            self._fail(violation, key, event)

    def _refuse_livelock(self) -> None:
        """Fail if there is a state from which the ranks cannot end."""
        can_end = set(self._ends)
        looked_at = list(self._ends)
        while looked_at:
            for before in self._before[looked_at.pop()]:
                if before not in can_end:
                    can_end.add(before)
                    looked_at.append(before)
        for key in self._origins:
            if key not in can_end:
                self._outcome.complete = False
                self._fail(NeverEnds("from here on the ranks cannot end, whatever happens"), key, None)
                return

    def _fail(self, violation: Violation, key: int, event: Event | None) -> None:
        path = [] if event is None else [event]
        while (origin := self._origins[key]) is not None:
            key = origin[0]
            path.append(origin[1])
        self._outcome.violation, self._outcome.path = violation, path[::-1]


def walk(make: Make, seconds: float, seed: int = 0) -> Outcome:
    """Take random paths: ranks alternate rarely or often, and sometimes read old values.

    Args:
        seconds: of the processor.
    """
    known = Known()
    began = time.process_time()
    outcome = Outcome()
    dice = random.Random(seed)
    while time.process_time() - began < seconds and outcome.violation is None:
        try:
            _walk(make(known), dice, outcome)
        except KnowsMore:
            continue
    outcome.seconds = time.process_time() - began
    return outcome


def _walk(world: State, dice: random.Random, outcome: Outcome) -> None:
    change = dice.choice((0.02, 0.1, 0.5))
    rank = -1
    path: list[Event] = []
    try:
        while not world.has_ended():
            events = list(world.events())
            _refuse_deadlock(world, events)
            if dice.random() < 0.99:
                events = [event for event in events if event.choice not in UNASKED] or events
            ranks = sorted({event.rank for event in events})
            if rank not in ranks or dice.random() < change:
                rank = dice.choice(ranks)
            mine = [event for event in events if event.rank == rank]
            event = mine[-1] if dice.random() < 0.7 else dice.choice(mine)
            path.append(event)
            outcome.steps += 1
            world.apply(event)
            if len(path) > _LONGEST_WALK:
                raise NeverEnds(f"the ranks have not ended after {_LONGEST_WALK} events")
        outcome.ends += 1
    except Violation as violation:
        outcome.violation, outcome.path = violation, path


def _refuse_deadlock(world: State, events: list[Event]) -> None:
    if not any(event.choice not in UNASKED for event in events):
        where = [
            f"rank {rank} {'sleeps' if world.asleep[rank] else 'waits'} at {stop.line}"
            for rank, stop in enumerate(world.stops)
            if stop is not None and rank not in world.crashed
        ]
        raise Deadlock("nobody can go on: " + ", ".join(where))
