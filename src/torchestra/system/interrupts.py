"""Ctrl-C for commands that go on until it comes, and that must not miss it.

What a signal's handler raises while Python runs a finalizer, a weak reference's callback or another function
that cannot fail is printed ("Exception ignored in ...") and lost. So the handler notes the interrupt as well,
and whoever waits for the next round finds it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import HasFileno


class Interrupts:
    """Notes SIGINT as long as the block lasts, in the main thread; other threads get none.

    Args:
        raising: raise KeyboardInterrupt where it comes, too, so that it ends waits of other code. If not,
            what is under way is finished, and :meth:`wait` returns at once.

    Attributes:
        came: whether there was one.
    """

    def __init__(self, *, raising: bool = True) -> None:
        self._raising = raising
        self._former: Callable[[int, FrameType | None], Any] | int | None = None
        self.came = False

    def __enter__(self) -> Interrupts:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A shell has the programs of its background ignore it.
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) != signal.SIG_IGN
        ):
            self._former = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)
        os.close(self._event)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._event, 1)
        if self._raising:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was an interrupt, whatever became of it."""
        if self.came:
            raise KeyboardInterrupt

    def wait(self, timeout_s: float | None, *files: int | HasFileno) -> bool:
        """Wait until a file is readable, or an interrupt comes; return whether a file is.

        Args:
            timeout_s: for how many seconds; None for as long as it takes.

        Raises:
            KeyboardInterrupt: there was one, and this is to raise it.
        """
        if self._raising:
            self.check()
        poll = select.poll()
        for file in (self._event, *files):
            poll.register(file, select.POLLIN)
        ready = poll.poll(None if timeout_s is None else 1000 * timeout_s)
        if self._raising:
            self.check()
        return any(descriptor != self._event for descriptor, _ in ready)
