"""An event loop: one ``select`` that waits for readable files, times, and calls from other threads."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable


class EventLoop:
    """Calls functions in the thread that runs it.

    Attributes:
        wakeup_fd: anything written to it wakes the loop; for ``signal.set_wakeup_fd``.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []  # a heap
        self._timer_ids = itertools.count()
        self._soon: deque[Callable[[], object]] = deque()
        self._wake_end, self.wakeup_fd = os.pipe()
        os.set_blocking(self._wake_end, False)
        os.set_blocking(self.wakeup_fd, False)
        # Held to write to the pipe or to close it, as different threads do.
        self._pipe_lock = threading.Lock()
        self._closed = False
        self.watch(self._wake_end, lambda: os.read(self._wake_end, 4096))

    def watch(self, file: int | socket.socket, when_readable: Callable[[], object]) -> None:
        """Call a function whenever ``file`` can be read."""
        self._selector.register(file, selectors.EVENT_READ, when_readable)

    def unwatch(self, file: int | socket.socket) -> None:
        """Undo :meth:`watch`."""
        self._selector.unregister(file)

    def call_at(self, when: float, function: Callable[[], object]) -> None:
        """Call a function once ``time.monotonic()`` reaches ``when``."""
        heapq.heappush(self._timers, (when, next(self._timer_ids), function))

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function when the loop next runs; for callers on its thread or in a signal handler."""
        self._soon.append(function)

    def call_soon_threadsafe(self, function: Callable[[], object]) -> None:
        """Wake the loop to call a function; for callers on any thread, even after the loop was closed."""
        self._soon.append(function)
        with self._pipe_lock, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.write(self.wakeup_fd, b"!")

    def run_once(self, until: float = math.inf) -> None:
        """Wait for something to do, at most until a ``time.monotonic()``, and do all that is due."""
        first = min(until, self._timers[0][0]) if self._timers else until
        pause = None if first == math.inf else max(0.0, first - time.monotonic())
        for key, _ in self._selector.select(pause):
            key.data()
        while self._soon:
            self._soon.popleft()()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def close(self) -> None:
        """Close the loop's own files; those that it watches belong to their owners."""
        with self._pipe_lock:
            if not self._closed:
                self._closed = True
                self._selector.close()
                os.close(self._wake_end)
                os.close(self.wakeup_fd)
