"""How a tool that starts jobs ends: it takes them with it, whatever signal ends it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # a forked child loads nothing


def dying_with_this(signum: int) -> Callable[[], None]:
    """Return what a new process calls for the kernel to send it a signal when this thread ends."""
    parent = os.getpid()

    def begin() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:
            os._exit(1)

    return begin


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Within the block, exit on signals that would end this process at once, so that it cleans up."""
    ending = (signal.SIGTERM, signal.SIGHUP)
    former = {signum: signal.signal(signum, _leave) for signum in ending}
    try:
        yield
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)
