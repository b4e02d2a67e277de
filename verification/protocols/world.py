"""A state of ranks whose code is Python, the events that are possible in it, and their effects.

What ranks share are words of memory, as weak as for kernels (:mod:`verification.memory`), and *facts*: values
by name that services change, one operation at a time (a store, sockets, who has entered a group).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchestra.errors import DistError
from verification.execution import LOADS, STORES, Stop
from verification.memory import Known, SharedMemory
from verification.protocols.replay import SLEEP, Point, Points, Raised, Run, Stopped, current
from verification.violations import Violation, WrongResult
from verification.world import CRASH, INTERRUPT, ONLY, Event

STAYS = object()
"""The result of an operation that a rank is still in: it sleeps."""


@dataclass(frozen=True)
class Rules:
    """Rules for events other than the ranks' own steps.

    Attributes:
        crashes: how many ranks may crash, at any moment.
        mortal: the ranks that may; None: any.
        interrupts: how many operations may be interrupted (Ctrl-C) instead of done.
        interruptible: whose; None: any rank's.
        time_outs: how often a limit of time may be found to have passed.
        suspicions: how often a rank may take another for gone that lives.
        preemptions: how often a rank that could go on may be preempted by another; None: any number.
        stale: how many loads may return an old value; None: any number.
    """

    crashes: int = 0
    mortal: tuple[int, ...] | None = None
    interrupts: int = 0
    interruptible: tuple[int, ...] | None = None
    time_outs: int = 0
    suspicions: int = 0
    preemptions: int | None = None
    stale: int | None = None


class Service(Protocol):
    """A kind of operation that works on the facts."""

    def __call__(self, world: ProtocolWorld, rank: int, choice: Any, *words: Any) -> Any:
        """Do it, and return the result."""


Choices = Callable[..., Iterable[Any]]
"""Given the world, the rank and the words, returns what an operation may choose from; nothing: it waits."""


@dataclass(frozen=True)
class Model:
    """What a case is made of.

    Attributes:
        programs: by rank, the code; returns the outcome, which must be hashable.
        services: by kind of operation.
        choices: by kind, where there is more than one choice, or none at times.
        check: raises a Violation if a state must not be; given the state before too.
        facts: at first.
        rules: for other events.
        private: kinds of operations whose moment others cannot tell: they are done at once.
        interrupted: by kind, whether an interrupt comes after it, or instead of it; no other can be
            interrupted. None: all, by an interrupt instead.
        points: those that the ranks' code has come to so far.
    """

    programs: Sequence[Callable[[], Any]]
    services: Mapping[str, Service]
    check: Callable[[ProtocolWorld], None]
    facts: Mapping[Any, Any]
    rules: Rules
    choices: Mapping[str, Choices] = field(default_factory=dict)
    private: frozenset[str] = frozenset()
    interrupted: Mapping[str, bool] | None = None
    points: Points = field(default_factory=Points, init=False)


class ProtocolWorld:
    """A state of all ranks."""

    __slots__ = (
        "asleep", "crashed", "facts", "interrupts", "last", "memory", "model", "points", "preempted",
        "results", "stale", "suspicions", "time_outs",
    )  # fmt: skip

    def __init__(self, model: Model, known: Known) -> None:
        size = len(model.programs)
        self.model = model
        self.memory = SharedMemory(size, lambda address: 0, known, frozenset())
        self.facts: dict[Any, Any] = dict(model.facts)
        self.points = [model.points.first(rank, None) for rank in range(size)]
        self.results: list[Any] = [None] * size
        self.asleep: list[None] = [None] * size
        self.crashed: frozenset[int] = frozenset()
        self.interrupts = self.time_outs = self.suspicions = self.preempted = self.stale = 0
        self.last = -1
        for rank in range(size):
            self._run(rank, self.points[rank])

    @property
    def stops(self) -> list[Stop | None]:
        """By rank, the operation that it does next; None if it has ended."""
        return [point.stop for point in self.points]

    def copy(self) -> ProtocolWorld:
        """Return a state that can be changed without this one."""
        new = ProtocolWorld.__new__(ProtocolWorld)
        new.model, new.crashed, new.asleep = self.model, self.crashed, self.asleep
        new.last, new.preempted, new.stale = self.last, self.preempted, self.stale
        new.interrupts, new.suspicions, new.time_outs = self.interrupts, self.suspicions, self.time_outs
        new.facts, new.points, new.results = self.facts.copy(), self.points.copy(), self.results.copy()
        new.memory = self.memory.copy()
        return new

    def key(self) -> int:
        """Return a hash of all data that determine the possible futures."""
        bound = (self.last, self.preempted) if self.model.rules.preemptions is not None else ()
        points = [
            -1 if rank in self.crashed or point.ended else point.number
            for rank, point in enumerate(self.points)
        ]
        return hash(
            (
                tuple(points),
                tuple(self.results),
                self.crashed,
                self.interrupts,
                self.time_outs,
                self.suspicions,
                self.stale if self.model.rules.stale is not None else 0,
                bound,
                frozenset(self.facts.items()),
                self.memory.key(),
            )
        )

    def has_ended(self) -> bool:
        """Return whether every rank has ended, or crashed."""
        return all(result is not None or rank in self.crashed for rank, result in enumerate(self.results))

    def events(self) -> Iterator[Event]:
        """Yield the possible next events."""
        rules = self.model.rules
        for rank, point in enumerate(self.points):
            stop = point.stop
            if stop is None or rank in self.crashed:
                continue
            choices = list(self._choices(rank, stop))
            if choices and self.preempted == rules.preemptions and self._is_preemption(rank):
                continue
            for choice in choices:
                yield Event(rank, stop, choice)
            if len(self.crashed) < rules.crashes and rank in (rules.mortal or (rank,)):
                yield Event(rank, stop, CRASH)
            if self.interrupts < rules.interrupts and rank in (rules.interruptible or (rank,)):
                kinds = self.model.interrupted
                if kinds is None or (stop.kind in kinds and (choices or not kinds[stop.kind])):
                    yield Event(rank, stop, INTERRUPT)

    def _is_preemption(self, rank: int) -> bool:
        """Return whether another rank ran last, and could go on without looking again."""
        last = self.last
        if last in (-1, rank) or last in self.crashed:
            return False
        stop = self.points[last].stop
        return stop is not None and stop.kind != SLEEP and any(True for _ in self._choices(last, stop))

    def _choices(self, rank: int, stop: Stop) -> Iterable[Any]:
        kind, words = stop.kind, stop.words
        if kind in LOADS:
            values = self.memory.choices(rank, kind, words[0])
            return values[-1:] if self.stale == self.model.rules.stale else values
        found = self.model.choices.get(kind)
        return (ONLY,) if found is None else found(self, rank, *words)

    def apply(self, event: Event) -> None:
        """Let an event happen, and the rank go on to its next operation."""
        rank, stop, choice = event
        if self.model.rules.preemptions is not None:
            self.preempted += self._is_preemption(rank)
            self.last = rank
        if choice == CRASH:
            self.crashed |= {rank}
            self.memory.retire(rank)
            self.model.check(self)
            return
        if choice == INTERRUPT:
            self.interrupts += 1
            if self.model.interrupted is not None and self.model.interrupted[stop.kind]:
                self._effect(rank, stop.kind, stop.words, ONLY)
            result: Any = Raised(KeyboardInterrupt)
        else:
            result = self._effect(rank, stop.kind, stop.words, choice)
            if result is STAYS:
                return
        self._run(rank, self.points[rank].after(result))
        self.model.check(self)

    def _effect(self, rank: int, kind: str, words: tuple[Any, ...], choice: Any) -> Any:
        memory = self.memory
        if kind in LOADS:
            self.stale += choice != memory.choices(rank, kind, words[0])[-1]
            return memory.load(rank, words[0], choice, learns=kind != "load_relaxed")
        if kind in STORES:
            ordered, releases = kind == "store_ordered", kind != "store_relaxed"
            memory.store(rank, words[0], words[1], ordered=ordered, releases=releases)
            return 0
        if kind == "compare_exchange":
            # To write what is there already is left out: others only learn less by it, and histories stay
            # short.
            wanted = None if words[2] == words[1] else words[2]
            return memory.modify(rank, words[0], lambda value: wanted if value == words[1] else None)
        if kind == "fetch_add":
            return memory.modify(rank, words[0], lambda value: value + words[1])
        if kind == SLEEP:
            return None
        return self.model.services[kind](self, rank, choice, *words)

    def _at_once(self, rank: int, kind: str, words: tuple[Any, ...]) -> tuple[bool, Any]:
        """Do an operation at once if the others cannot tell when it is done.

        These are loads of words that nobody writes, and stores without an order: whoever reads may read old
        values for as long as nothing tells it of newer ones.
        """
        if kind in LOADS and words[0] not in self.memory.known.written:
            return True, 0
        if kind == "store_relaxed" or kind in self.model.private:
            return True, self._effect(rank, kind, words, ONLY)
        return False, None

    def _run(self, rank: int, point: Point) -> None:
        """Run a rank's code from a point to its next operation, or its end."""
        while True:
            if point.turned is not None:
                point = point.turned
            elif point.stop is not None:
                done, result = self._at_once(rank, point.stop.kind, point.stop.words)
                if not done:
                    break
                point = point.after(result)
            elif point.ended:
                self.results[rank] = point.outcome
                self.memory.retire(rank)
                break
            else:
                point = self._run_code(rank, point)
                if point.stop is not None:
                    break
        self.points[rank] = point

    def _run_code(self, rank: int, point: Point) -> Point:
        """Run a rank's code from its beginning through a point; return the point to which it comes."""
        run = current.run = Run(point, lambda kind, words: self._at_once(rank, kind, words))
        outcome: Any = None
        try:
            outcome = self.model.programs[rank]()
        except Stopped:
            pass
        except Violation:
            raise
        except (DistError, KeyboardInterrupt) as error:
            outcome = (type(error).__name__, str(error))
        except Exception as error:
            if not run.is_over():
                raise WrongResult(f"rank {rank} ended with {type(error).__name__}: {error}") from error
        if run.error is not None:
            raise run.error
        if not run.is_over():
            run.point.ended, run.point.outcome = True, outcome
        return run.point
