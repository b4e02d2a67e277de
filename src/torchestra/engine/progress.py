"""Asynchronous operations: they run in the program's order, on a thread of the group or on one that waits.

The protocol. Tasks stand in a queue, in the order in which they were submitted. The thread that has the
*turn*, a lock, runs the first of them, which leaves the queue when it is over. The invariant: **a task is
begun only by the thread that has the turn, as the first in the queue, and is over before the turn is given
back.** So tasks neither overlap nor pass each other, whoever runs them, and a task that is not begun is still
in the queue.

Two kinds of threads take the turn. The group's own thread waits for it when a task has stood for a while, and
then runs tasks until none is left; so every task is run, whether somebody waits for it or not. A thread that
waits for a task takes the turn if it is free, and runs tasks up to the one it waits for: handing a small
operation over to another thread and back takes twenty times as long as the operation. If the turn is taken
it just waits for the end of its task. So a thread that waits for the turn holds nothing that a task could
need, and the thread that has it waits for other ranks only: the two cannot block each other. (A thread on
which a torch mode is active, such as a tracer's, does not help: queue.py.)

Tasks that are *bound* (their operation has a future, whose callbacks may do anything) are run by the group's
thread only, and without delay.
"""

from __future__ import annotations

import atexit
import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchestra.engine.entry_layout import State
from torchestra.engine.kernels import doorbell
from torchestra.system.exiting import ends_at_exit
from torchestra.system.limits import start_thread

Dequeue = Callable[[], None]


class Task(Protocol):
    """Something to run once.

    Attributes:
        ran: whether it has been begun.
        interrupt: the KeyboardInterrupt, or another BaseException that is no ``Exception``, that it was left
            with.
    """

    ran: bool
    interrupt: BaseException | None

    def __call__(self, dequeue: Dequeue) -> None:
        """Run; call ``dequeue`` when all is done but telling the threads that wait; raise nothing.

        On a thread that handles signals an interrupt may be raised all the same, between any two lines. Then
        it is called again if it had begun, and must do the rest.
        """

    def is_bound(self) -> bool:
        """Return whether only the group's thread may run it."""

    def is_in_callbacks(self) -> bool:
        """Return whether its operation is over, and what remains are callbacks, which may do anything."""


_EXIT_SECONDS = 0.5
_GRACE_SECONDS = 100e-6
_started: weakref.WeakSet[ProgressThread] = weakref.WeakSet()


def await_running_tasks(seconds: float = _EXIT_SECONDS) -> None:
    """At exit, wait for tasks that are about to end, at most ``seconds`` for each group.

    A daemon that is inside torch's C++ code while the interpreter ends may take the process down with
    "terminate called without an active exception".
    """
    for each in tuple(_started):
        if each.pending:
            each.drain(seconds)


atexit.register(await_running_tasks)


class ProgressThread:
    """Run tasks one after the other. The thread is started by the first task and is a daemon.

    Args:
        name: of the thread.
        grace: for how many seconds a task may stand in the queue that another thread might come to wait for,
            and so run.
        state: is told how many tasks are pending.
        depth: an array of one word, which is told how many tasks were submitted and are not begun.
    """

    def __init__(
        self,
        name: str,
        grace: float = _GRACE_SECONDS,
        state: State | None = None,
        depth: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._depth = np.zeros(1, dtype=np.int64) if depth is None else depth
        self._state = State() if state is None else state
        self._name = name
        # Each with its number; counted from 1.
        self._tasks: deque[tuple[int, Task]] = deque()
        # Giving back a lock of this kind that somebody else has is an error, so that an interrupt between
        # taking it and knowing that can be mended.
        self._turn = threading.RLock()
        self._runner: int | None = None  # the thread that has the turn
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._words = np.zeros(doorbell.DOORBELL_WORDS, dtype=np.int64)
        self._words[doorbell.GRACE // 8 :] = divmod(round(grace * 1e9), 1_000_000_000)
        self._address: int = self._words.ctypes.data
        self._begun = 0  # the number of the task that was begun last
        self.pending = 0
        """How many tasks have been submitted and are not over. Read without a lock: it is 0
        only when nothing that this thread submitted is still to run."""

    def submit(self, task: Task) -> None:
        """Queue a task; it is not queued if this raises, but for an interrupt that came too late.

        Raises:
            RuntimeError: the thread cannot be started.
        """
        with self._lock:
            self.pending = self._state.pending = self.pending + 1
            try:
                if self._thread is None:
                    self._start()
                self._tasks.append((int(self._words[doorbell.SUBMITTED // 8]) + 1, task))
            finally:
                if self._tasks and self._tasks[-1][1] is task:
                    # Under the lock, as where a task is begun; the first in the queue may be running.
                    self._depth[0] = len(self._tasks) - (self._begun == self._tasks[0][0])
                    doorbell.ring(self._address)
                else:
                    self.pending = self._state.pending = self.pending - 1

    def _start(self) -> None:
        # In the submitter's context, so that callbacks know which rank they are of.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name=self._name, daemon=True)
        try:
            start_thread(self._thread)
        except RuntimeError:
            self._thread = None
            raise
        _started.add(self)
        ends_at_exit(self)

    def start_now(self) -> None:
        """Make the thread begin now: a caller waits for a task and cannot :meth:`progress`."""
        doorbell.start_now(self._address)

    def progress(self, ended: Callable[[], bool]) -> None:
        """Run tasks on the calling thread until ``ended()``, as far as that may be done now.

        Raises:
            BaseException: what a task was interrupted with, though it may be another than the caller's.
        """
        if self.is_current():
            return
        try:
            if self._turn.acquire(blocking=False):
                self._run_tasks(ended)
            else:
                self.start_now()  # another guest may have the turn, and leave this one's task in the queue
        finally:
            try:  # in contextlib.suppress() an interrupt could come before the next line, but not here
                self._turn.release()
            except RuntimeError:
                pass  # somebody else has it

    def add_pending(self) -> None:
        """Count something as pending that is not queued, until :meth:`remove_pending`."""
        with self._lock:
            self.pending = self._state.pending = self.pending + 1

    def remove_pending(self) -> None:
        """Undo :meth:`add_pending`."""
        with self._lock:
            self.pending = self._state.pending = self.pending - 1

    def is_current(self) -> bool:
        """Return whether the calling thread has the turn: the caller is a task, or a callback of one."""
        return self._runner == threading.get_ident()

    def drain(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until all tasks submitted so far have ended and told so."""
        if self._thread is None or not self._thread.is_alive() or self.is_current():
            return
        last = _DrainTask()
        self.submit(last)
        self.start_now()
        last.over.wait(timeout_s)

    def running(self) -> Collection[threading.Thread]:
        """Return the thread if it runs the callbacks of a task."""
        thread, tasks = self._thread, tuple(self._tasks)
        return () if thread is None or not tasks or not tasks[0][1].is_in_callbacks() else (thread,)

    def close(self, timeout_s: float) -> None:
        """Let the queued tasks end, and the thread with them; wait at most ``timeout_s``."""
        if self._thread is not None and self._thread is not threading.current_thread():
            doorbell.close(self._address)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while doorbell.await_task(self._address):
            with self._turn:
                self._run_tasks()

    def _run_tasks(self, ended: Callable[[], bool] | None = None) -> None:
        """Run tasks, with the turn: all, or as the guest of the thread until ``ended()`` or one is bound."""
        self._runner = threading.get_ident()
        try:
            while self._tasks:
                number, task = self._tasks[0]
                if ended is not None:
                    if ended():
                        return
                    if task.is_bound():
                        self.start_now()
                        return
                self._run_task(number, task)
                if ended is not None and task.interrupt is not None:
                    raise task.interrupt
        finally:
            self._runner = None
        if ended is None:
            with self._lock:
                if not self._tasks:
                    self._words[doorbell.BEGUN // 8] = self._words[doorbell.SUBMITTED // 8]

    def _run_task(self, number: int, task: Task) -> None:
        dequeue = partial(self._dequeue, number)
        try:
            self._words[doorbell.BEGUN // 8] = number
            with self._lock:
                self._begun = number
                self._depth[0] = len(self._tasks) - 1
            task(dequeue)
        except BaseException:
            if task.ran:
                task(dequeue)
            raise
        finally:
            if self._tasks and self._tasks[0][0] == number:
                # Interrupted before it was begun. The thread, which may sleep, is to look again.
                with self._lock:
                    doorbell.ring(self._address)

    def _dequeue(self, number: int) -> None:
        with self._lock:
            if self._tasks and self._tasks[0][0] == number:
                self.pending = self._state.pending = self.pending - 1
                self._tasks.popleft()


class _DrainTask(Task):
    """The task that :meth:`ProgressThread.drain` waits for."""

    def __init__(self) -> None:
        self.ran = False
        self.interrupt = None
        self.over = threading.Event()

    def __call__(self, dequeue: Dequeue) -> None:
        self.ran = True
        dequeue()
        self.over.set()

    def is_bound(self) -> bool:
        return True

    def is_in_callbacks(self) -> bool:
        return False
