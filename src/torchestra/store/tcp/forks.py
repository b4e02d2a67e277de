"""After a fork the child lets go of the sockets it inherited, so that parent and child share none."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["forget_in_children"]


class Forgettable(Protocol):
    """Something that holds sockets."""

    def forget(self) -> None:
        """Closes the sockets of a forked child without a word to the other side; called in the child."""


_held: weakref.WeakSet[Forgettable] = weakref.WeakSet()
_hooked = False


def forget_in_children(holder: Forgettable) -> None:
    """Has ``holder.forget()`` called in every child forked from now on, for as long as it exists."""
    global _hooked
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_forget_all)
    _held.add(holder)


def _forget_all() -> None:
    for holder in list(_held):
        holder.forget()
