"""Asynchronous operations: one thread per group and rank runs them in the program's order."""

from __future__ import annotations

import atexit
import contextvars
import queue
import threading
import weakref
from collections.abc import Callable

Task = Callable[[Callable[[], None]], None]
"""A task is handed a function, and calls it once, when it is over but for telling whoever waits for it."""


_EXIT_SECONDS = 0.5
_started: weakref.WeakSet[ProgressThread] = weakref.WeakSet()


def let_tasks_end(seconds: float = _EXIT_SECONDS) -> None:
    """At exit: wait for tasks that are about to end, at most so long for each group.

    A daemon that is inside torch's C++ code while the interpreter ends may take the process down with
    "terminate called without an active exception".
    """
    for each in tuple(_started):
        if each.pending:
            each.drain(seconds)


atexit.register(let_tasks_end)


class ProgressThread:
    """Runs tasks one after the other. The thread is started by the first task and is a daemon."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.pending = 0
        """How many tasks have been submitted and are not over. Read without a lock: it is 0
        only when nothing that this thread submitted is still to run."""

    def submit(self, task: Task) -> None:
        """Queue a task. It must not raise."""
        with self._lock:
            self.pending += 1
            if self._thread is None:
                # In the submitter's context, so that callbacks know which rank they are of.
                run = contextvars.copy_context().run
                self._thread = threading.Thread(target=run, args=(self._run,), name=self._name, daemon=True)
                self._thread.start()
                _started.add(self)
        self._tasks.put(task)

    def hold(self) -> None:
        """Count something as pending that is not queued, until :meth:`release`."""
        with self._lock:
            self.pending += 1

    def release(self) -> None:
        """Undo :meth:`hold`."""
        with self._lock:
            self.pending -= 1

    def is_current(self) -> bool:
        """Whether the calling thread is this one: a task, or a callback of one, is what calls."""
        return self._thread is threading.current_thread()

    def drain(self, seconds: float) -> None:
        """Wait until what was submitted so far has ended and been told, at most ``seconds``."""
        if self._thread is None or not self._thread.is_alive() or self.is_current():
            return
        ended = threading.Event()

        def end(let_go: Callable[[], None]) -> None:
            let_go()
            ended.set()

        self.submit(end)
        ended.wait(seconds)

    def close(self, seconds: float) -> None:
        """Let what is queued end, and the thread with it; wait for that at most ``seconds``."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._tasks.put(None)
            self._thread.join(seconds)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task(self._let_go)
            del task

    def _let_go(self) -> None:
        with self._lock:
            self.pending -= 1
