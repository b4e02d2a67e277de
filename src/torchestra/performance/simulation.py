"""Discrete-event simulation of a schedule on a machine.

Every stream has a clock of its own, which events move on. What streams share is decided in the order of time:
the cores of a host, the flags of its ranks, and the links (:mod:`torchestra.performance.network`). Cores are
only simulated where there are more threads than cores.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from torchestra.engine.kernels.selection import spin_policy
from torchestra.errors import DistError
from torchestra.performance.cores import Cores, EventQueue
from torchestra.performance.costs import Costs, StreamCosts
from torchestra.performance.machine import Machine
from torchestra.performance.network import Network
from torchestra.performance.schedule import (
    AwaitFlag,
    AwaitSignal,
    Begin,
    Compute,
    Copy,
    Event,
    EventStream,
    Fetch,
    LocalCopy,
    Overhead,
    PeerRead,
    Receive,
    Reduce,
    Schedule,
    Send,
    SetFlag,
    Signal,
    WriteMiss,
)

_LONGEST_SLICE_S = 0.001
_SPIN_S, _YIELD_S = 30e-9, 300e-9
"""One round of a wait, while it spins and while it yields (kernels/selection.py:spin_policy)."""


@dataclass
class StreamTimes:
    """When a stream ended, and for how many of the seconds until then it waited, by what for.

    Attributes:
        host, local_rank, name: of the stream.
        ended_s: since the start.
        waited_s: by ``"rank"`` of the same host, ``"message"``, or ``"stream"`` of the same rank.
    """

    host: int
    local_rank: int
    name: str
    ended_s: float = 0.0
    waited_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class Run:
    """The outcome of a simulation.

    Attributes:
        seconds: until the last stream ended.
        streams: of the recorded hosts.
        messages, nbytes: what the recorded hosts sent to others.
    """

    seconds: float
    streams: tuple[StreamTimes, ...]
    messages: int
    nbytes: int


class _Word:
    """A flag, which only grows, or a signal: its values, since when it has them, and who waits."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.times: list[float] = []
        self.waiting: list[tuple[int, Callable[[float], None]]] = []

    def since(self, value: int) -> float | None:
        """Return since when it is at least ``value``, or None."""
        place = bisect_left(self.values, value)
        return self.times[place] if place < len(self.values) else None

    def set(self, value: int, time_s: float) -> None:
        """Raise it, and let the streams go on that wait for that."""
        self.values.append(value)
        self.times.append(time_s)
        ready = [wake for wanted, wake in self.waiting if wanted <= value]
        self.waiting = [each for each in self.waiting if each[0] > value]
        for wake in ready:
            wake(time_s)


class _Simulation:
    def __init__(self, schedule: Schedule, machine: Machine) -> None:
        self.machine, self.host = machine, machine.host
        self.costs = Costs(machine)
        self.events = EventQueue()
        self.cores = _cores(schedule, machine, self.events)
        self.network = Network(schedule, machine, self.events, self.cores)
        self.flags: defaultdict[tuple[int, int], _Word] = defaultdict(_Word)
        self.signals: defaultdict[tuple[int, int, int], _Word] = defaultdict(_Word)
        ranks = machine.ranks_per_host * (machine.hosts if machine.shares_cores else 1)
        policy = spin_policy(1)
        spins = policy.spins if ranks <= self.host.cores else 0
        yields = policy.yields if machine.hosts == 1 else 0  # multihost/joining.py:_watch
        self.awake_s = spins * _SPIN_S + yields * _YIELD_S


class _StreamRun:
    """One stream while it runs."""

    def __init__(self, stream: EventStream, simulation: _Simulation) -> None:
        self._stream = stream
        self._simulation = simulation
        self._rank = stream.host * simulation.machine.ranks_per_host + stream.local_rank
        self._cores = simulation.cores[stream.host]
        self._next = 0
        self._clock = 0.0
        self._costs = StreamCosts(simulation.costs, self._rank)
        self.has_ended = False
        self.times = StreamTimes(stream.host, stream.local_rank, stream.name)

    def start(self) -> None:
        self._simulation.events.at(0.0, self._go)

    def where(self) -> str:
        """Return what it waits for, for an error."""
        stream = self._stream
        return f"rank {stream.local_rank} of host {stream.host} in {stream.events[self._next - 1]}"

    def _go(self, now: float) -> None:
        """Go on until something has to be decided in the order of time."""
        self._clock = max(self._clock, now)
        events, last = self._stream.events, len(self._stream.events)
        while self._next < last:
            event = events[self._next]
            self._next += 1
            if self._handle(event):
                return
        self.times.ended_s = self._clock
        self.has_ended = True

    def _handle(self, event: Event) -> bool:
        """Let an event happen; return whether the stream has to wait for it."""
        stream, simulation = self._stream, self._simulation
        if type(event) in _WORK:
            return self._work(event)
        if isinstance(event, SetFlag):
            simulation.flags[stream.host, stream.local_rank].set(event.value, self._clock)
            return False
        if isinstance(event, AwaitFlag):
            word = simulation.flags[stream.host, event.local_rank]
            return self._await(word, event.value, "rank", self._wake_up_flag)
        if isinstance(event, Begin):
            self._costs.begin(event)
            return False
        if isinstance(event, Signal):
            self._signal(event.number).set(1, self._clock)
            return False
        if isinstance(event, AwaitSignal):
            return self._await(self._signal(event.number), 1, "stream", self._wake_up_thread)
        return self._exchange(event)

    def _signal(self, number: int) -> _Word:
        return self._simulation.signals[self._stream.host, self._stream.local_rank, number]

    def _work(self, event: Event) -> bool:
        """Do this and the work that follows it; return whether that has to wait for a core."""
        events, computes = self._stream.events, isinstance(event, Compute)
        seconds = self._costs.seconds_of(event)
        while not computes and self._next < len(events):
            following = events[self._next]
            if type(following) not in _WORK or isinstance(following, Compute):
                break
            seconds += self._costs.seconds_of(following)
            self._next += 1
        if self._cores is None or seconds == 0.0:
            self._clock += seconds
            return False
        self._cores.run(
            self._clock,
            seconds,
            self._go,
            who=self,
            computes=computes,
            factor=1.0 if computes else self._costs.factor,
        )
        return True

    def _await(self, word: _Word, value: int, what: str, wake: Callable[[float], float]) -> bool:
        """Wait for a word; return whether it has not been set yet."""
        since = word.since(value)
        before = self._clock
        if since is not None:
            self._clock = wake(since) if since > before else max(before, since + self._latency(what))
            self.times.waited_s[what] += self._clock - before
            return False

        def go(time_s: float) -> None:
            resumed = max(before, wake(time_s))
            self.times.waited_s[what] += resumed - before
            self._simulation.events.at(resumed, self._go)

        word.waiting.append((value, go))
        return True

    def _latency(self, what: str) -> float:
        return self._costs.factor * self._simulation.host.flag_s if what == "rank" else 0.0

    def _wake_up_flag(self, time_s: float) -> float:
        """Return when this rank goes on after another has set the flag that it waits for."""
        host = self._simulation.host
        asleep = time_s - self._clock > self._costs.factor * self._simulation.awake_s
        return time_s + self._costs.factor * (max(host.wakeup_s, host.flag_s) if asleep else host.flag_s)

    def _wake_up_thread(self, time_s: float) -> float:
        return time_s + self._simulation.host.wakeup_s

    def _exchange(self, event: Event) -> bool:
        """Begin to send, or wait for messages, at this stream's time."""
        stream, events, network = self._stream, self._simulation.events, self._simulation.network
        began = self._clock
        if isinstance(event, Send):

            def send(now: float) -> None:
                network.send(now, stream.host, stream.local_rank, event, self._costs.factor)
                self._go(now)

            events.at(began, send)
            return True
        assert isinstance(event, Receive)

        def done(now: float) -> None:
            self.times.waited_s["message"] += max(0.0, now - began)
            events.at(max(now, began), self._go)

        factor = self._costs.factor
        events.at(
            began, lambda now: network.receive(now, stream.host, stream.local_rank, event, done, factor)
        )
        return True


_WORK = frozenset({Copy, LocalCopy, Fetch, PeerRead, WriteMiss, Reduce, Compute, Overhead})


def run(schedule: Schedule, machine: Machine) -> Run:
    """Simulate a schedule.

    Raises:
        DistError: streams wait for each other for ever, so the schedule is wrong.
    """
    simulation = _Simulation(schedule, machine)
    streams = [_StreamRun(stream, simulation) for stream in schedule.streams]
    for stream in streams:
        stream.start()
    simulation.events.run()
    if stuck := [stream.where() for stream in streams if not stream.has_ended]:
        raise DistError(f"the schedule does not end: {len(stuck)} streams wait, the first is {stuck[0]}")
    times = tuple(stream.times for stream in streams)
    seconds = max((each.ended_s for each in times), default=0.0)
    assert math.isfinite(seconds)
    return Run(seconds, times, simulation.network.messages, simulation.network.nbytes)


def _cores(schedule: Schedule, machine: Machine, events: EventQueue) -> dict[int, Cores | None]:
    """Return the cores of every recorded host: None where every thread has one."""
    host = machine.host
    slice_s = min(host.time_slice_s, _LONGEST_SLICE_S)
    # Ranks of one host wait by yielding: their core goes round all of them until one is ready. Between hosts
    # they sleep.
    switch_s = host.switch_at(machine.ranks_per_host * (machine.hosts if machine.shares_cores else 1))
    idle_s = switch_s if machine.hosts == 1 else 0.0
    threads: defaultdict[int, int] = defaultdict(int)
    for stream in schedule.streams:
        threads[0 if machine.shares_cores else stream.host] += 1
    if machine.hosts > 1:  # each rank has a transport thread
        for each in threads:
            threads[each] += len(
                {stream.local_rank for stream in schedule.streams if each in (0, stream.host)}
            )
    made = {
        each: None if number <= host.cores else Cores(events, host.cores, switch_s, slice_s, idle_s)
        for each, number in threads.items()
    }
    return {each: made[0 if machine.shares_cores else each] for each in schedule.recorded_hosts}
