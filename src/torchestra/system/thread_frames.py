"""The frames of all threads, without a garbage collection while somebody looks at them.

The interpreter holds a lock of its own while it finds them, which each thread that starts or ends takes as
well, with the interpreter's lock in hand. A finaliser that a collection runs there, and that lets go of the
interpreter's lock, may so never get it back: the whole process stands still (CPython's issue 106883; 3.11.7
has it).

Python 3.11 makes the object of a frame when somebody asks for it, by ``f_back``, and may collect garbage for
that. A finaliser that lets go of the interpreter's lock there lets the frame's thread return from it: then
the object describes memory that other frames use by now, and the process crashes, or walks on for ever. So
whoever walks outwards from a frame of another thread does it in :func:`without_collections`.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Else one thread might allow collections while another still looks. A finaliser may look, too.
_looking = threading.RLock()
_turned_off = False


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by its identifier."""
    with without_collections():
        return sys._current_frames()


def current_exceptions() -> dict[int, Any]:
    """Return what each thread handles, by its identifier, as ``sys._current_exceptions()`` has it."""
    with without_collections():
        return sys._current_exceptions()


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage while the block runs, on any thread; such blocks of several threads run in turn."""
    global _turned_off
    with _looking:
        collects = gc.isenabled()
        try:
            _turned_off = _turned_off or collects
            gc.disable()
            yield
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
