"""A group's communicator, made on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torchestra.communicator.communicator import Communicator
from torchestra.engine.hosts import Hosts
from torchestra.errors import GroupDestroyedError
from torchestra.system.forking import forget_in_children, refusal

Meet = Callable[[float], Communicator]
"""Meets the other members of a group, which must all come within the given number of seconds."""


class LazyCommunicator:
    """Stand in for a communicator until one of its operations is called.

    The members then meet, as that operation requires anyway. So making the group waits for no other rank, and
    a group that is never used costs nothing.

    Attributes:
        rank, size, name, timeout_s, closed, has_met: as for a communicator.
        replace: called with the communicator as soon as there is one.
    """

    has_met = False

    def __init__(self, rank: int, size: int, name: str, timeout_s: float, meet: Meet) -> None:
        self.rank = rank
        self.size = size
        self.name = name
        self.timeout_s = timeout_s
        self.closed = False
        self.replace: Callable[[Communicator], None] = lambda _: None
        self._meet = meet
        self._made: Communicator | None = None
        self._lock = threading.Lock()
        self._inherited = False
        forget_in_children(self)

    def forget(self) -> None:
        """Refuse to meet in a forked child, which is not part of the group."""
        self._lock = threading.Lock()
        self.closed = self._inherited = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.met(), name)

    def met(self, *, once: bool = False) -> Communicator:
        """Return the communicator; meet the other members first if they have not met.

        Args:
            once: the group is closed if this fails; otherwise, its next operation tries again.
        """
        with self._lock:
            if self._made is None:
                if self._inherited:
                    raise refusal(f"group {self.name!r} of rank {self.rank} cannot be used")
                if self.closed:
                    raise GroupDestroyedError(f"rank {self.rank} has destroyed group {self.name!r}")
                try:
                    self._made = self._meet(self.timeout_s)
                except BaseException:
                    self.closed = once
                    raise
                self.replace(self._made)
            return self._made

    def hosts_among(self, ranks: Sequence[int]) -> Hosts:
        """Return one host: where the members are is found when they meet."""
        return Hosts([[0]], [""]) if self._made is None else self._made.hosts_among(ranks)

    def abort(self, why: str, failed: Sequence[int] = ()) -> None:
        """Abort the group, if its members have met; before, no operation is under way."""
        if self._made is not None:
            self._made.abort(why, failed)

    def close(self) -> None:
        """Leave the group, if its members have met."""
        with self._lock:
            self.closed = True
            if self._made is not None:
                self._made.close()
