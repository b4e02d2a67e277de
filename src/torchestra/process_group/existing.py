"""The groups that a rank has, for those that are not in its registry: so they are found by name, too.

Groups that are made directly, and those split off from them, are in no registry. But operators, also those of
compiled programs, get a group's name only.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torchestra.engine.thread_ranks import current_thread_rank

_lock = threading.Lock()
_of_process: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those of a rank that is a process; a rank that is a thread has its own."""


def remember(group: Any) -> None:
    """Have a group of the calling rank found by its name, as long as it exists."""
    with _lock:
        _of_caller().add(group)


def existing_groups(name: str) -> list[Any]:
    """Return the groups of the calling rank that have a name, and that it has not left."""
    with _lock:
        mine = list(_of_caller())
    return [group for group in mine if not group.communicator.closed and group.group_name == name]


def _of_caller() -> weakref.WeakSet[Any]:
    here = current_thread_rank()
    return _of_process if here is None else here.groups
