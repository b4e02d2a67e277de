"""The frames of all threads, without a garbage collection while the interpreter finds them.

It holds a lock of its own meanwhile, which each thread that starts or ends takes as well, with the
interpreter's lock in hand. A finaliser that a collection runs there, and that lets go of the interpreter's
lock, may so never get it back: the whole process stands still (CPython's issue 106883; 3.11.7 has it).
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

# Else one thread might allow collections while another still looks. A finaliser may look, too.
_looking = threading.RLock()


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by its identifier."""
    return _without_collections(sys._current_frames)


def current_exceptions() -> dict[int, Any]:
    """Return what each thread handles, by its identifier, as ``sys._current_exceptions()`` has it."""
    return _without_collections(sys._current_exceptions)


def _without_collections(look: Callable[[], T]) -> T:
    with _looking:
        collects = gc.isenabled()
        try:
            gc.disable()
            return look()
        finally:
            if collects:
                gc.enable()


def _renew_lock() -> None:
    """Replace the lock in a forked child, where a thread that does not exist may have it."""
    global _looking
    _looking = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
