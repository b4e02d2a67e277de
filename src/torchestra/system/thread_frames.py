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
_turned_off = False


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by its identifier."""
    return _without_collections(sys._current_frames)


def current_exceptions() -> dict[int, Any]:
    """Return what each thread handles, by its identifier, as ``sys._current_exceptions()`` has it."""
    return _without_collections(sys._current_exceptions)


def _without_collections(look: Callable[[], T]) -> T:
    global _turned_off
    with _looking:
        collects = gc.isenabled()
        try:
            _turned_off = collects
            gc.disable()
            return look()
        finally:
            if collects:
                gc.enable()
                _turned_off = False


def _begin_anew() -> None:
    """Undo in a forked child what a thread has begun that does not exist there."""
    global _looking, _turned_off
    _looking = threading.RLock()
    if _turned_off:
        gc.enable()
        _turned_off = False


os.register_at_fork(after_in_child=_begin_anew)
