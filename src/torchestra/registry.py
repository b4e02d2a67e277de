"""Which groups a rank has, by name and by tag, and which rank the calling thread belongs to.

A process that is a rank has one :class:`World`. Where ranks are threads each has its own, and the thread
finds it in a context variable. Three kinds of threads run for a rank without being it:

* threads of the group itself: they are started in a copy of the context;
* threads that the rank starts: Python hands a context on by itself only where asked to (from 3.14), so while
  there are thread ranks ``threading.Thread.start`` does it for them;
* threads of autograd: a rank's backward runs on the thread that calls it (torch's own switch).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from torchestra.errors import NotInitializedError
from torchestra.process_group import ProcessGroup
from torchestra.store import Store

_BY_NAME = "name:"
_SHORT = 16


@dataclass
class World:
    """What one rank knows: its groups, and how many it has made.

    A *tag* tells groups of the same ranks apart: there is one group per tag and set of ranks. The tag of a
    group that was given none is made from its name, so that tag and ranks find every group again.

    Attributes:
        default: the default group.
        groups: by name, in the order in which they were made.
        made: how many groups all ranks have made together.
        made_locally: the same for groups that only their members made, by :func:`label` of the ranks.
        thread: the one that the rank's program runs in: while it lives the rank does.
    """

    default: ProcessGroup | None = None
    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    made: int = 0
    made_locally: dict[str, int] = field(default_factory=dict)
    thread: threading.Thread | None = None
    _tags: dict[str, str] = field(default_factory=dict)

    def add(self, group: ProcessGroup, tag: str = "") -> None:
        """Enter a new group, under a tag if it has one."""
        self.groups[group.group_name] = group
        if tag:
            self._tags[group.group_name] = tag

    def remove(self, group: ProcessGroup) -> None:
        """Forget a group."""
        del self.groups[group.group_name]
        self._tags.pop(group.group_name, None)

    def close(self) -> None:
        """Destroy all groups, the last first, and forget them."""
        for each in reversed(list(self.groups.values())):
            each.destroy()
        self.groups.clear()
        self._tags.clear()
        self.default = None
        self.made = 0
        self.made_locally.clear()

    def group(self, name: str) -> ProcessGroup:
        """The group of a name.

        Raises:
            NotInitializedError: this rank has none of that name.
        """
        found = self.groups.get(name)
        if found is None:
            raise NotInitializedError(
                f"Could not resolve the process group registered under the name {name!r}: this rank has"
                f" {', '.join(map(repr, self.groups)) or 'no groups'}. (A thread that was not started by"
                " threading.Thread must be given the context of the rank that it works for.)"
            )
        return found

    def tag_of(self, group: ProcessGroup) -> str:
        """The tag of a group; one made from its name where it was given none."""
        return self._tags.get(group.group_name, _BY_NAME + group.group_name)

    def find(self, ranks: Sequence[int], tag: str = "") -> ProcessGroup | None:
        """The group of these global ranks, in any order, that has the tag; without a tag, the first that
        was given none. None if there is none.
        """
        if tag.startswith(_BY_NAME):
            candidates = [group for group in (self.groups.get(tag[len(_BY_NAME) :]),) if group is not None]
        else:
            candidates = [
                group for group in self.groups.values() if self._tags.get(group.group_name, "") == tag
            ]
        return next((group for group in candidates if _same_ranks(group.ranks, ranks)), None)


def _same_ranks(first: Sequence[int], second: Sequence[int]) -> bool:
    return len(first) == len(second) and (first == second or set(first) == set(second))


def compact(ranks: Sequence[int]) -> Sequence[int]:
    """The same ranks as a range if they are evenly spaced, else as a tuple."""
    if isinstance(ranks, range):
        return ranks
    given = tuple(ranks)
    step = given[1] - given[0] if len(given) > 1 else 1
    if not step:
        return given
    spaced = range(given[0], given[-1] + (1 if step > 0 else -1), step) if given else range(0)
    return spaced if len(spaced) == len(given) and tuple(spaced) == given else given


def label(ranks: Sequence[int]) -> str:
    """A short text for some ranks, in this order, that no others have."""
    if len(ranks) <= _SHORT:
        return "-".join(map(str, ranks))
    spaced = compact(ranks)
    if isinstance(spaced, range):
        return f"{spaced[0]}-to-{spaced[-1]}-by-{spaced.step}"
    return hashlib.sha256(repr(spaced).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class ThreadRank:
    """A rank that is a thread: its number, how many there are, and the store they share."""

    rank: int
    size: int
    store: Store


_process_world = World()
_thread: ContextVar[tuple[World, ThreadRank] | None] = ContextVar("torchestra_thread_rank", default=None)


def current_world() -> World:
    """The registry of the rank that the calling thread belongs to."""
    here = _thread.get()
    return _process_world if here is None else here[0]


def current_thread_rank() -> ThreadRank | None:
    """Which rank the calling thread belongs to, where ranks are threads."""
    here = _thread.get()
    return None if here is None else here[1]


@contextlib.contextmanager
def thread_rank(rank: int, size: int, store: Store) -> Iterator[None]:
    """Make the calling thread rank ``rank`` of ``size`` while the block runs.

    Inside, ``init_process_group()`` without arguments joins the other threads that use the same
    ``store`` object; groups that the block leaves open are destroyed at its end. Threads that are started
    inside belong to the rank as well.
    """
    world = World(thread=threading.current_thread())
    token = _thread.set((world, ThreadRank(rank, size, store)))
    try:
        with _inherited, torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        try:
            world.close()
        finally:
            _thread.reset(token)


class _Inheritance:
    """While anybody is inside, threads belong to the rank whose thread starts them."""

    def __init__(self) -> None:
        self._inside = 0
        self._lock = threading.Lock()
        self._start = threading.Thread.start

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1 and not getattr(sys.flags, "thread_inherit_context", False):
                self._start = threading.Thread.start
                setattr(threading.Thread, "start", _start_for_rank(self._start))  # noqa: B010

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and getattr(threading.Thread.start, "__wrapped__", None) is self._start:
                setattr(threading.Thread, "start", self._start)  # noqa: B010


def _start_for_rank(plain_start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @functools.wraps(plain_start)
    def start(thread: threading.Thread) -> None:
        here = _thread.get()
        if here is not None:
            run = thread.run

            def run_for_rank() -> None:
                _thread.set(here)
                try:
                    run()
                finally:
                    # It holds the thread, which would hold it.
                    del thread.__dict__["run"]

            thread.__dict__["run"] = run_for_rank
        plain_start(thread)

    return start


_inherited = _Inheritance()
