"""Running part of a test in a forked child: milliseconds, where a new interpreter takes seconds."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1


class Child:
    """A forked process that calls ``work`` and ends, without running anything else of the test session."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._end, other = os.pipe()
        with warnings.catch_warnings():
            # Python warns of forks in processes with threads; the children use none of theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            # Should the test session be killed, so is the child.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            try:
                os.close(self._end)
                outcome = (True, work())
            except BaseException:
                outcome = (False, traceback.format_exc())
            try:
                os.write(other, pickle.dumps(outcome))
            finally:
                os._exit(0)
        os.close(other)

    def result(self) -> Any:
        """What ``work`` returned; an AssertionError with its traceback if it raised."""
        with os.fdopen(self._end, "rb") as file:
            data = file.read()
        os.waitpid(self.pid, 0)
        assert data, "the child was killed"
        good, value = pickle.loads(data)
        assert good, f"in the child: {value}"
        return value

    def kill(self) -> None:
        """Kills it and waits for its end."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._end)
