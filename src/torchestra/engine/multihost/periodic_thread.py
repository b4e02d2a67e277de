"""A thread that checks requests, so that those without a waiting thread meet their deadlines too."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

from torchestra.system.limits import start_thread


class PeriodicThread:
    """Call a function in a thread, repeatedly; the first :meth:`start` starts the thread.

    Args:
        name: of the thread.
        call: returns after how many seconds to call it again.
    """

    def __init__(self, name: str, call: Callable[[], float]) -> None:
        self._name = name
        self._call = call
        self._ended = threading.Event()
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def has_ended(self) -> bool:
        """Return whether :meth:`end` has been called."""
        return self._ended.is_set()

    def start(self) -> None:
        """Start the thread, if it has not been."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    # In the context of the rank that makes it, so that callbacks know which rank they are of.
                    run = contextvars.copy_context().run
                    self._thread = threading.Thread(
                        target=run, args=(self._run,), name=self._name, daemon=True
                    )
                    start_thread(self._thread)

    def wake(self) -> None:
        """Make the thread look now."""
        self._woken.set()

    def end(self) -> None:
        """Make the thread end."""
        self._ended.set()
        self._woken.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._woken.wait(self._call())
            self._woken.clear()
