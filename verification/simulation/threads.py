"""The seams of threads and clocks: ``threading``, ``queue`` and ``time`` as a simulated process sees them.

Outside of a simulation they are the real ones, so the product's modules may keep them.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from verification.simulation.scheduler import Killed, Scheduler, Task, active

_FOREVER = -1.0
_LOCKS_AT_THE_END = 1000  # that a thread takes which only cleans up


def _run() -> Scheduler:
    run = active()
    if run is None:
        raise Killed  # a lock of a simulation that is over
    return run


class SimulatedLock:
    """A ``threading.Lock``, or an RLock."""

    def __init__(self, *, is_reentrant: bool = False) -> None:
        self._is_reentrant = is_reentrant
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = _FOREVER) -> bool:
        run = active()
        if run is None:
            return True  # a finaliser, after the simulation
        task = run.current
        assert task is not None
        if run.is_ending:
            task.clock_reads += 1
            if task.clock_reads > _LOCKS_AT_THE_END:
                raise Killed
            return True  # the thread ends, and cleans up
        if self._is_reentrant and self._owner is task:
            self._depth += 1
            return True
        run.seam()
        if self._depth == 0:
            self._owner, self._depth = task, 1
            return True
        if not blocking:
            return False
        deadline = None if timeout < 0 else run.now + timeout
        while self._depth:
            left = None if deadline is None else deadline - run.now
            if left is not None and left <= 0:
                return False
            self._waiting.append(task)
            try:
                run.wait(left)
            finally:
                if task in self._waiting:
                    self._waiting.remove(task)
        self._owner, self._depth = task, 1
        return True

    def release(self) -> None:
        run = active()
        if run is None or run.is_ending:
            return
        if self._depth == 0 or (self._is_reentrant and self._owner is not run.current):
            raise RuntimeError("release unlocked lock")
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            if self._waiting:
                run.wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def free(self) -> int:
        """Release it wholly, and return for :meth:`take_again` how often it was taken."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_again(self, depth: int) -> None:
        """Take it as often as it was taken before :meth:`free`."""
        self.acquire()
        self._depth = depth


class SimulatedCondition:
    """A ``threading.Condition``."""

    def __init__(self, lock: SimulatedLock | None = None) -> None:
        self._lock = lock or SimulatedLock(is_reentrant=True)
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiting: deque[Task] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        run = _run()
        task = run.me()
        self._waiting.append(task)
        depth = self._lock.free()
        try:
            if timeout is not None and timeout <= 0:
                run.seam()
            else:
                run.wait(timeout)
        finally:
            was_notified = task not in self._waiting
            if not was_notified:
                self._waiting.remove(task)
            self._lock.take_again(depth)
        return was_notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        run = _run()
        deadline = None if timeout is None else run.now + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - run.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        run = active()
        while run is not None and n > 0 and self._waiting:
            run.wake(self._waiting.popleft())
            n -= 1

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimulatedEvent:
    """A ``threading.Event``."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        run = active()
        self._is_set = True
        if run is not None and not run.is_ending:
            waiting, self._waiting = self._waiting, []
            for task in waiting:
                run.wake(task)
            run.seam()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        run = _run()
        task = run.me()
        deadline = None if timeout is None else run.now + timeout
        run.seam()
        while not self._is_set:
            left = None if deadline is None else deadline - run.now
            if left is not None and left <= 0:
                break
            self._waiting.append(task)
            run.wait(left)
            if task in self._waiting:
                self._waiting.remove(task)
        return self._is_set


class SimulatedThread(threading.Thread):
    """A ``threading.Thread`` of the process of the thread that made it, if that is a simulated one."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
        task: Task | None = None,
    ) -> None:
        run = active()
        self._simulation = run
        if run is not None and task is None:
            task = run.new_task(run.me().process, name or "thread")
        self.task = task  # before the thread is put into a set
        if task is not None:
            task.thread = self
        super().__init__(group, target, name, args, kwargs, daemon=daemon)

    def __hash__(self) -> int:
        """Hash by number: by address, a set's order would differ from run to run."""
        return super().__hash__() if self.task is None else self.task.number

    @classmethod
    def of_process(cls, run: Scheduler, task: Task, target: Callable[[], object]) -> SimulatedThread:
        """Return the first thread of a process, before the simulation runs."""
        thread = cls(target=target, name=task.name, daemon=True, task=task)
        thread._simulation = run
        return thread

    def start(self) -> None:
        super().start()
        if self._simulation is not None and self.task is not None:
            self._simulation.begin_task(self.task)
            if active() is not None:
                self._simulation.seam()

    def run(self) -> None:
        if self._simulation is None or self.task is None:
            super().run()
        else:
            self._simulation.run_task(self.task, super().run)

    def is_alive(self) -> bool:
        if self._simulation is None or self.task is None:
            return super().is_alive()
        started: threading.Event = self._started  # type: ignore[attr-defined]
        return started.is_set() and not (self.task.is_done or self.task.process.has_crashed)

    def join(self, timeout: float | None = None) -> None:
        run = active()
        if run is None or self.task is None:
            if self._simulation is None:
                super().join(timeout)
            return
        deadline = None if timeout is None else run.now + timeout
        while self.is_alive():
            left = None if deadline is None else deadline - run.now
            if left is not None and left <= 0:
                return
            self.task.ended.append(run.me())
            run.wait(left)
            if run.current in self.task.ended:
                self.task.ended.remove(run.current)


class SimulatedTimer(SimulatedThread):
    """A ``threading.Timer``."""

    def __init__(
        self,
        interval: float,
        function: Callable[..., object],
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(target=self._fire, name="timer", daemon=True)
        self._interval, self._function = interval, function
        self._given = tuple(args or ()), dict(kwargs or {})
        self._finished = SimulatedEvent()

    def _fire(self) -> None:
        if not self._finished.wait(self._interval):
            self._function(*self._given[0], **self._given[1])

    def cancel(self) -> None:
        self._finished.set()


class SimulatedQueue:
    """A ``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = SimulatedCondition()

    def put(self, item: Any) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout if block else 0.0):
                raise queue.Empty
            return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class SimulatedThreading:
    """The module ``threading``."""

    Thread, Timer = SimulatedThread, SimulatedTimer

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    def enumerate(self) -> list[threading.Thread]:
        """Return the threads of this machine's processes: its ranks are threads of one."""
        run = active()
        return threading.enumerate() if run is None or run.is_ending else run.living_threads()

    def Lock(self) -> Any:
        return threading.Lock() if active() is None else SimulatedLock()

    def RLock(self) -> Any:
        return threading.RLock() if active() is None else SimulatedLock(is_reentrant=True)

    def Condition(self, lock: Any = None) -> Any:
        return threading.Condition(lock) if active() is None else SimulatedCondition(lock)

    def Event(self) -> Any:
        return threading.Event() if active() is None else SimulatedEvent()


class SimulatedQueues:
    """The module ``queue``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(queue, name)

    def SimpleQueue(self) -> Any:
        return queue.SimpleQueue() if active() is None else SimulatedQueue()

    Queue = SimpleQueue


class SimulatedTime:
    """The module ``time``: each machine has a clock of its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        run = active()
        if run is None:
            return time.monotonic()
        if not run.is_ending:
            run.look()
        current = run.current
        assert current is not None
        return current.process.boot + run.now

    def monotonic_ns(self) -> int:
        return int(self.monotonic() * 1e9)

    perf_counter, perf_counter_ns = monotonic, monotonic_ns

    def time(self) -> float:
        run = active()
        if run is None:
            return time.time()
        assert run.current is not None
        return run.current.process.wall_clock(run.now)

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def sleep(self, seconds: float) -> None:
        run = active()
        if run is None:
            time.sleep(seconds)
        else:
            run.wait(max(0.0, seconds))


class SeededSecrets:
    """The module ``secrets``, and ``os.urandom``: the same bytes in each run of a seed."""

    def __init__(self) -> None:
        self.choices = random.Random(0)

    def token_bytes(self, size: int = 32) -> bytes:
        return self.choices.randbytes(size)

    def token_hex(self, size: int = 32) -> str:
        return self.token_bytes(size).hex()
