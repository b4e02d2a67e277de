"""A worker's part of a remote reference: the value itself, or a fork of it (see rref_context.py)."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.futures import Future

from torchestra.errors import RpcError
from torchestra.system.kept_errors import fail_future

GlobalId = tuple[int, int]
"""The number of a reference or a fork: its creator's rank, and how many that had created before."""


def id_text(global_id: GlobalId) -> str:
    """Return a number as messages show it."""
    return f"GloballyUniqueId(created_on={global_id[0]}, local_id={global_id[1]})"


_settling = threading.Lock()


@dataclass(slots=True, eq=False)
class OwnerRRef:
    """A value at its owner.

    Attributes:
        rref_id: the number of the reference.
        future: the value, when it is there.
        forks: the ranks that hold the forks.
        handles: how many references there are on this worker.
        created: whether the call that makes the value has come.
        settled: whether the future is done, or is just being made so.
        error: why it was given up, where the call that makes the value took too long; a copy of it is raised.
    """

    rref_id: GlobalId
    future: Future[Any] = field(default_factory=Future)
    forks: dict[GlobalId, int] = field(default_factory=dict)
    handles: int = 0
    created: bool = False
    settled: bool = False
    error: BaseException | None = None

    def set(self, value: Any) -> None:
        """Set the value, unless it was given up."""
        if self._settles():
            self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Set an error in place of the value."""
        if not isinstance(error, Exception):
            error = RpcError(f"{type(error).__name__}: {error}")
        if self._settles():
            fail_future(self.future, error)

    def _settles(self) -> bool:
        """Return whether this call settles it first: its value may come while its caller gives it up."""
        with _settling:
            first, self.settled = not self.settled, True
        return first


class Confirmable(Protocol):
    """A message that waits until the references within are confirmed."""

    def confirmed_one(self) -> None:
        """Note that one of them is confirmed, or never will be."""


@dataclass(slots=True, eq=False)
class UserRRef:
    """A reference to a value on another worker.

    Attributes:
        rref_id, fork_id: their numbers.
        owner: the rank that has the value.
        confirmed: the owner lists the fork.
        dropped: nobody here refers to it any more.
        released: the owner was asked to remove the fork, or need not be.
        error: why there is no value, where the call that creates it failed; a copy of it is raised.
        created: at its creator, the answer of the call that makes the value.
        incoming: the message that it came with, while it is not confirmed.
        is_asked: the owner was asked to list the fork.
    """

    rref_id: GlobalId
    fork_id: GlobalId
    owner: int
    confirmed: bool
    dropped: bool = False
    released: bool = False
    error: BaseException | None = None
    created: Future[Any] | None = None
    incoming: Confirmable | None = None
    is_asked: bool = False
