"""Find the rank of the calling thread, where ranks are threads of one process.

A context variable tells it. Three kinds of threads run for a rank without being it:

* threads of the group itself: they are started in a copy of the context;
* threads that the rank starts: Python hands a context on by itself only where asked to (from 3.14), so while
  there are thread ranks ``threading.Thread.start`` does it for them;
* threads of autograd: a rank's backward runs on the thread that calls it (torch's own switch).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from torchestra.store import Store


@dataclass(eq=False)
class ThreadRank:
    """A rank that is a thread.

    Attributes:
        rank, size, store: its number, how many there are, and the store they share.
        thread: the one that the rank's program runs in: while it lives the rank does.
        world, worker: the rank's registry of groups and its RPC worker, if any; of layers above this one.
        host: which host it pretends to be on; ranks with different ones share no memory. Empty: this one.
        groups: the groups that it has made, as long as they exist.
    """

    rank: int
    size: int
    store: Store
    thread: threading.Thread
    world: object
    host: str = ""
    worker: Any = None
    groups: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)


_here: ContextVar[ThreadRank | None] = ContextVar("torchestra_thread_rank", default=None)


current_thread_rank: Callable[[], ThreadRank | None] = _here.get
"""Return which rank the calling thread belongs to, or None where ranks are processes."""


class _Seen(threading.local):
    """What the context variable says, as torch.compile can see and guard it: an attribute of the thread."""

    rank: ThreadRank | None = None


seen = _Seen()
"""What code that torch.compile traces reads instead of the context variable."""


def is_seen() -> bool:
    """Return whether it says the same: not so in threads that were started in a copy of a context."""
    return seen.rank is _here.get()


is_seen._dynamo_marked_constant = True  # type: ignore[attr-defined]


def leave_thread_rank() -> None:
    """Detach the calling thread from its rank, in a process that was forked from a rank that is a thread."""
    _here.set(None)
    seen.rank = None


@contextlib.contextmanager
def being_thread_rank(rank: ThreadRank) -> Iterator[None]:
    """Make the calling thread this rank while the block runs; threads started inside belong to it."""
    token, outer = _here.set(rank), seen.rank
    seen.rank = rank
    try:
        with _inherited, torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        seen.rank = outer
        _here.reset(token)


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
        here = _here.get()
        if here is not None:
            run = thread.run

            def run_for_rank() -> None:
                _here.set(here)
                seen.rank = here
                try:
                    run()
                finally:
                    # It refers to the thread, which would refer to it.
                    del thread.__dict__["run"]

            thread.__dict__["run"] = run_for_rank
        plain_start(thread)

    return start


_inherited = _Inheritance()
