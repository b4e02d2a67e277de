"""Ranks that run programs over shared memory: a state, the events that are possible in it, and their effects.

An event is one visible operation of one rank, with the value that it reads, a spurious wake-up, a time-out,
or a crash. Between its visible operations a rank runs alone (:mod:`verification.program`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from verification.memory import SharedMemory, to_word
from verification.program import CALL, RETURN, Program
from verification.violations import Violation

FUTEX_WAIT, FUTEX_WAKE = 0, 1
ALLOCATED = 1 << 60
"""Start of the memory that kernels allocate: no address of the product's. Each rank has its own."""
LOADS = ("load_acquire", "load_ordered", "load_relaxed")
STORES = ("store_release", "store_ordered", "store_relaxed")

Frame = tuple[Program, int, int, tuple[int, ...]]
"""A program, its next block, the caller's variable for the result, and the variables."""


class Stop(NamedTuple):
    """The visible operation before which a rank has stopped."""

    kind: str
    words: tuple[int, ...]
    line: str


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
class Start:
    """The program of one rank, and its arguments.

    Attributes:
        program: of the rank.
        arguments: words.
        is_private: tells which addresses only this rank uses.
    """

    program: Program
    arguments: Sequence[int]
    is_private: Callable[[int], bool]


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


class Running:
    """The rank that runs now, on which the functions that stand for intrinsics work."""

    world: World
    rank: int
    private: dict[int, int]
    is_private: Callable[[int], bool]


now = Running()


class World:
    """A state of all ranks.

    Unless the rules say otherwise, a sleep with a limit times out only once a rank has crashed or the group
    is aborted: in all other cases another rank must wake the sleeper, so that a lost wake-up is a deadlock.

    Args:
        starts: the ranks.
        memory: the memory that they share.
        rules: for events other than the ranks' own steps.
        abort: the address of the word that is set when the group is aborted.
    """

    __slots__ = (
        "abort", "asleep", "crashed", "frames", "last", "memory", "preempted", "private", "private_hash",
        "results", "rules", "spurious", "starts", "stops",
    )  # fmt: skip

    def __init__(self, starts: Sequence[Start], memory: SharedMemory, rules: Rules, abort: int) -> None:
        self.abort = abort
        size = len(starts)
        self.starts = starts
        self.rules = rules
        self.memory = memory
        self.frames: list[tuple[Frame, ...]] = [
            ((start.program, 0, -1, _variables(start.program, start.arguments)),) for start in starts
        ]
        self.stops: list[Stop | None] = [None] * size
        self.private: list[dict[int, int]] = [{} for _ in starts]
        self.private_hash = [0] * size
        self.results: list[int | None] = [None] * size
        self.asleep: list[int | str | None] = [None] * size  # the address, SLEEP_ENDS, or None
        self.crashed: frozenset[int] = frozenset()
        self.spurious = self.preempted = 0
        self.last = -1
        for rank in range(size):
            self._run(rank, self.frames[rank])

    def copy(self) -> World:
        """Return a state that can be changed without this one."""
        new = World.__new__(World)
        for name in ("starts", "rules", "abort", "crashed", "spurious", "preempted", "last"):
            setattr(new, name, getattr(self, name))
        for name in ("frames", "stops", "private_hash", "results", "asleep"):
            setattr(new, name, getattr(self, name).copy())
        new.private = self.private.copy()  # each is copied when its rank runs
        new.memory = self.memory.copy()
        return new

    def key(self) -> int:
        """Return a hash of all data that determine the possible futures."""
        bound = (self.last, self.preempted) if self.rules.preemptions is not None else ()
        return hash(
            (
                tuple([tuple([(id(f[0]), *f[1:]) for f in frames]) for frames in self.frames]),
                tuple(self.private_hash),
                tuple(self.results),
                tuple(self.asleep),
                self.crashed,
                self.spurious,
                bound,
                self.memory.key(),
            )
        )

    def has_ended(self) -> bool:
        """Return whether every rank has ended, or crashed."""
        return all(self.results[rank] is not None or rank in self.crashed for rank in range(len(self.starts)))

    def events(self) -> Iterator[Event]:
        """Yield the possible next events."""
        for rank, stop in enumerate(self.stops):
            if stop is None or rank in self.crashed:
                continue
            choices = list(self._choices(rank, stop))
            if choices and self._is_preemption(rank) and self.preempted == self.rules.preemptions:
                continue
            for choice in choices:
                yield Event(rank, stop, choice)
            if len(self.crashed) < self.rules.crashes:
                yield Event(rank, stop, CRASH)

    def _is_preemption(self, rank: int) -> bool:
        """Return whether another rank ran last, and could go on."""
        last = self.last
        if last in (-1, rank) or last in self.crashed:
            return False
        stop = self.stops[last]
        return stop is not None and any(True for _ in self._choices(last, stop))

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
            return
        result = self._effect(rank, stop, choice)
        if result is None:
            return  # it sleeps
        *callers, (program, block, place, variables) = self.frames[rank]
        changed = list(variables)
        changed[changed[-1]] = result
        changed[-1] = 0
        self.stops[rank] = None
        self._run(rank, (*callers, (program, block, place, tuple(changed))))

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
            self.memory.fence(rank)
            if self.memory.value(address, choice) & 0xFFFF_FFFF == value & 0xFFFF_FFFF:
                self.asleep[rank] = address
                return None
            return -1
        if choice == SLEEP_ENDS and self.asleep[rank] != SLEEP_ENDS:
            self.spurious += 1
        self.asleep[rank] = None
        return -1 if choice == TIME_OUT else 0

    # Running

    def _run(self, rank: int, frames: Sequence[Frame]) -> None:
        """Run a rank to its next visible operation, or its end."""
        now.world, now.rank, now.is_private = self, rank, self.starts[rank].is_private
        now.private = self.private[rank] = self.private[rank].copy()
        *callers, (program, block, place, kept) = frames
        variables = list(kept)
        while True:
            outcome = program.blocks[block](variables)
            if type(outcome) is int:
                block = outcome
            elif outcome[0] == CALL:
                _, callee, words, wanted, block = outcome
                callers.append((program, block, wanted, _kept(program, block, variables)))
                program, block, variables = callee, 0, list(_variables(callee, words))
            elif outcome[0] == RETURN:
                result = to_word(outcome[1])
                if not callers:
                    self.frames[rank], self.results[rank] = (), result
                    return
                program, block, wanted, kept = callers.pop()
                variables = list(kept)
                variables[wanted] = result
            else:
                _, kind, words, wanted, block, line = outcome
                if words and kind != "syscall" and now.is_private(words[0]):
                    variables[wanted] = private_operation(kind, words)
                    continue
                if kind in LOADS and words[0] not in self.memory.known.written:
                    variables[wanted] = self.memory.initial(words[0])
                    continue
                kept = _kept(program, block, variables)
                self.frames[rank] = (*callers, (program, block, place, (*kept[:-1], wanted)))
                self.stops[rank] = Stop(kind, tuple(map(to_word, words)), line)
                return


def _variables(program: Program, arguments: Sequence[int]) -> tuple[int, ...]:
    """Return the variables of a program that begins; the last is the place of an operation's result."""
    return (*arguments, *(0,) * (program.variables + 1 - len(arguments)))


def _kept(program: Program, block: int, variables: list[int]) -> tuple[int, ...]:
    """Return the variables, with 0 for those that are not read again."""
    for number in program.dead[block]:
        variables[number] = 0
    return tuple(variables)


def private_operation(kind: str, words: Sequence[int]) -> int:
    """Perform a visible operation on a word that only its rank uses."""
    address = words[0]
    value = load(address)
    if kind in STORES:
        store(address, words[1])
        return 0
    if kind == "fetch_add":
        store(address, value + words[1])
    elif kind == "compare_exchange" and value == words[1]:
        store(address, words[2])
    return value


# Functions that stand for invisible intrinsics and for C functions.


def load(address: int) -> int:
    """Read a word in place."""
    if now.is_private(address):
        found = now.private.get(address)
        return now.world.memory.initial(address) if found is None else found
    return now.world.memory.read(now.rank, address)


def store(address: int, value: int) -> None:
    """Write a word in place."""
    if now.is_private(address):
        value = to_word(value)
        world, rank = now.world, now.rank
        old = now.private.get(address)
        if old != value:
            world.private_hash[rank] ^= hash((address, old)) ^ hash((address, value))
            now.private[address] = value
    else:
        now.world.memory.write(now.rank, address, value)


def _copy(target: int, source: int, length: int) -> int:
    assert length % 8 == 0, "models move whole words"
    for offset in range(0, length, 8):
        store(target + offset, load(source + offset))
    return target


def process_of(rank: int) -> int:
    """Return what stands for the number of a rank's process."""
    return rank + 1


def _read_process(
    process: int, local: int, local_count: int, remote: int, remote_count: int, flags: int
) -> int:
    """Stand for process_vm_readv: copy words, or what is shorter than a word, of a process that lives."""
    world = now.world
    owner = process - process_of(0)
    if owner in world.crashed:
        return -1
    assert 0 <= owner < len(world.starts)
    assert not flags
    lengths = [load(local + 16 * index + 8) for index in range(local_count)]
    given = [load(remote + 16 * index + 8) for index in range(remote_count)]
    if lengths != given:  # the ends of a rank's own tensor, which nothing is done with
        assert owner == now.rank
        assert sum(lengths) == sum(given) == 2
        return 2
    for index, length in enumerate(lengths):
        _copy_from(owner, load(local + 16 * index), load(remote + 16 * index), length)
    return sum(lengths)


def _copy_from(owner: int, target: int, source: int, length: int) -> None:
    world = now.world
    assert length % 8 == 0, "models move whole words"
    for offset in range(0, length, 8):
        address = source + offset
        if not world.starts[owner].is_private(address):
            value = world.memory.read(now.rank, address)
        else:
            found = world.private[owner].get(address)
            value = world.memory.initial(address) if found is None else found
        store(target + offset, value)


def _stream_line(target: int, source: int) -> None:
    for offset in range(0, 64, 8):
        value = load(source + offset)
        if now.is_private(target + offset):
            store(target + offset, value)
        else:
            now.world.memory.write(now.rank, target + offset, value, streams=True)


def _add_up(function: int, target: int, sources: int, number: int, count: int) -> None:
    """Stand for any reduction: a sum of words."""
    addresses = [load(sources + 8 * index) for index in range(number)]
    for offset in range(0, 8 * count, 8):
        store(target + offset, sum(load(address + offset) for address in addresses))


def _nothing(*words: int) -> int:
    return 0


def _allocate(nbytes: int) -> int:
    """Stand for malloc: return memory of this rank alone, which is never reused."""
    start = load(ALLOCATED) or ALLOCATED + 64
    store(ALLOCATED, start + (nbytes + 63) // 64 * 64)
    return start


OPERATIONS: dict[str, Callable[..., Any]] = {
    "load": load,
    "store": store,
    "memcpy": _copy,
    "process_vm_readv": _read_process,
    "memset": _nothing,
    "stream_line": _stream_line,
    "stream_fence": lambda: now.world.memory.stream_fence(now.rank),
    "call_reduction": _add_up,
    "release_fence": lambda: now.world.memory.release_fence(now.rank),
    "spin_hint": _nothing,
    "sched_yield": _nothing,
    "counter": _nothing,
    "clock_gettime": _nothing,
    "malloc": _allocate,
    "free": _nothing,
}
"""By name: the functions that stand for a kernel's invisible intrinsics and C functions."""

__all__ = [
    "OPERATIONS", "UNASKED", "Event", "Rules", "Start", "Stop", "World", "load", "now", "process_of", "store",
]  # fmt: skip
