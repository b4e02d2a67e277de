"""What threads of one process share, for protocols that are searched: locks, futexes and attributes.

Python's threads take turns by the interpreter's lock, so their accesses are in one order; so are, here, those
of the kernels that they call without it (whose weak memory is searched by itself, verification/cases.py).
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from torchestra.engine.native.declarations import KernelSource
from verification.protocols.replay import Raised, perform
from verification.protocols.words import runnable
from verification.protocols.world import STAYS, ProtocolWorld
from verification.world import FUTEX_WAIT

FREE = (-1, 0)


class ModelLock:
    """A lock, or one that its holder may take again; named, so that all threads mean the same."""

    def __init__(self, name: Any, again: bool = False) -> None:
        self.name, self._again = name, again

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it."""
        kind = "takes" if blocking and timeout < 0 else "takes in time" if blocking else "tries to take"
        return bool(perform(kind, self.name, self._again))

    def release(self) -> None:
        """Give it back."""
        perform("gives back", self.name, self._again)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Shared:
    """An attribute that threads share, in place of the one of the product's object.

    Args:
        at_once: only the holder of some lock uses it, so that nobody can tell when.
    """

    def __init__(self, at_once: bool = False) -> None:
        self._suffix = " by itself" if at_once else ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, one: Any, owner: type) -> Any:
        value = perform(f"reads{self._suffix}", one.name_in_model, self._name)
        return value.error(value.text) if isinstance(value, Kept) else value

    def __set__(self, one: Any, value: Any) -> None:
        if isinstance(value, list):
            value = tuple(value)
        if isinstance(value, BaseException):
            value = Kept(type(value), str(value))
        perform(f"writes{self._suffix}", one.name_in_model, self._name, value)


class Kept(NamedTuple):
    """An error as a value."""

    error: type[BaseException]
    text: str


class ModelList:
    """A list or deque that threads share."""

    def __init__(self, name: Any) -> None:
        self._name = name

    def append(self, item: Any) -> None:
        """Add one at the end."""
        perform("appends", self._name, item)

    def popleft(self) -> Any:
        """Take the first."""
        return perform("takes the first", self._name)

    def _items(self) -> tuple[Any, ...]:
        return tuple(perform("looks at", self._name))

    def __len__(self) -> int:
        return len(self._items())

    def __getitem__(self, place: int) -> Any:
        return self._items()[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items())


def in_order(kernel: KernelSource, **changed: int) -> Any:
    """Return a kernel's own function, over words that all threads see alike; some constants are changed."""
    function = runnable(kernel)
    scope: dict[str, Any] = {**function.__globals__, **changed}
    for name in ("load_acquire", "load_ordered"):
        scope[name] = lambda address: perform("reads", "words", address)
    for name in ("store_release", "store_ordered"):
        scope[name] = lambda address, value: perform("writes", "words", address, value)
    scope["fetch_add"] = lambda address, amount: perform("adds to", "words", address, amount)
    scope["syscall"] = lambda *words: perform("futex", *words)
    for name, value in list(scope.items()):
        if isinstance(value, types.FunctionType) and isinstance(
            kernel.function.__globals__.get(name), KernelSource
        ):
            scope[name] = in_order(kernel.function.__globals__[name], **changed)
    return types.FunctionType(function.__code__, scope)


class ModelWords:
    """The array by which Python reads and writes words that kernels use."""

    def __getitem__(self, place: int) -> int:
        return int(perform("reads", "words", place * 8))

    def __setitem__(self, place: int, value: int) -> None:
        perform("writes", "words", place * 8, int(value))


THREADING = SimpleNamespace(
    Lock=lambda: ModelLock(perform("makes a lock")),
    get_ident=lambda: perform("is"),
    current_thread=lambda: None,
    Thread=SimpleNamespace,
)


def _take(world: ProtocolWorld, rank: int, choice: Any, name: Any, again: bool) -> bool:
    holder, depth = world.facts.get(name, FREE)
    if holder >= 0 and not (again and holder == rank):
        return False
    world.facts[name] = (rank, depth + 1)
    return True


def _may_take(world: ProtocolWorld, rank: int, name: Any, again: bool) -> Iterable[Any]:
    holder, _ = world.facts.get(name, FREE)
    if holder < 0 or (again and holder == rank):
        yield ""


def _give_back(world: ProtocolWorld, rank: int, choice: Any, name: Any, again: bool) -> Any:
    holder, depth = world.facts.get(name, FREE)
    if holder < 0 or (again and holder != rank):
        return Raised(RuntimeError, "release unlocked lock")
    world.facts[name] = (holder, depth - 1) if depth > 1 else FREE
    return None


def _make_lock(world: ProtocolWorld, rank: int, choice: Any) -> Any:
    number = world.facts.get(("locks", rank), 0)
    world.facts["locks", rank] = number + 1
    return ("lock", rank, number)


def _read(world: ProtocolWorld, rank: int, choice: Any, *name: Any) -> Any:
    return world.facts.get(name, 0 if name[0] == "words" else None)


def _write(world: ProtocolWorld, rank: int, choice: Any, *words: Any) -> None:
    world.facts[words[:-1]] = words[-1]


def _add(world: ProtocolWorld, rank: int, choice: Any, *words: Any) -> int:
    before = int(world.facts.get(words[:-1], 0))
    world.facts[words[:-1]] = before + words[-1]
    return before


def _append(world: ProtocolWorld, rank: int, choice: Any, name: Any, item: Any) -> None:
    world.facts[name] = (*world.facts.get(name, ()), item)


def _take_first(world: ProtocolWorld, rank: int, choice: Any, name: Any) -> Any:
    if not world.facts[name]:
        return Raised(IndexError, "pop from an empty deque")
    first, *rest = world.facts[name]
    world.facts[name] = tuple(rest)
    return first


def _look_at(world: ProtocolWorld, rank: int, choice: Any, name: Any) -> tuple[Any, ...]:
    return tuple(world.facts.get(name, ()))


def _futex(world: ProtocolWorld, rank: int, choice: Any, *words: int) -> Any:
    _, address, operation, expected, *_ = words
    sleepers = dict(world.facts["sleepers"])
    if operation != FUTEX_WAIT:
        sleepers = {who: None if where == address else where for who, where in sleepers.items()}
        world.facts["sleepers"] = frozenset(sleepers.items())
        return 0
    if rank in sleepers:
        del sleepers[rank]
        world.facts["sleepers"] = frozenset(sleepers.items())
        return 0
    if world.facts.get(("words", address), 0) & 0xFFFF_FFFF != expected:
        return -1
    world.facts["sleepers"] |= {(rank, address)}
    return STAYS


def _may_wake(world: ProtocolWorld, rank: int, *words: int) -> Iterable[Any]:
    sleepers = dict(world.facts["sleepers"])
    if rank not in sleepers or sleepers[rank] is None:
        yield ""
    elif words[4]:
        yield "times out"


SERVICES: dict[str, Any] = {
    "takes": _take,
    "takes in time": _take,
    "tries to take": _take,
    "gives back": _give_back,
    "makes a lock": _make_lock,
    "reads": _read,
    "reads by itself": _read,
    "writes": _write,
    "writes by itself": _write,
    "adds to": _add,
    "appends": _append,
    "takes the first": _take_first,
    "looks at": _look_at,
    "futex": _futex,
    "is": lambda world, rank, choice: rank,
}
CHOICES: dict[str, Any] = {"takes": _may_take, "takes in time": _may_take, "futex": _may_wake}
AFTER = True
INTERRUPTED = {
    "takes": not AFTER,
    "takes in time": not AFTER,
    "tries to take": AFTER,
    "gives back": AFTER,
    "appends": AFTER,
    "takes the first": AFTER,
}
"""Python looks for signals when a function has returned, and a thread that waits for a lock is woken by them.
Between the call of a lock's ``__enter__`` and the first line of the block it does not look."""
AT_ONCE = frozenset({"makes a lock", "reads by itself", "writes by itself", "is"})
