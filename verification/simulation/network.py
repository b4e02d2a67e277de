"""A simulated network: what one machine sends another comes late, in bursts, or not while they are cut off.

All connections of the product are TCP's, so bytes of one connection neither vanish nor overtake each other;
different connections do. While two machines are cut off from each other what they send waits, and comes some
time after the network is repaired, for TCP tries again at longer and longer intervals. A connection can be
*reset* in between (a firewall's table, a router): then what is under way is lost, and both ends are told.
A machine that loses its power says nothing to anybody.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from verification.simulation.scheduler import Process, Scheduler, Task

_LOCAL_SECONDS = 20e-6


class Quality(NamedTuple):
    """How good a run's network is, in seconds.

    Attributes:
        delay: the usual way from one machine to another.
        jitter: how much longer some bytes take, each time up to so much.
        burst, bursts: how long some bytes are late, and how likely each time.
        paths: by how much the way of some connections is longer than that of others between two machines,
            each direction for itself: so what is sent over one is overtaken again and again.
    """

    delay: float = 0.0002
    jitter: float = 0.0001
    burst: float = 0.3
    bursts: float = 0.0
    paths: float = 0.0


class Source:
    """Something whose readiness threads wait for: an end of a connection, a descriptor."""

    def __init__(self) -> None:
        self.waiting: list[Task] = []
        self.watchers: dict[Watch, None] = {}

    def is_readable(self) -> bool:
        return False

    def is_writable(self) -> bool:
        return False

    def await_change(self, run: Scheduler, timeout_s: float) -> None:
        """Wait until it changes, or for so long."""
        task = run.me()
        self.waiting.append(task)
        run.wait(timeout_s)
        if task in self.waiting:
            self.waiting.remove(task)

    def await_reading(self, run: Scheduler, timeout_s: float) -> None:
        """Wait until it can be read, or for so long."""
        deadline = run.now + timeout_s
        while True:
            run.seam()
            left = deadline - run.now
            if self.is_readable() or left <= 0:
                run.look()
                return
            self.await_change(run, left)

    def changed(self, run: Scheduler) -> None:
        """Wake the threads that wait for it."""
        for watch in self.watchers:
            watch.note_change(run, self)
        waiting, self.waiting = self.waiting, []
        for task in waiting:
            run.wake(task)


Ready = list[tuple[Source, bool, bool]]
"""Sources that are ready, and whether to read and to write."""


class Watch(Source):
    """Sources to wait for together, as with epoll: only those that have changed are looked at.

    It can be watched itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watched: dict[Source, tuple[int, bool, bool]] = {}
        self._changed: dict[Source, None] = {}  # those that may be ready
        self._numbers = itertools.count()

    def add(self, source: Source, *, reads: bool, writes: bool) -> None:
        """Watch a source, or watch it for something else."""
        known = self._watched.get(source)
        self._watched[source] = next(self._numbers) if known is None else known[0], reads, writes
        self._changed[source] = None
        source.watchers[self] = None

    def remove(self, source: Source) -> None:
        """Watch a source no more."""
        del self._watched[source]
        self._changed.pop(source, None)
        del source.watchers[self]

    def note_change(self, run: Scheduler, source: Source) -> None:
        """Look at a source when it is asked next, and wake the threads that wait."""
        _, reads, writes = self._watched[source]
        if reads or writes:
            self._changed[source] = None
            self.changed(run)

    def is_readable(self) -> bool:
        return bool(self.ready())

    def ready(self) -> Ready:
        """Return what is ready, in the order in which it was added."""
        if not self._changed:
            return []
        found = []
        for source in list(self._changed):
            number, reads, writes = self._watched[source]
            may_read, may_write = reads and source.is_readable(), writes and source.is_writable()
            if may_read or may_write:
                found.append((number, source, may_read, may_write))
            else:
                del self._changed[source]
        return [(source, may_read, may_write) for _, source, may_read, may_write in sorted(found)]

    def wait(self, run: Scheduler, timeout_s: float | None) -> Ready:
        """Wait until something is ready, or for so long; return what is."""
        deadline = None if timeout_s is None else run.now + timeout_s
        while True:
            run.seam()
            ready = self.ready()
            left = None if deadline is None else deadline - run.now
            if ready or (left is not None and left <= 0):
                run.look()
                return ready
            task = run.me()
            self.waiting.append(task)
            run.wait(left)
            if task in self.waiting:
                self.waiting.remove(task)


class Flow:
    """One direction of a connection: what is put in comes out in this order, later.

    Attributes:
        sender, receiver: machines.
    """

    def __init__(self, network: Network, sender: int, receiver: int) -> None:
        self._network, self.sender, self.receiver = network, sender, receiver
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._last = 0.0
        self._is_timed = False
        self.is_cut = False
        paths = network.quality.paths if sender != receiver else 0.0
        self._detour = paths * network.choices.random() if paths else 0.0

    def put(self, action: Callable[[], None]) -> None:
        """Have something happen at the other end."""
        if self.is_cut:
            return
        network = self._network
        seconds = self._detour + network.delay(self.sender, self.receiver)
        self._last = max(self._last, network.run.now + seconds)
        self._queue.append((self._last, action))
        self._time()

    def cut(self, *, all_at_once: bool = True) -> None:
        """Lose what is under way: all of it, or what was sent after some moment."""
        self.is_cut = True
        kept = 0 if all_at_once else self._network.choices.randint(0, len(self._queue))
        while len(self._queue) > kept:
            self._queue.pop()

    def end(self, action: Callable[[], None]) -> None:
        """Have the other end learn that nothing more comes, right after all else."""
        network = self._network
        self._last = max(self._last, network.run.now + self._detour + network.quality.delay)
        self._queue.append((self._last, action))
        self.is_cut = True
        self._time()

    def _time(self) -> None:
        if self._queue and not self._is_timed:
            self._is_timed = True
            self._network.run.call_later(self._queue[0][0] - self._network.run.now, self._arrive)

    def _arrive(self) -> None:
        network = self._network
        self._is_timed = False
        if self.sender in network.dark or self.receiver in network.dark:
            self._queue.clear()
            return
        if not network.joins(self.sender, self.receiver):
            network.held.append(self)
            return
        while self._queue and self._queue[0][0] <= network.run.now:
            self._queue.popleft()[1]()
        self._time()

    def resume(self, seconds: float) -> None:
        """Go on after a cut, when TCP tries again."""
        self._is_timed = True
        self._network.run.call_later(seconds, self._arrive)


class Network:
    """The network between machines, which are numbers; an address is ``10.0.0.N``.

    Attributes:
        cuts: pairs (sender, receiver) of machines that cannot reach each other now, and since when.
        dark: machines that have lost their power.
        slow: by pair, how many seconds longer everything takes.
        bound: what listens, by address and port.
        connections: those that can be reset, by pair of machines.
    """

    def __init__(self, run: Scheduler, seed: object, quality: Quality) -> None:
        self.run, self.quality = run, quality
        self.choices = random.Random(f"{seed} network")
        self.cuts: dict[tuple[int, int], float] = {}
        self.dark: set[int] = set()
        self.slow: dict[tuple[int, int], float] = {}
        self.bound: dict[tuple[str, int], object] = {}
        self.connections: list[tuple[int, int, Callable[[], None]]] = []
        self.held: list[Flow] = []
        self._ports = 40000

    @staticmethod
    def address(host: int) -> str:
        return f"10.0.0.{host + 1}"

    @staticmethod
    def host(address: str) -> int:
        """Return the machine with an address; -1 if there is none."""
        start, _, number = address.rpartition(".")
        return int(number) - 1 if start == "10.0.0" else -1

    def new_port(self) -> int:
        self._ports += 1
        return self._ports

    def flow(self, sender: Process, receiver: Process) -> Flow:
        """Return a way from one process to another."""
        return Flow(self, sender.host, receiver.host)

    def joins(self, sender: int, receiver: int) -> bool:
        """Return whether what one machine sends can reach another one now."""
        return sender == receiver or (
            (sender, receiver) not in self.cuts and not {sender, receiver} & self.dark
        )

    def delay(self, sender: int, receiver: int) -> float:
        """Return how long some bytes take."""
        if sender == receiver:
            return _LOCAL_SECONDS
        quality, choices = self.quality, self.choices
        seconds = quality.delay + quality.jitter * choices.random() + self.slow.get((sender, receiver), 0.0)
        if quality.bursts and choices.random() < quality.bursts:
            seconds += quality.burst * choices.random()
        return seconds

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Let nothing through between some pairs, in this direction, until :meth:`heal`."""
        self.cuts = {**dict.fromkeys(pairs, self.run.now), **self.cuts}
        self.run.note(f"network cut: {sorted(self.cuts)}")

    def heal(self) -> None:
        """Let everything through."""
        if not self.cuts:
            return
        self.run.note("network repaired")
        cuts, self.cuts = self.cuts, {}
        held, self.held = self.held, []
        for flow in held:  # TCP tries again after as long as it has tried, at most
            lasted = self.run.now - cuts.get((flow.sender, flow.receiver), self.run.now)
            flow.resume(lasted * self.choices.random())

    def reset(self, one: int, other: int) -> None:
        """Reset the connections between two machines."""
        self.run.note(f"connections between machines {one} and {other} are reset")
        hit = [each for each in self.connections if {each[0], each[1]} == {one, other}]
        self.connections = [each for each in self.connections if each not in hit]
        for _, _, action in hit:
            action()

    def lose_power(self, host: int) -> None:
        """Turn a machine off: nobody hears of it. Its processes are to crash, too."""
        self.run.note(f"machine {host} loses its power")
        self.dark.add(host)
