"""The groups that a rank has, for those that are not in its registry: so they are found by name, too.

Groups that are made directly, and those split off from them, are in no registry. But operators, also those of
compiled programs, get a group's name only.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torchestra.engine.thread_ranks import ThreadRank, current_thread_rank

_lock = threading.Lock()
_made: list[tuple[weakref.ref[Any], weakref.ref[ThreadRank] | None]] = []


def remember(group: Any) -> None:
    """Have a group of the calling rank found by its name, as long as it exists."""
    here = current_thread_rank()
    with _lock:
        _made[:] = [each for each in _made if each[0]() is not None]
        _made.append((weakref.ref(group), None if here is None else weakref.ref(here)))


def existing_groups(name: str) -> list[Any]:
    """Return the groups of the calling rank that have a name, and that it has not left."""
    here = current_thread_rank()
    with _lock:
        mine = [group() for group, rank in _made if (None if rank is None else rank()) is here]
    known = [group for group in mine if group is not None and not group.communicator.closed]
    return [group for group in known if group.group_name == name]
