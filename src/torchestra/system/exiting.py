"""The end of the interpreter, for daemon threads that run functions of others.

A daemon that wants the interpreter's lock while the interpreter ends is ended inside of the function that
asks for it, and C++ code that is left so, torch's for one, takes the whole process down: "terminate called
without an active exception", or "Fatal Python error: PyThreadState_Get". So such threads have to be over
before. One that waits for ever, in C or C++, asks for nothing, and does no harm.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
import weakref
from collections.abc import Collection
from typing import Protocol

_PATIENCE_SECONDS = 0.25
_EXIT_SECONDS = 1.0

_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)


class ThreadPool(Protocol):
    """Has threads that may run functions of others at exit."""

    def running(self) -> Collection[threading.Thread]:
        """Return the threads that run one now."""


_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


def ends_at_exit(pool: ThreadPool) -> None:
    """Have the functions that a pool's threads run be over when the interpreter ends."""
    _pools.add(pool)


@atexit.register
def end_running_functions(patience_s: float = _PATIENCE_SECONDS, timeout_s: float = _EXIT_SECONDS) -> None:
    """Wait until no thread runs a function of others.

    Args:
        patience_s: for how many seconds functions may go on; those that are not over then are left by
            SystemExit, at their next step in Python.
        timeout_s: how long this waits for that: a function may be inside of a call that takes longer.
    """
    began = time.monotonic()
    for until, ends in ((began + patience_s, False), (began + patience_s + timeout_s, True)):
        threads = [thread for pool in tuple(_pools) for thread in pool.running()]
        for thread in threads:
            if ends and thread.is_alive() and thread.ident is not None:
                _set_exception(thread.ident, SystemExit)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
