"""The cores of a host, as a resource of the simulation."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[[float], None]


@dataclass
class _Request:
    """A thread's wish for a core: for how long, what to call then, and see :meth:`Cores.run`."""

    seconds: float
    done: Action
    who: object
    computes: bool
    factor: float


class EventQueue:
    """The future: what happens when, in the order of time, and of entry where times are equal."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action]] = []
        self._entered = 0

    def at(self, time_s: float, action: Action) -> None:
        """Have ``action`` called with the time, at that time."""
        self._entered += 1
        heapq.heappush(self._heap, (time_s, self._entered, action))

    def run(self) -> None:
        """Let everything happen."""
        while self._heap:
            time_s, _, action = heapq.heappop(self._heap)
            action(time_s)


class Cores:
    """Some cores that threads compete for. Who asks first comes first; compute gives way to communication.

    A thread that has slept has run less than one that computes, so the system's scheduler prefers it; compute
    runs in slices here, between which others come in.

    Args:
        number: how many.
        switch_s: until a core has gone from one thread to the next.
        slice_s: the longest time that compute keeps a core while others wait.
        idle_s: until a core on which all threads wait is at one that has become ready.
    """

    def __init__(
        self, events: EventQueue, number: int, switch_s: float, slice_s: float, idle_s: float = 0.0
    ) -> None:
        self._events = events
        self._free = number
        self._switch_s = switch_s
        self._slice_s = slice_s
        self._idle_s = idle_s
        self._queue: list[tuple[bool, int, _Request]] = []
        self._asked = 0
        self._ending: object = None
        self._ended = 0.0
        self._again: tuple[float, _Request] | None = None

    def run(
        self,
        time_s: float,
        seconds: float,
        done: Action,
        *,
        who: object,
        computes: bool = False,
        factor: float = 1.0,
    ) -> None:
        """Let ``who`` have a core for ``seconds`` from ``time_s`` or later on; call ``done`` with the end.

        A thread keeps its core if ``done`` asks again for it, for a time before the next switch.

        Args:
            computes: it gives way to others.
            factor: how many times as long a core takes to get to ``who``.
        """
        request = _Request(seconds, done, who, computes, factor)
        if who is self._ending and time_s <= self._ended + factor * self._switch_s and not computes:
            self._again = time_s, request
            return
        self._events.at(time_s, lambda now: self._ask(now, request))

    def _ask(self, now: float, request: _Request) -> None:
        if self._free:
            self._free -= 1
            self._take(now + request.factor * self._idle_s, request)
        else:
            self._enter(request)

    def _enter(self, request: _Request) -> None:
        self._asked += 1
        heapq.heappush(self._queue, (request.computes, self._asked, request))

    def _take(self, now: float, request: _Request) -> None:
        part = min(request.seconds, self._slice_s) if request.computes else request.seconds
        request.seconds -= part
        self._events.at(now + part, lambda end: self._release(end, request))

    def _release(self, now: float, request: _Request) -> None:
        if request.seconds > 0 and not self._queue:
            self._take(now, request)
            return
        if request.seconds > 0:
            self._enter(request)
        else:
            self._ending, self._ended = request.who, now
            request.done(now)
            self._ending, again, self._again = None, self._again, None
            if again is not None:
                time_s, following = again
                self._take(max(now, time_s), following)
                return
        if self._queue:
            _, _, following = heapq.heappop(self._queue)
            self._take(now + following.factor * self._switch_s, following)
        else:
            self._free += 1
