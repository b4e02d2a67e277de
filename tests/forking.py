"""Running part of a test in a forked child: milliseconds, where a new interpreter takes seconds."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1
_context = multiprocessing.get_context("fork")


class Child:
    """A forked process that calls ``work`` and ends as processes of multiprocessing end."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._end, other = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_run, args=(work, other, os.getpid()))
        with warnings.catch_warnings():
            # Python warns of forks in processes with threads; the children use none of theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        other.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def result(self) -> Any:
        """Return what ``work`` returned; an AssertionError with its traceback if it raised."""
        try:
            good, value = self._end.recv()
        except EOFError:
            good, value = False, "it was killed"
        self._end.close()
        self._process.join()
        assert good, f"in the child: {value}"
        return value

    def kill(self) -> None:
        """Kills it and waits for its end."""
        self._process.kill()
        self._process.join()
        self._end.close()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this forked process when the thread ends that has forked it.

    It has inherited its parent's pipes, xdist's among them: while it lives, pytest does not learn that the
    parent has crashed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run(work: Callable[[], Any], end: Connection, parent: int) -> None:
    die_with_parent(parent)
    try:
        outcome = (True, work())
    except BaseException:
        outcome = (False, traceback.format_exc())
    end.send(outcome)
    end.close()
