"""Ranks that run programs over shared memory: a state, the events that are possible in it, and their effects.

An event is one visible operation of one rank, with the value that it reads, a spurious wake-up, a time-out,
or a crash. Between its visible operations a rank runs alone (:mod:`verification.program`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from verification.execution import CRASHED, LOADS, STORES, Execution, LocalState, Stop
from verification.memory import SharedMemory
from verification.violations import Violation

FUTEX_WAIT, FUTEX_WAKE = 0, 1


class Event(NamedTuple):
    """Something that can happen next.

    ``choice`` is the number of the value that is read, or one of the words below.
    """

    rank: int
    stop: Stop
    choice: Any


ONLY, CRASH, SLEEP_ENDS, TIME_OUT = "", "crashes", "is woken", "times out"
INTERRUPT = "is interrupted"
UNASKED = (CRASH, INTERRUPT)
"""Events that may happen at any moment, or never: nobody waits for them."""


@dataclass(frozen=True)
class Rules:
    """Rules for events other than the ranks' own steps.

    Attributes:
        crashes: how many ranks may crash, at any moment.
        spurious: how many spurious wake-ups there may be in all.
        time_outs: sleeps with a limit may always time out, not only once a rank has crashed or the group is
            aborted.
        preemptions: how often a rank that could go on may be preempted by another; None: any number.
    """

    crashes: int = 0
    spurious: int = 0
    time_outs: bool = False
    preemptions: int | None = None


class World:
    """A state of all ranks.

    Unless the rules say otherwise, a sleep with a limit times out only once a rank has crashed or the group
    is aborted: in all other cases another rank must wake the sleeper, so that a lost wake-up is a deadlock.

    Args:
        execution: runs the ranks.
        memory: the memory that they share.
        rules: for events other than the ranks' own steps.
        abort: the address of the word that is set when the group is aborted.
    """

    __slots__ = (
        "abort", "asleep", "crashed", "execution", "last", "locals", "memory", "preempted", "rules",
        "spurious",
    )  # fmt: skip

    def __init__(self, execution: Execution, memory: SharedMemory, rules: Rules, abort: int) -> None:
        self.abort = abort
        size = len(execution.starts)
        self.execution = execution
        self.rules = rules
        self.memory = memory
        self.asleep: list[int | str | None] = [None] * size  # the address, SLEEP_ENDS, or None
        self.crashed: frozenset[int] = frozenset()
        self.spurious = self.preempted = 0
        self.last = -1
        self.locals: list[LocalState] = []
        for rank in range(size):
            self.locals.append(execution.begin(self, rank))
            if self.locals[rank].stop is None:
                memory.retire(rank)

    @property
    def stops(self) -> list[Stop | None]:
        """By rank, the operation that it does next; None if it has ended."""
        return [local.stop for local in self.locals]

    def copy(self) -> World:
        """Return a state that can be changed without this one."""
        new = World.__new__(World)
        new.execution, new.rules, new.abort = self.execution, self.rules, self.abort
        new.crashed, new.spurious = self.crashed, self.spurious
        new.preempted, new.last = self.preempted, self.last
        new.asleep, new.locals, new.memory = self.asleep.copy(), self.locals.copy(), self.memory.copy()
        return new

    def key(self) -> int:
        """Return a hash of all data that determine the possible futures."""
        bound = (self.last, self.preempted) if self.rules.preemptions is not None else ()
        return hash(
            (
                tuple([local.number for local in self.locals]),
                tuple(self.asleep),
                self.crashed,
                self.spurious,
                bound,
                self.memory.key(),
            )
        )

    def has_ended(self) -> bool:
        """Return whether every rank has ended, or crashed."""
        return all(local.stop is None for local in self.locals)

    def events(self) -> Iterator[Event]:
        """Yield the possible next events."""
        choices = [
            () if local.stop is None else tuple(self._choices(rank, local.stop))
            for rank, local in enumerate(self.locals)
        ]
        may_preempt = self.preempted != self.rules.preemptions
        for rank, local in enumerate(self.locals):
            if local.stop is None:
                continue
            if choices[rank] and not may_preempt and self.last not in (-1, rank) and choices[self.last]:
                continue
            for choice in choices[rank]:
                yield Event(rank, local.stop, choice)
            if len(self.crashed) < self.rules.crashes:
                yield Event(rank, local.stop, CRASH)

    def _is_preemption(self, rank: int) -> bool:
        """Return whether another rank ran last, and could go on."""
        if self.last in (-1, rank):
            return False
        stop = self.locals[self.last].stop
        return stop is not None and any(True for _ in self._choices(self.last, stop))

    def _choices(self, rank: int, stop: Stop) -> Iterator[Any]:
        kind, words = stop.kind, stop.words
        asleep = self.asleep[rank]
        if asleep is not None:
            if asleep == SLEEP_ENDS:
                yield SLEEP_ENDS
            else:
                limits = self.rules.time_outs or self.crashed or self.memory.newest(self.abort) != 0
                if words[4] and limits:
                    yield TIME_OUT
                if self.spurious < self.rules.spurious:
                    yield SLEEP_ENDS
        elif kind in LOADS:
            yield from self.memory.choices(rank, kind, words[0])
        elif kind == "syscall" and words[2] == FUTEX_WAIT:
            yield from self.memory.futex_choices(rank, words[1], words[3])
        else:
            if kind == "compare_exchange":
                yield from self.memory.differing_choices(rank, words[0], words[1])
            yield ONLY

    def apply(self, event: Event) -> None:
        """Let an event happen, and the rank go on to its next visible operation."""
        rank, stop, choice = event
        if self.rules.preemptions is not None:
            self.preempted += self._is_preemption(rank)
            self.last = rank
        if choice == CRASH:
            self.crashed |= {rank}
            self.asleep[rank] = None
            self.locals[rank] = CRASHED
            self.memory.retire(rank)
            return
        result = self._effect(rank, stop, choice)
        if result is None:
            return  # it sleeps
        self.locals[rank] = self.execution.go_on(self, rank, self.locals[rank], result)
        if self.locals[rank].stop is None:
            self.memory.retire(rank)

    def _effect(self, rank: int, stop: Stop, choice: Any) -> int | None:
        """Perform an operation; return its result, or None if the rank falls asleep."""
        kind, words, memory = stop.kind, stop.words, self.memory
        address = words[0] if words else 0
        if kind in LOADS:
            return memory.load(rank, address, choice, learns=kind != "load_relaxed")
        if kind in STORES:
            ordered, releases = kind == "store_ordered", kind != "store_relaxed"
            memory.store(rank, address, words[1], ordered=ordered, releases=releases)
        elif kind == "fetch_add":
            return memory.modify(rank, address, lambda value: value + words[1])
        elif kind == "compare_exchange":
            if choice != ONLY:
                return memory.load(rank, address, choice)
            return memory.modify(rank, address, lambda value: words[2] if value == words[1] else None)
        elif kind == "full_fence":
            memory.fence(rank)
        elif kind == "syscall":
            return self._futex(rank, words, choice)
        else:
            raise Violation(f"there is no model of {kind}()")
        return 0

    def _futex(self, rank: int, words: tuple[int, ...], choice: Any) -> int | None:
        """Sleep on a word, or wake all its sleepers. The system's part of either begins with a full fence."""
        _, address, operation, value, *_ = words
        if operation == FUTEX_WAKE:
            self.memory.fence(rank)
            for other, asleep in enumerate(self.asleep):
                if asleep == address:
                    self.asleep[other] = SLEEP_ENDS
            return 0
        if self.asleep[rank] is None:
            found = self.memory.value(address, choice)
            self.memory.fence(rank)
            if found & 0xFFFF_FFFF == value & 0xFFFF_FFFF:
                self.asleep[rank] = address
                return None
            return -1
        if choice == SLEEP_ENDS and self.asleep[rank] != SLEEP_ENDS:
            self.spurious += 1
        self.asleep[rank] = None
        return -1 if choice == TIME_OUT else 0
