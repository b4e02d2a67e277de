"""Run a rank between two visible operations, once for each state that it can be in.

What a rank does until its next visible operation depends on its own variables and memory, on the result of
its last operation, and on what it reads of what ranks share. So for each state of a rank
(:class:`LocalState`) and each result there is a tree: its nodes are accesses to what ranks share, its
branches the values that they return, and its leaves the rank's next states. Where the tree has the branch,
only the accesses are done (they change memory and are checked for races); the rank's code runs where it has
not. A search comes to the same state of one rank in very many states of the world.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from verification.memory import to_word
from verification.program import CALL, RETURN, Program

if TYPE_CHECKING:
    from verification.world import World

LOADS = ("load_acquire", "load_ordered", "load_relaxed")
STORES = ("store_release", "store_ordered", "store_relaxed")

Frame = tuple[Program, int, int, tuple[int, ...]]
"""A program, its next block, the caller's variable for the result, and the variables."""
Access = Callable[..., Any]
"""An access to what ranks share: called with the world, the rank and arguments."""


class Stop(NamedTuple):
    """The visible operation before which a rank has stopped."""

    kind: str
    words: tuple[int, ...]
    line: str


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


class LocalState:
    """A state of one rank.

    Attributes:
        number: what distinguishes it from all other states of any rank.
        frames: the programs under way.
        private: its own memory, where that is not as at first.
        stop: the operation that it does next; None if it has ended.
        result: what its program has returned; None if it has not ended.
        after: by the result of its next operation, the tree of what it does then.
    """

    __slots__ = ("after", "frames", "number", "private", "result", "stop")

    def __init__(
        self,
        number: int,
        frames: tuple[Frame, ...],
        private: dict[int, int],
        stop: Stop | None,
        result: int | None,
    ) -> None:
        self.number, self.frames, self.private, self.stop, self.result = number, frames, private, stop, result
        self.after: dict[int, _Node] = {}


CRASHED = LocalState(-1, (), {}, None, None)
"""The state of every rank that has crashed."""


class _Node:
    """An access in the tree of what a rank does, or a leaf.

    Attributes:
        access, arguments: the access; None where it is not known yet, or nothing more is accessed.
        value, following: a value that it has returned, and what comes then.
        others: the same for other values.
        leaf: the state in which the rank stops.
    """

    __slots__ = ("access", "arguments", "following", "leaf", "others", "value")

    def __init__(self) -> None:
        self.access: Access | None = None
        self.arguments: tuple[Any, ...] = ()
        self.value: Any = None
        self.following: _Node | None = None
        self.others: dict[Any, _Node] | None = None
        self.leaf: LocalState | None = None

    def branch(self, value: Any) -> _Node:
        """Return what comes after a value, a new node for one that has not come before."""
        if self.following is None:
            self.value, self.following = value, _Node()
            return self.following
        if self.value == value:
            return self.following
        if self.others is None:
            self.others = {}
        return self.others.setdefault(value, _Node())


class Running:
    """The rank that runs now, on which the functions that stand for intrinsics work.

    Attributes:
        values: what its accesses have returned so far; they are not done again.
        node: where the tree goes on after these.
    """

    world: World
    rank: int
    private: dict[int, int]
    is_private: Callable[[int], bool]
    initial: Callable[[int], int]
    values: list[Any]
    position: int
    node: _Node

    def share(self, access: Access, *arguments: Any) -> Any:
        """Access what ranks share, or return what that has returned."""
        if self.position < len(self.values):
            self.position += 1
            return self.values[self.position - 1]
        value = access(self.world, self.rank, *arguments)
        self.node.access, self.node.arguments = access, arguments
        self.node = self.node.branch(value)
        return value


now = Running()


class Execution:
    """All states of ranks that have been seen, and what follows them.

    Args:
        starts: the ranks' programs.
        initial: gives a word's value before anybody has written it.
        written: the atomic words that a rank writes. To read another is no event.
    """

    def __init__(
        self, starts: Sequence[Start], initial: Callable[[int], int], written: Container[int]
    ) -> None:
        self.starts = starts
        self._initial = initial
        self._written = written
        self._states: dict[Any, LocalState] = {}
        frames = [(start.program, 0, -1, _variables(start.program, start.arguments)) for start in starts]
        self._first = [LocalState(0, (frame,), {}, None, None) for frame in frames]

    def begin(self, world: World, rank: int) -> LocalState:
        """Run a rank from its beginning to its first visible operation."""
        return self.go_on(world, rank, self._first[rank], 0)

    def go_on(self, world: World, rank: int, state: LocalState, result: int) -> LocalState:
        """Run a rank to its next visible operation, or its end, after one has returned a result."""
        node = state.after.get(result)
        if node is None:
            node = state.after[result] = _Node()
        values = []
        while (access := node.access) is not None:
            value = access(world, rank, *node.arguments)
            values.append(value)
            following = node.following
            if following is None or value != node.value:
                following = node.branch(value)
            node = following
        return node.leaf or self._run(world, rank, state, result, values, node)

    def _run(
        self, world: World, rank: int, state: LocalState, result: int, values: list[Any], node: _Node
    ) -> LocalState:
        now.world, now.rank, now.is_private = world, rank, self.starts[rank].is_private
        now.private, now.initial = state.private.copy(), self._initial
        now.values, now.position, now.node = values, 0, node
        frames, stop, ended = self._run_blocks(state, result)
        leaf = self._state(rank, frames, now.private, stop, ended)
        now.node.leaf = leaf
        return leaf

    def _run_blocks(
        self, state: LocalState, result: int
    ) -> tuple[tuple[Frame, ...], Stop | None, int | None]:
        *callers, (program, block, place, kept) = state.frames
        variables = list(kept)
        if state.stop is not None:
            variables[variables[-1]] = result
            variables[-1] = 0
        while True:
            outcome = program.blocks[block](variables)
            if type(outcome) is int:
                block = outcome
            elif outcome[0] == CALL:
                _, callee, words, wanted, block = outcome
                callers.append((program, block, wanted, _kept(program, block, variables)))
                program, block, variables = callee, 0, list(_variables(callee, words))
            elif outcome[0] == RETURN:
                returned = to_word(outcome[1])
                if not callers:
                    return (), None, returned
                program, block, wanted, kept = callers.pop()
                variables = list(kept)
                variables[wanted] = returned
            else:
                _, kind, words, wanted, block, line = outcome
                if words and kind != "syscall" and now.is_private(words[0]):
                    variables[wanted] = private_operation(kind, words)
                elif kind in LOADS and words[0] not in self._written:
                    variables[wanted] = now.share(_read_atomically, words[0])
                else:
                    kept = _kept(program, block, variables)
                    frames = (*callers, (program, block, place, (*kept[:-1], wanted)))
                    return frames, Stop(kind, tuple(map(to_word, words)), line), None

    def _state(
        self,
        rank: int,
        frames: tuple[Frame, ...],
        private: dict[int, int],
        stop: Stop | None,
        result: int | None,
    ) -> LocalState:
        """Return the state with these data: the same one each time."""
        places = tuple([(id(program), *more) for program, *more in frames])
        # The operation is a part of it: variables that are not read again are not in the frames.
        key = (rank, places, frozenset(private.items()), stop, result)
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = LocalState(len(self._states) + 1, frames, private, stop, result)
        return found


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


# Functions that stand for invisible accesses to words.


def load(address: int) -> int:
    """Read a word in place."""
    found = now.private.get(address)
    if found is not None:
        return found
    if now.is_private(address):
        return now.initial(address)
    return int(now.share(_read, address))


def store(address: int, value: int, *, streams: bool = False) -> None:
    """Write a word in place."""
    if not now.is_private(address):
        now.share(_write, address, value, streams)
    elif (value := to_word(value)) == now.initial(address):
        now.private.pop(address, None)
    else:
        now.private[address] = value


def _read(world: World, rank: int, address: int) -> int:
    return world.memory.read(rank, address)


def _read_atomically(world: World, rank: int, address: int) -> int:
    return world.memory.read_atomically(rank, address)


def _write(world: World, rank: int, address: int, value: int, streams: bool) -> None:
    world.memory.write(rank, address, value, streams=streams)
