"""What a worker holds of a reference: the value itself, or a fork of it (see rref_context.py)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch.futures import Future

from torchestra.errors import RpcError

if TYPE_CHECKING:
    from torchestra.rpc.headers import Inbound

Number = tuple[int, int]
"""Of a reference or a fork: the rank of the worker that made it up, and how many it had made up before."""


def told(number: Number) -> str:
    """A number, as messages tell it."""
    return f"GloballyUniqueId(created_on={number[0]}, local_id={number[1]})"


_settling = threading.Lock()


class Entry:
    """A value at its owner.

    Attributes:
        number: of the reference.
        future: the value, when it is there.
        forks: the ranks that hold them.
        handles: how many references there are on this worker.
        created: whether the call that makes the value has come.
        settled: whether the future is done, or is just being made so.
        error: why it was given up, where the time of the call that makes the value was over.
    """

    __slots__ = ("created", "error", "forks", "future", "handles", "number", "settled")

    def __init__(self, number: Number) -> None:
        self.number = number
        self.future: Future[Any] = Future()
        self.forks: dict[Number, int] = {}
        self.handles = 0
        self.created = False
        self.settled = False
        self.error: Exception | None = None

    def set(self, value: Any) -> None:
        """The value is there; of no use any more if it was given up."""
        if self._settles():
            self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """There will be no value."""
        if not isinstance(error, Exception):
            error = RpcError(f"{type(error).__name__}: {error}")
        if self._settles():
            self.future.set_exception(error)

    def _settles(self) -> bool:
        """Whether this is the first to settle it: its value may come while its caller gives it up."""
        with _settling:
            first, self.settled = not self.settled, True
        return first


class User:
    """A reference to a value elsewhere.

    Attributes:
        reference, fork: their numbers.
        owner: the rank that has the value.
        confirmed: the owner lists the fork.
        dropped: nobody here refers to it any more.
        error: why there is no value, where the call that creates it failed.
        created: at its creator, the answer of the call that makes the value.
        inbound: the message that it came with, while it is not confirmed.
    """

    __slots__ = (
        "confirmed",
        "created",
        "dropped",
        "error",
        "fork",
        "inbound",
        "owner",
        "reference",
        "released",
    )

    def __init__(self, reference: Number, fork: Number, owner: int, confirmed: bool) -> None:
        self.reference = reference
        self.fork = fork
        self.owner = owner
        self.confirmed = confirmed
        self.dropped = False
        self.released = False
        self.error: Exception | None = None
        self.created: Future[Any] | None = None
        self.inbound: Inbound | None = None
