"""Run the threads of simulated processes one at a time, in an order and at times that a seed decides.

Each thread of the product is a real thread that waits for its turn; so its stack, its thread-local state and
its context are what they always are. Threads hand the turn over only where they wait or would be free to (a
lock, an event, a queue, a clock, a socket: the *seams*, see threads.py, sockets.py and zeromq.py). The time
is virtual: it stands still while threads run, and jumps to the next timer when all of them wait.

A process that *crashes* is never scheduled again: no handler of it runs, as after ``kill -9``. One that is
*stopped* (SIGSTOP) keeps its turn waiting until it goes on.
"""

from __future__ import annotations

import _thread
import heapq
import itertools
import math
import random
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from types import FrameType

_CLOCK_READS_WITHOUT_A_WAIT = 100
_SPIN_SECONDS = 0.001
_KEPT_EVENTS = 400
_NEVER = math.inf, -1
_get_ident = _thread.get_ident  # looked up at each of the product's seams


class Killed(BaseException):
    """The simulation is over: the thread has to end."""


class SimulationError(Exception):
    """A broken promise, with what led to it."""


class Process:
    """A simulated process, with its threads.

    Attributes:
        host: the number of the machine that it runs on.
        has_crashed, is_stopped: what has become of it.
        on_crash: called when it crashes, by the simulation.
        boot: its machine's monotonic clock when the simulation begins.
        steps: by how much its machine's wall clock has been set forward or back since, in seconds.
    """

    steps = 0.0

    def __init__(self, name: str, host: int, boot: float = 1000.0) -> None:
        self.name, self.host, self.boot = name, host, boot
        self.has_crashed = self.is_stopped = False
        self.on_crash: list[Callable[[], None]] = []
        self.held: list[Task] = []
        self.tasks: list[Task] = []

    def wall_clock(self, now: float) -> float:
        """Return the time of day on its machine."""
        return 1.7e9 + now + self.steps


class Task:
    """A thread of a process. ``turn`` is locked while it is not its turn, for which ``await_turn`` waits.

    Under that name, for the hang reports of the product would look who holds a lock that a program acquires.
    """

    def __init__(self, number: int, process: Process, name: str) -> None:
        self.number, self.process, self.name = number, process, name
        self.turn = _thread.allocate_lock()
        self.await_turn = self.turn.acquire
        self.await_turn()
        self.ident = 0
        self.frame: FrameType | None = None  # while it is not its turn: where it is
        self.thread: threading.Thread | None = None
        self.is_started = self.is_waiting = self.was_woken = self.is_done = False
        self.deadline: tuple[float, int] | None = None  # of its wait: when, and the timer's number
        self.timer: tuple[float, int] = _NEVER  # of its timers, the one that comes first
        self.clock_reads = 0
        self.ended: list[Task] = []  # those that join it


class Scheduler:
    """The threads, the timers and the virtual time of one run.

    Args:
        seed: decides every choice.
        preemption: how likely a thread gives its turn away at a seam where it need not.
        limit_s, most_turns: after how much virtual time, or how many turns, a run has failed that goes on.

    Attributes:
        now: seconds since the run began.
        current: the thread whose turn it is.
        events: what happened last, for people.
        digest: equal for two runs if all turns were the same.
    """

    def __init__(self, seed: object, preemption: float, limit_s: float, most_turns: int) -> None:
        self.choices = random.Random(f"{seed} schedule")
        self._bits = self.choices.getrandbits
        self.preemption, self.limit_s, self.most_turns = preemption, limit_s, most_turns
        self.now = 0.0
        self.current: Task | None = None
        self.is_ending = False
        self.failure: str | None = None
        self.events: deque[str] = deque(maxlen=_KEPT_EVENTS)
        self.digest = 0
        self.turns = self.switches = 0
        self.tasks: list[Task] = []
        self._ready: list[Task] = []
        self._on_host: dict[int, list[Task]] = {}
        self._living: dict[int, list[threading.Thread]] = {}
        self._timers: list[tuple[float, int, Task | Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._over = _thread.allocate_lock()
        self._over.acquire()

    # -- for everybody

    def note(self, event: str) -> None:
        """Keep an event for the report of a failure."""
        who = self.current.process.name if self.current is not None else "-"
        self.events.append(f"{self.now:10.4f}  {who:<10} {event}")

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        """Have something happen later. It must not wait."""
        heapq.heappush(self._timers, (self.now + max(0.0, seconds), next(self._numbers), action))

    def finish(self) -> None:
        """End the run, when the present thread next waits."""
        self.is_ending = True

    def fail(self, why: str) -> None:
        """End the run: a promise was broken."""
        if self.failure is None:
            self.failure = why
        self.finish()

    # -- processes

    def crash(self, process: Process, how: str = "crashes") -> None:
        """End a process at once; none of its code runs any more."""
        if process.has_crashed:
            return
        process.has_crashed = True
        self._living.clear()
        self.note(f"{process.name} {how}")
        self._ready = [task for task in self._ready if task.process is not process]
        process.held.clear()
        for task in self.tasks:
            if task.process is process and not task.is_done:
                for other in task.ended:
                    self.wake(other)
        for action in process.on_crash:
            action()

    def stop(self, process: Process) -> None:
        """Run none of its threads until :meth:`go_on`."""
        if process.has_crashed or process.is_stopped:
            return
        self.note(f"{process.name} is stopped")
        process.is_stopped = True
        process.held += [task for task in self._ready if task.process is process]
        self._ready = [task for task in self._ready if task.process is not process]

    def go_on(self, process: Process) -> None:
        """Continue a process that was stopped."""
        if process.is_stopped:
            self.note(f"{process.name} goes on")
            process.is_stopped = False
            self._ready += process.held
            process.held.clear()

    # -- threads

    def new_task(self, process: Process, name: str) -> Task:
        """Enter a thread, which is to call :meth:`run_task`."""
        task = Task(len(self.tasks), process, name)
        self.tasks.append(task)
        process.tasks.append(task)
        self._on_host.setdefault(process.host, []).append(task)
        return task

    def begin_task(self, task: Task) -> None:
        """Let a thread that was started have its first turn some time."""
        task.is_started = True
        self._living.clear()
        self.make_ready(task)

    def living_threads(self) -> list[threading.Thread]:
        """Return the threads on the machine of the present one that run. The list is not to be changed."""
        host = self.me().process.host
        living = self._living.get(host)
        if living is None:
            living = self._living[host] = [
                task.thread
                for task in self._on_host[host]
                if task.is_started
                and task.thread is not None
                and not (task.is_done or task.process.has_crashed)
            ]
        return living

    def make_ready(self, task: Task) -> None:
        """Let a thread have a turn some time."""
        if task.process.has_crashed:
            return
        (task.process.held if task.process.is_stopped else self._ready).append(task)

    def run_task(self, task: Task, run: Callable[[], None]) -> None:
        """Run a thread from its first turn to its end; called on it."""
        task.ident = _thread.get_ident()
        task.await_turn()
        try:
            if not self.is_ending:
                run()
        except Killed:
            pass
        except BaseException:
            self.fail(f"{task.process.name}: thread {task.name!r} ended with\n{traceback.format_exc()}")
        task.is_done = True
        self._living.clear()
        if self.is_ending:
            self._over.release()
            return
        for other in task.ended:
            self.wake(other)
        self._hand_over(None)

    def me(self) -> Task:
        """Return the thread whose turn it is; it must be the calling one."""
        assert self.current is not None
        if self.is_ending:
            raise Killed
        return self.current

    def wait(self, timeout_s: float | None = None) -> bool:
        """Give the turn away until :meth:`wake`, or for so long; return whether it was woken."""
        task = self.me()
        task.is_waiting, task.was_woken = True, False
        task.clock_reads = 0
        task.deadline = None
        if timeout_s is not None:
            task.deadline = self.now + max(0.0, timeout_s), next(self._numbers)
            if task.deadline < task.timer:
                self._set_timer(task)
        self._hand_over(task)
        return task.was_woken

    def _set_timer(self, task: Task) -> None:
        """Have a timer end a task's wait.

        Most waits end before, and another one begins. So a task has one timer, which is set again when it
        comes too early, and not one for each wait.
        """
        assert task.deadline is not None
        task.timer = at, number = task.deadline
        heapq.heappush(self._timers, (at, number, task))

    def _come_to_deadline(self, task: Task, number: int) -> None:
        if number != task.timer[1]:
            return  # a timer that came sooner was set since
        task.timer = _NEVER
        if task.is_waiting and task.deadline is not None:
            if task.deadline[1] == number:
                task.is_waiting = False
                self.make_ready(task)
            else:
                self._set_timer(task)

    def wait_until(self, holds: Callable[[], bool], pause_s: Callable[[], float], timeout_s: float) -> None:
        """Give the turn away until something holds, or for so long.

        Whether it holds is looked at after each pause, on whatever thread lets time pass then: that costs no
        turn. So ``holds`` must neither wait nor ask who calls it.
        """
        task, is_over = self.me(), False

        def look() -> None:
            if is_over or task.process.has_crashed:
                return
            if holds():
                self.wake(task)
            else:
                self.call_later(pause_s(), look)

        self.call_later(pause_s(), look)
        try:
            self.wait(timeout_s)
        finally:
            is_over = True

    def wake(self, task: Task) -> None:
        """Have a thread that waits go on."""
        if task.is_waiting:
            task.is_waiting, task.was_woken = False, True
            self.make_ready(task)

    def seam(self) -> None:
        """Give the turn away, perhaps."""
        if self.is_ending:
            raise Killed
        if self.preemption and self.choices.random() < self.preemption:
            task = self.me()
            self.make_ready(task)
            self._hand_over(task)

    def look(self) -> None:
        """Note that the thread reads a clock; one that does nothing else lets time pass."""
        task = self.current
        if self.is_ending or task is None:
            raise Killed
        task.clock_reads += 1
        if task.clock_reads > _CLOCK_READS_WITHOUT_A_WAIT:
            self.wait(_SPIN_SECONDS)

    def _hand_over(self, task: Task | None) -> None:
        if self.is_ending:
            following = None
        else:
            following = self._pick()
        if following is None:
            self.is_ending = True
            self._over.release()
        elif following is not task:
            self.switches += 1
            self.current = following
            following.turn.release()
        else:
            return
        if task is not None:
            task.frame = sys._getframe()
            task.await_turn()
            task.frame = None
            if self.is_ending:
                raise Killed

    def _pick(self) -> Task | None:
        """Return the thread whose turn is next; let time pass until there is one. None: the run is over."""
        while not self._ready:
            if not self._timers:
                self.fail("a deadlock: nothing will ever happen again\n" + self.stacks())
                return None
            at, number, action = heapq.heappop(self._timers)
            if at > self.limit_s:
                self.fail(f"no end after {self.limit_s:g} s\n" + self.stacks())
                return None
            self.now = at
            if isinstance(action, Task):
                self._come_to_deadline(action, number)
            else:
                action()
            if self.is_ending:
                return None
        ready = self._ready
        index = self._below(len(ready))
        ready[index], ready[-1] = ready[-1], ready[index]
        task = ready.pop()
        self.turns += 1
        if self.turns > self.most_turns:
            self.fail(f"no end after {self.most_turns} turns of {len(self.tasks)} threads\n" + self.stacks())
            return None
        self.digest = hash((self.digest, task.number, round(self.now * 1e6)))
        return task

    def _below(self, limit: int) -> int:
        """Draw a number as Random.randrange does, in a third of its time."""
        bits = limit.bit_length()
        while (drawn := self._bits(bits)) >= limit:
            pass
        return drawn

    # -- the run

    def run(self) -> None:
        """Run until :meth:`finish`, a failure, or until nothing can happen; then end all threads.

        Raises:
            SimulationError: a promise was broken.
        """
        following = self._pick()
        if following is not None:
            self.current = following
            following.turn.release()
            self._over.acquire()
        self.is_ending = True
        for task in self.tasks:
            if task.is_started and not task.is_done:  # whatever it waits for, it meets Killed there
                self.current = task
                task.turn.release()
                self._over.acquire()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise SimulationError if a promise was broken."""
        if self.failure is not None:
            raise SimulationError(self.failure)

    def frames(self) -> dict[int, FrameType]:
        """Return the frames of the present process's threads that wait, by identifier.

        Those of all processes, as sys._current_frames() has them, take some milliseconds where there are
        thousands of threads.
        """
        return {task.ident: task.frame for task in self.me().process.tasks if task.frame is not None}

    def stacks(self) -> str:
        """Return where the threads of all processes that live are."""
        frames: dict[int, FrameType] = sys._current_frames()
        lines = []
        for task in self.tasks:
            if task.is_done or task.process.has_crashed or task.ident not in frames:
                continue
            lines.append(f"-- {task.process.name}, {task.name}:\n")
            stack = traceback.extract_stack(frames[task.ident])
            kept = [line for line in stack if "/simulation/" not in line.filename]
            lines += traceback.format_list(kept[-6:])
        return "".join(lines)


class Runs:
    """Which run is under way: there is one at a time in a process."""

    active: Scheduler | None = None


def active() -> Scheduler | None:
    """Return the run that the calling thread belongs to, or None outside of a simulation."""
    run = Runs.active
    if run is None or (current := run.current) is None or current.ident != _get_ident():
        return None
    return run
