"""The threads of a worker: who receives messages, who works at them, and how they take turns.

*The lead* is the right to receive; it is held while a thread receives and sorts one message, never while it
runs anybody's function. A thread that waits for an answer takes the lead if it is free, and mostly receives
its answer itself; so a call wakes no thread at the caller, and one at the worker called.

*The crew* are threads of our own. One that has received a call answers it itself. While it does, nobody
leads: so there must be a *watchman* (endpoint_kernels.py), who takes the lead over when a message stays
unreceived. The invariant: **a thread of the crew begins to run a function, or to deal with an answer, whose
callbacks may wait for others, only while another one is free** (leading, watching, parked with the watch
taken, or on its way to one of these). Threads are added as this asks for, up to a limit; at the limit,
calls wait in ``todo``, and everything else goes on.

So somebody always receives, whatever functions and callbacks wait for, sends to a peer that is slow included;
but the locks in here must not be held by anybody who waits. Finalisers run anywhere, so none may send.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from torchestra.engine.p2p import LostPeerError, Message
from torchestra.engine.try_lock import TryLock
from torchestra.errors import DistBackendError
from torchestra.rpc.thread_state import aside
from torchestra.rpc.transport import Office
from torchestra.system.limits import start_thread

_LOOK_SECONDS = 0.05
_JOIN_SECONDS = 2.0
_DRAIN_SECONDS = 1.0
_NAP_SECONDS = 0.0005

Job = Callable[[], None]


class Awaited(Protocol):
    """What a thread waits for.

    Attributes:
        done: it is there.
        leading: the thread that waits for it leads.
        latch: what the thread sleeps on if another leads.
    """

    done: bool
    leading: bool
    latch: threading.Lock | None


class Crew:
    """The threads of one worker.

    Args:
        name: for the names of the threads.
        office: where messages come, None if there are no other workers.
        sort: what to do about a message: told with the lead held, so it must run nobody's code. Whether it
            is a call, and what to do without the lead.
        look: called some 20 times a second.
        kept: how many threads may wait for work.
        limit: how many there may be.
    """

    def __init__(
        self,
        name: str,
        office: Office | None,
        sort: Callable[[Message], tuple[bool, Job]],
        look: Callable[[], None],
        kept: int,
        limit: int,
    ) -> None:
        self.limit = limit
        self.closed = False
        self.todo: deque[Job] = deque()
        self._name = name
        self._office = office
        self._sort = sort
        self._look = look
        self.kept = kept
        self._lead = TryLock()
        self._watching = TryLock()
        self._looking = TryLock()
        self._next_look = 0.0
        self._draining = False  # a thread wants the lead, and no other shall take it
        self._stand_back = False
        # Guards what follows; held for moments.
        self._gate = threading.Lock()
        # Threads of the crew run in it, so that functions know which rank they run for. The context of the
        # thread that has them added would not do: torch.jit, for one, waits on threads that know of no rank.
        self._context = contextvars.copy_context()
        self._threads: set[threading.Thread] = set()
        self._busy = 0
        self._idle: list[threading.Lock] = []
        self._waiting: list[Awaited] = []

    def start(self) -> None:
        """Start the first thread."""
        with self._gate:
            self._add()

    @property
    def threads(self) -> int:
        """How many threads there are."""
        return len(self._threads)

    def wait(self, awaited: Awaited) -> None:
        """Return when it is done. Every thread may call."""
        office = self._office
        lead, claim = self._lead, object()
        while not (awaited.done or self.closed):
            found = None
            try:
                leads = office is not None and not self._draining and lead.take(claim)
                if leads:
                    awaited.leading = True
                    if not awaited.done:
                        assert office is not None
                        found = self._receive(office)
            finally:
                awaited.leading = False
                if lead.holder is claim:
                    del lead.holder
            if not leads:
                self._sleep(awaited)
            elif found is None:
                self.look()
            elif found[0]:
                self.give(found[1])
            else:
                aside(found[1])
        if self._waiting:
            self._pass_lead()

    def _sleep(self, awaited: Awaited) -> None:
        """Wait while another thread leads."""
        latch = threading.Lock()
        latch.acquire()
        awaited.latch = latch
        try:
            with self._gate:
                self._waiting.append(awaited)
            if not awaited.done and (self._lead.holder is not None or self._draining or self._office is None):
                latch.acquire(timeout=_LOOK_SECONDS)
        finally:
            with self._gate:
                if awaited in self._waiting:  # not so if an interrupt came first
                    self._waiting.remove(awaited)
        self.look()

    def _pass_lead(self) -> None:
        """Have a thread that waits look whether it can lead."""
        with self._gate:
            for awaited in self._waiting:
                if self.nudge(awaited):
                    return

    def nudge(self, awaited: Awaited) -> bool:
        """Wake who waits for this, if anybody sleeps: whether so. To be called when it is done."""
        latch, awaited.latch = awaited.latch, None
        if latch is not None:
            self._stand_back = True
            try:
                latch.release()
            except RuntimeError:  # another thread was quicker
                pass
        if awaited.leading and self._office is not None:
            self._office.wake_leader()
        return latch is not None

    def give(self, job: Job) -> None:
        """Have a thread of the crew do something."""
        self.todo.append(job)
        with self._gate:
            if self._idle:
                self._idle.pop().release()
            elif len(self._threads) < self.limit:
                self._add()

    def drain(self) -> bool:
        """Receive all that has been sent; whether that was possible now."""
        office = self._office
        if office is None:
            return True
        found: list[tuple[bool, Job]] = []
        lead, claim = self._lead, object()
        try:
            if not self._have_the_lead(office, claim):
                return False
            deadline = time.monotonic() + _DRAIN_SECONDS
            while (each := self._receive(office)) is not None:
                found.append(each)
                if time.monotonic() > deadline:
                    break
        finally:
            self._draining = False
            if lead.holder is claim:
                del lead.holder
        self._pass_lead()
        for is_call, job in found:
            if is_call:
                self.give(job)
            else:
                job()
        return each is None

    def _have_the_lead(self, office: Office, claim: object) -> bool:
        """Get the lead from whoever has it, within a moment; whether that was possible."""
        if self._lead.take(claim):
            return True
        self._draining = True  # or who has it would mostly take it again at once
        deadline = time.monotonic() + _LOOK_SECONDS
        while time.monotonic() < deadline:
            office.wake_leader()
            time.sleep(_NAP_SECONDS)
            if self._lead.take(claim):
                return True
        return False

    def look(self) -> None:
        """Call ``look`` if it is time to."""
        if time.monotonic() < self._next_look:
            return
        looking, claim = self._looking, object()
        try:
            if looking.take(claim):
                aside(self._look)
                self._next_look = time.monotonic() + _LOOK_SECONDS
        finally:
            if looking.holder is claim:
                del looking.holder

    def close(self) -> None:
        """Stop all threads; those that run a function end after it."""
        self.closed = True
        if self._office is not None:
            self._office.close()
        with self._gate:
            threads = tuple(self._threads)
            while self._idle:
                self._idle.pop().release()
            for awaited in self._waiting:
                self.nudge(awaited)
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in threads:
            if thread is not threading.current_thread() and not self._at_work(thread):
                thread.join(max(0.0, deadline - time.monotonic()))

    def _at_work(self, thread: threading.Thread) -> bool:
        return getattr(thread, "at_work", False)

    def _receive(self, office: Office) -> tuple[bool, Job] | None:
        """With the lead: receive and sort a message, if one comes."""
        try:
            message = office.receive(eager=True)
        except LostPeerError:
            return None
        return None if message is None else self._sort(message)

    # -- threads of the crew

    def _add(self) -> None:
        run = self._context.copy().run
        thread = threading.Thread(target=run, args=(self._serve,), daemon=True, name=f"rpc-{self._name}")
        self._threads.add(thread)
        try:
            start_thread(thread)
        except DistBackendError:
            self._threads.discard(thread)
            raise

    def _serve(self) -> None:
        thread = threading.current_thread()
        office = self._office
        must_lead = False
        claim = object()  # no signal is handled on this thread
        while not self.closed:
            if self.todo and self._begin_work():
                self._work(thread, None)
                continue
            found = None
            if office is None:
                if not self._park(thread):
                    return
                self.look()
                continue
            # Who has just been woken with an answer will mostly call again, and should lead then itself.
            stand_back, self._stand_back = self._stand_back and not must_lead, False
            stand_back = stand_back or self._draining or (bool(self._waiting) and not must_lead)
            if not stand_back and self._lead.take(claim):
                try:
                    found = self._receive(office)
                finally:
                    del self._lead.holder
                must_lead = False
                if found is None:
                    self.look()
                    office.send_leftovers()
                elif self._begin_work():
                    self._work(thread, found[1])
                elif found[0]:
                    self.todo.append(found[1])
                else:
                    found[1]()  # an answer: those who are at work may wait for it
                if self._waiting:
                    self._pass_lead()
            elif self._watching.take(claim):
                try:
                    must_lead = office.watch()
                finally:
                    del self._watching.holder
                self.look()
            elif not self._park(thread):
                return
        with self._gate:
            self._threads.discard(thread)

    def _begin_work(self) -> bool:
        """Whether this thread may run a function: another one is free then."""
        with self._gate:
            if self._busy + 1 >= len(self._threads):
                if len(self._threads) >= self.limit:
                    return False
                self._add()
            elif self._idle and self._watching.holder is None:
                self._idle.pop().release()
            self._busy += 1
            return True

    def _work(self, thread: threading.Thread, job: Job | None) -> None:
        thread.at_work = True  # type: ignore[attr-defined]
        try:
            if job is None:
                try:
                    job = self.todo.popleft()
                except IndexError:
                    return
            job()
        finally:
            thread.at_work = False  # type: ignore[attr-defined]
            with self._gate:
                self._busy -= 1

    def _park(self, thread: threading.Thread) -> bool:
        """Sleep until needed; False if there are enough that do."""
        latch = threading.Lock()
        with self._gate:
            if self.closed or self.todo or not (self._watching.holder is not None or self._office is None):
                return True
            if len(self._idle) >= self.kept:
                self._threads.discard(thread)
                return False
            latch.acquire()
            self._idle.append(latch)
        if self._office is not None:
            latch.acquire()
            return True
        if not latch.acquire(timeout=_LOOK_SECONDS):
            with self._gate:
                if latch in self._idle:
                    self._idle.remove(latch)
        return True
