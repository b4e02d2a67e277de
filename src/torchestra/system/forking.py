"""The fate of a rank's groups, connections and workers in a process that is forked from it.

A forked child has all of its parent's memory, including the groups' shared memory and the parent's place
in it. It is not that rank, though: were it to take part, the parent's next operation would find its place
taken. So every object that acts for the rank is told so in the child, before any of the program runs there,
and refuses to work from then on. That costs the operations of the rank itself nothing.

In the child none of the parent's other threads exist, and what they had locked stays locked:
:meth:`Forgettable.forget` takes no lock that another thread may have had.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from torchestra.errors import ForkedProcessError


class Forgettable(Protocol):
    """An object that acts for the rank."""

    def forget(self) -> None:
        """Let go of the parent's resources, in a forked child, without telling anybody. Must not raise."""


_held: weakref.WeakSet[Forgettable] = weakref.WeakSet()
_forks = 0


def forget_in_children(holder: Forgettable) -> None:
    """Call ``holder.forget()`` in every child forked from now on, as long as the holder exists."""
    _held.add(holder)


def forks_so_far() -> int:
    """Return how many forks lie between the process that imported this and the calling one."""
    return _forks


def refusal(what: str) -> ForkedProcessError:
    """Return the error for ``what``, which only the parent may do."""
    return ForkedProcessError(
        f"{what} in process {os.getpid()}, which was forked from this rank later on and is no rank itself:"
        " call it in the rank only, or init_process_group() here for a world of this process's own"
    )


def _forget_all() -> None:
    global _forks
    _forks += 1
    for holder in list(_held):
        holder.forget()


os.register_at_fork(after_in_child=_forget_all)
