"""The threads of a worker: which of them receives messages, and how they take turns.

This is the Leader/Followers pattern (Schmidt et al., Pattern-Oriented Software Architecture 2). *The leader*
is the one thread that receives and dispatches a message; it never runs user code while it leads. A thread
that waits for an answer becomes the leader if there is none, and mostly receives its answer itself; so a call
wakes no thread at the caller, and one at the worker called.

*The pool* has threads of its own. One that has received a call executes it itself. While it does, nobody
leads: so there must be a *follower* (endpoint_kernels.py), which becomes the leader when a message stays
unreceived. The invariant: **a thread of the pool begins to run a function, or to deal with an answer,
whose callbacks may wait for others, only while another one is free** (leading, following, idle with a
follower there, or on its way to one of these). Threads are added as this asks for, up to a limit; at the
limit, calls wait in ``queue``, and everything else goes on.

So some thread always receives, whatever functions and callbacks wait for, sends to a slow peer included; but
no thread that waits may hold the locks in here. Finalisers run anywhere, so none may send.

*Interrupts.* A signal's handler may raise on a thread that waits, after any call (CPython looks for signals
then, and at the beginning of functions and of further turns of loops). Nothing that has come is lost by it: a
message is *in hand* at the endpoint until it has become a job, and whoever leads next dispatches it again; a
job that was not done to its end is left to the pool, whose threads no signal interrupts. So to dispatch a
message, and to do the job of an answer, twice must be the same as once. Whatever is not so, or runs callbacks
(in which torch swallows what is raised), is left to the pool at once.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol, TypeAlias

import torch

from torchestra.rpc.router import Endpoint
from torchestra.rpc.thread_state import run_detached, thread_state
from torchestra.system.exiting import ends_at_exit
from torchestra.system.limits import start_thread
from torchestra.system.try_lock import TryLock
from torchestra.transport.message import Message

_log = logging.getLogger(__name__)

_CHECK_SECONDS = 0.05
_JOIN_SECONDS = 2.0
_DRAIN_SECONDS = 1.0
_PAUSE_SECONDS = 0.0005

Job: TypeAlias = Callable[[], None]
Jobs: TypeAlias = "OrderedDict[Job, None]"
"""Jobs in their order; one that is added twice is there once."""

QUEUED, REPEATABLE, ONCE = range(3)
"""How a job is done: a *queued* one (a call) by the pool, when a thread is free. A *repeatable* one by any
thread at once, and from the beginning again if an interrupt stops it. One to be done *once*, by the pool.
"""


class Waitable(Protocol):
    """Something that a thread waits for.

    Attributes:
        finished: whether the thread need not wait any more.
        leading: the thread that waits for it is the leader.
        latch: what the thread sleeps on if another thread is the leader.
    """

    finished: bool
    leading: bool
    latch: threading.Lock | None


class LeaderFollowersPool:
    """The threads of one worker.

    Args:
        name: for the names of the threads.
        endpoint: where messages come, None if there are no other workers.
        dispatch: returns what to do about a message: one of the three above, and a job for a thread that is
            not the leader, or None. It is called by the leader, so it must not run user code.
        check: called some 20 times a second, by a thread of the pool.
        max_idle: how many threads may wait for work.
        max_threads: how many there may be.
    """

    def __init__(
        self,
        name: str,
        endpoint: Endpoint | None,
        dispatch: Callable[[Message], tuple[int, Job | None]],
        check: Callable[[], None],
        max_idle: int,
        max_threads: int,
    ) -> None:
        self.max_threads = max_threads
        self.closed = False
        self.queue: Jobs = OrderedDict()  # calls
        self.left: Jobs = OrderedDict()  # all else that a thread that waits has left to the pool
        self._name = name
        self._endpoint = endpoint
        self._dispatch = dispatch
        self._check = check
        self.max_idle = max_idle
        self._leader = TryLock()
        self._follower = TryLock()
        self._checking = TryLock()
        self._next_check = 0.0
        self._draining = False  # a thread wants to lead, and no other shall
        self._step_back = False
        # Guards the attributes below; held only briefly.
        self._lock = threading.Lock()
        # Threads of the pool run in it, so that functions know which rank they run for. The context of the
        # thread that has them added would not do: torch.jit, for one, waits on threads that know of no rank.
        self._context = contextvars.copy_context()
        self._threads: set[threading.Thread] = set()
        self._busy: set[threading.Thread] = set()  # those that do a job; each adds and removes itself
        self._idle: list[threading.Lock] = []
        self._waiting: list[Waitable] = []
        ends_at_exit(self)

    def start(self) -> None:
        """Start the first thread."""
        with self._lock:
            self._add()

    @property
    def threads(self) -> int:
        """Return how many threads there are."""
        return len(self._threads)

    def wait(self, waitable: Waitable) -> None:
        """Wait until it is finished. Any thread may call this."""
        endpoint = self._endpoint
        leader, claim = self._leader, object()
        while not (waitable.finished or self.closed):
            message = job = None  # what they refer to shall not wait for the next ones
            leads = False
            try:
                try:
                    if endpoint is not None and not self._draining and (leads := leader.take(claim)):
                        waitable.leading = True
                        if not waitable.finished and (message := endpoint.receive(eager=True)) is not None:
                            waitable.leading = False  # or to complete it would wake this thread
                            kind, job = self._dispatch(message)
                            endpoint.in_hand = None
                finally:
                    waitable.leading = False
                    if leader.holder is claim:
                        del leader.holder
                if job is None:
                    if not leads:
                        self._sleep(waitable)
                    if message is None:
                        self._leave_check()
                elif kind != REPEATABLE:
                    jobs = self.queue if kind == QUEUED else self.left
                    jobs[job] = None
                    job = None
                    self._wake_idle()
                elif thread_state.scope is thread_state.graph_task is None and torch.is_grad_enabled():
                    job()
                else:
                    run_detached(job)
            except BaseException:
                if job is not None:
                    (self.queue if kind == QUEUED else self.left)[job] = None
                self._wake_idle()  # there may be a message in hand as well
                raise
        if self._waiting:
            self._promote()

    def _sleep(self, waitable: Waitable) -> None:
        """Wait while another thread is the leader."""
        latch = threading.Lock()
        latch.acquire()
        waitable.latch = latch
        try:
            with self._lock:
                self._waiting.append(waitable)
            if not waitable.finished and (
                self._leader.holder is not None or self._draining or self._endpoint is None
            ):
                latch.acquire(timeout=_CHECK_SECONDS)
        finally:
            with self._lock:
                if waitable in self._waiting:  # not so if an interrupt came first
                    self._waiting.remove(waitable)

    def _promote(self) -> None:
        """Have a thread that waits try to become the leader."""
        with self._lock:
            for waitable in self._waiting:
                if self.wake(waitable):
                    return

    def wake(self, waitable: Waitable) -> bool:
        """Wake the thread that waits for this; return whether it slept. To be called when it is finished."""
        latch, waitable.latch = waitable.latch, None
        if latch is not None:
            self._step_back = True
            try:
                latch.release()
            except RuntimeError:  # another thread was quicker
                pass
        if waitable.leading and self._endpoint is not None:
            self._endpoint.wake_leader()
        return latch is not None

    def submit(self, job: Job) -> None:
        """Have a thread of the pool execute a call."""
        self.queue[job] = None
        self._wake_idle()

    def leave(self, job: Job) -> None:
        """Have a thread of the pool do a job that is no call, and so need not wait for a free thread."""
        self.left[job] = None
        self._wake_idle()

    def _wake_idle(self) -> None:
        """Have a thread of the pool look for what there is to do."""
        with self._lock:
            while self._idle:
                latch = self._idle[-1]
                try:
                    latch.release()
                except RuntimeError:  # it was woken, and an interrupt came before the next line
                    del self._idle[-1]
                else:
                    del self._idle[-1]
                    return
            if len(self._threads) < self.max_threads and not self.closed:
                self._add()

    def drain(self) -> bool:
        """Receive all that has been sent; return whether that was possible now."""
        endpoint = self._endpoint
        if endpoint is None:
            return True
        received: list[tuple[int, Job | None]] = []
        leader, claim = self._leader, object()
        try:
            if not self._become_leader(endpoint, claim):
                return False
            deadline = time.monotonic() + _DRAIN_SECONDS
            while (message := endpoint.receive(eager=True)) is not None:
                received.append(self._dispatch(message))
                endpoint.in_hand = None
                if time.monotonic() > deadline:
                    break
        finally:
            self._draining = False
            if leader.holder is claim:
                del leader.holder
        self._promote()
        for kind, job in received:
            if job is None:
                continue
            if kind == QUEUED:
                self.submit(job)
            else:
                job()
        return message is None

    def _become_leader(self, endpoint: Endpoint, claim: object) -> bool:
        """Become the leader in place of another thread, within a moment; return whether that was possible."""
        if self._leader.take(claim):
            return True
        self._draining = True  # or the leader would mostly be it again at once
        deadline = time.monotonic() + _CHECK_SECONDS
        while time.monotonic() < deadline:
            endpoint.wake_leader()
            time.sleep(_PAUSE_SECONDS)
            if self._leader.take(claim):
                return True
        return False

    def _leave_check(self) -> None:
        """Have a thread of the pool call ``check``, if it is time to."""
        if time.monotonic() >= self._next_check:
            self.leave(self.check)

    def check(self) -> None:
        """Call ``check`` if it is time to; for threads of the pool."""
        if time.monotonic() < self._next_check:
            return
        checking, claim = self._checking, object()
        try:
            if checking.take(claim):
                run_detached(self._check)
                self._next_check = time.monotonic() + _CHECK_SECONDS
        finally:
            if checking.holder is claim:
                del checking.holder

    def close(self) -> None:
        """Stop all threads; those that run a function end after it."""
        self.closed = True
        if self._endpoint is not None:
            self._endpoint.close()
        with self._lock:
            threads = tuple(self._threads)
            while self._idle:
                with contextlib.suppress(RuntimeError):  # it was woken, see _wake_idle()
                    self._idle.pop().release()
            for waitable in self._waiting:
                self.wake(waitable)
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in threads:
            if thread is not threading.current_thread() and thread not in self._busy:
                thread.join(max(0.0, deadline - time.monotonic()))

    def running(self) -> Collection[threading.Thread]:
        """Return the threads that do a job now."""
        return tuple(self._busy)

    # -- threads of the pool

    def _add(self) -> None:
        run = self._context.copy().run
        thread = threading.Thread(target=run, args=(self._run,), daemon=True, name=f"rpc-{self._name}")
        try:
            self._threads.add(thread)
            start_thread(thread)
        except BaseException:  # after an interrupt it may run all the same
            self._threads.discard(thread)
            raise

    def _run(self) -> None:
        """Serve until there is no need, and then leave the pool; go on after an error, which is a bug."""
        thread = threading.current_thread()
        try:
            with self._lock:
                self._threads.add(thread)
            while True:
                try:
                    self._serve(thread)
                    break
                except Exception:
                    _log.exception("thread %s goes on after an error", thread.name)
                    time.sleep(_CHECK_SECONDS)
        finally:
            with self._lock:
                self._threads.discard(thread)

    def _serve(self, thread: threading.Thread) -> None:
        """Lead, follow, work or idle, until the pool is closed or has threads enough."""
        endpoint = self._endpoint
        must_lead = False
        claim = object()  # no signal is handled on this thread
        while not self.closed:
            message = job = None  # what they refer to shall not wait for the next ones
            if self.left and (job := _next(self.left)) is not None:
                if not self._work(thread, job):
                    job()
                continue
            if self.queue and self._work(thread, None):
                continue
            # A thread that was just woken with an answer will mostly call again, and should lead itself then.
            step_back, self._step_back = self._step_back and not must_lead, False
            step_back = step_back or self._draining or (bool(self._waiting) and not must_lead)
            if endpoint is not None and not step_back and self._leader.take(claim):
                must_lead = False
                try:
                    if (message := endpoint.receive(eager=True)) is not None:
                        kind, job = self._dispatch(message)
                        endpoint.in_hand = None
                finally:
                    del self._leader.holder
                if message is None:
                    self.check()
                    endpoint.send_leftovers()
                elif job is not None and not self._work(thread, job):
                    if kind == QUEUED:
                        self.queue[job] = None
                    else:
                        job()  # threads that work may wait for it
                if self._waiting:
                    self._promote()
            elif endpoint is not None and self._follower.take(claim):
                try:
                    must_lead = endpoint.watch()
                finally:
                    del self._follower.holder
                self.check()
            elif not self._idle_until_needed(thread):
                return
            elif endpoint is None:
                self.check()

    def _work(self, thread: threading.Thread, job: Job | None) -> bool:
        """Do a job, or the next one of the queue; return whether another thread is free, so that this may."""
        busy = self._busy
        busy.add(thread)  # before the look at the others: of two that begin at once one sees both
        try:
            needs_another = len(busy) >= len(self._threads) or (self._idle and self._follower.holder is None)
            if needs_another and not self._leave_one_free(thread):
                return False
            if job is None:
                job = _next(self.queue)
            if job is not None:
                job()
        finally:
            busy.discard(thread)
        return True

    def _leave_one_free(self, thread: threading.Thread) -> bool:
        """Have another thread be free; return False if there cannot be one: this one is busy no longer."""
        with self._lock:
            if len(self._busy) >= len(self._threads):
                if len(self._threads) >= self.max_threads:
                    self._busy.discard(thread)
                    return False
                self._add()
            elif self._idle and self._follower.holder is None:
                with contextlib.suppress(RuntimeError):  # it was woken, see _wake_idle()
                    self._idle.pop().release()
        return True

    def _idle_until_needed(self, thread: threading.Thread) -> bool:
        """Sleep until needed; return False if enough threads sleep."""
        latch = threading.Lock()
        latch.acquire()
        with self._lock:
            idle = len(self._idle)
            self._idle.append(latch)  # before the look: a follower that goes to work looks after it has gone
            is_needed = self.closed or self.queue or self.left
            if is_needed or not (self._follower.holder is not None or self._endpoint is None):
                self._idle.remove(latch)
                return True
            if idle >= self.max_idle:
                self._idle.remove(latch)
                self._threads.discard(thread)  # in the same step, so that not all of them go
                return False
        latch.acquire(timeout=-1 if self._endpoint is not None else _CHECK_SECONDS)
        with self._lock:
            if latch in self._idle:
                self._idle.remove(latch)
        return True


def _next(jobs: Jobs) -> Job | None:
    """Take the first job; None if another thread has been quicker."""
    try:
        return jobs.popitem(last=False)[0]
    except KeyError:
        return None
