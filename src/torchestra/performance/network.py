"""Messages between hosts, by LogGOPS: each rank's transport thread, each host's link in both directions.

A message of k bytes keeps the sender's transport thread for o + kO and the link for g + kG, at the same time;
its first byte arrives L later, keeps the receiver's link for g + kG, and the receiver's transport thread for
o + kO. Links and threads take one message after the other. The network between the links carries all
that they can.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchestra.performance.calibration import LinkClass
from torchestra.performance.cores import Action, Cores, EventQueue
from torchestra.performance.machine import Machine
from torchestra.performance.schedule import Receive, Schedule, Send

__all__ = ["Network"]

Times = npt.NDArray[np.float64]
_End = tuple[int, int]
_Message = tuple[int, int, int]
"""The host, rail and tag of messages that come in."""


@dataclass
class _Inbox:
    """The messages of one tag for one rank.

    Attributes:
        expected: how many come, and how many of them from hosts that are not recorded.
        left: how many have not come yet.
        last_s: when the last one came.
        waiting: called when the last has come.
    """

    expected: int = 0
    unrecorded: int = 0
    left: int = 0
    last_s: float = 0.0
    waiting: Callable[[float], None] | None = None


class Network:
    """The links of a machine while a schedule runs on it.

    Args:
        cores: by host.

    Attributes:
        messages, nbytes: what the recorded hosts have sent.
    """

    def __init__(
        self, schedule: Schedule, machine: Machine, events: EventQueue, cores: dict[int, Cores | None]
    ) -> None:
        self._events = events
        self._machine = machine
        self._cores = cores
        self._recorded = frozenset(schedule.recorded_hosts)
        self._stand_in = schedule.stands_for_others
        self._sent_until: defaultdict[int, float] = defaultdict(float)
        self._received_until: defaultdict[int, float] = defaultdict(float)
        self._busy_until: defaultdict[_End, float] = defaultdict(float)
        self._inboxes: defaultdict[_Message, _Inbox] = defaultdict(_Inbox)
        self._classes: dict[tuple[int, float], LinkClass] = {}
        self._sends_left: Counter[tuple[int, int]] = Counter()
        self._mirrored: defaultdict[tuple[int, int], list[tuple[int, Times]]] = defaultdict(list)
        self.messages = self.nbytes = 0
        for lane in schedule.lanes:
            for event in lane.events:
                if isinstance(event, Receive):
                    inbox = self._inboxes[lane.host, lane.local_rank, event.tag]
                    others = sum(host not in self._recorded for host in event.hosts)
                    inbox.expected += len(event.hosts)
                    inbox.left += len(event.hosts)
                    inbox.unrecorded += others
                elif isinstance(event, Send) and lane.host == self._stand_in:
                    self._sends_left[lane.local_rank, event.tag] += 1

    def send(self, now: float, host: int, rail: int, event: Send, factor: float = 1.0) -> None:
        """Begin to send, at ``now``; all that is done for it takes ``factor`` times as long."""
        number, nbytes, link = len(event.hosts), event.nbytes, self._class(event.nbytes, factor)
        self.messages += number
        self.nbytes += number * nbytes
        cost = link.send_overhead_s + nbytes * link.send_overhead_per_byte_s
        start = max(now, self._busy_until[host, rail])
        gap = self._gap(host, nbytes, link)
        index = np.arange(1, number + 1)
        first = max(start + link.send_overhead_s, self._sent_until[host])
        left = np.maximum(start + cost * index, first + gap * index)
        self._work(start, host, rail, cost * number, factor)
        self._sent_until[host] = float(left[-1])
        begins = left - gap + link.latency_s
        for position, other in enumerate(event.hosts):
            if other in self._recorded:
                self._arrive(other, rail, event.tag, nbytes, begins[position : position + 1], factor)
        if host == self._stand_in:
            elsewhere = np.fromiter((other not in self._recorded for other in event.hosts), bool, number)
            self._mirror(rail, event, begins[elsewhere], factor)

    def receive(
        self, now: float, host: int, rail: int, event: Receive, done: Action, factor: float = 1.0
    ) -> None:
        """Call ``done`` with the time at which all messages of a tag have come, or with ``now``."""
        inbox = self._inboxes[host, rail, event.tag]
        if inbox.unrecorded and (rail, event.tag) not in self._sends_left:
            # The host that stands for others has nothing to send here: its piece is empty. Others have.
            link, number = self._class(event.nbytes, factor), inbox.unrecorded
            inbox.unrecorded = 0
            begins = np.full(number, now + link.send_overhead_s + link.latency_s)
            self._arrive(host, rail, event.tag, event.nbytes, begins, factor)
        if inbox.left:
            inbox.waiting = done
        else:
            done(max(now, inbox.last_s))

    def _class(self, nbytes: int, factor: float) -> LinkClass:
        """Return the times of a message in an operation that takes ``factor`` times as long as its parts."""
        assert self._machine.link is not None
        found = self._classes.get((nbytes, factor))
        if found is None:
            found = self._classes[nbytes, factor] = self._machine.link.of(nbytes).times(factor)
        return found

    def _gap(self, host: int, nbytes: int, link: LinkClass) -> float:
        return link.gap_s + nbytes * link.gap_per_byte_s / self._machine.slow_links.get(host, 1.0)

    def _mirror(self, rail: int, event: Send, begins: Times, factor: float) -> None:
        """Let the hosts that are not recorded send what the one that stands for them has sent."""
        key = rail, event.tag
        self._mirrored[key].append((event.nbytes, begins))
        self._sends_left[key] -= 1
        if self._sends_left[key]:
            return
        parts = self._mirrored.pop(key)
        times = np.sort(np.concatenate([begins for _, begins in parts]))
        longest = max(nbytes for nbytes, _ in parts)
        for host in self._recorded:
            number = self._inboxes[host, rail, event.tag].unrecorded
            if number and len(times):
                self._arrive(host, rail, event.tag, longest, np.sort(np.resize(times, number)), factor)

    def _arrive(self, host: int, rail: int, tag: int, nbytes: int, begins: Times, factor: float) -> None:
        """Have messages come in, whose first bytes are there at these times."""
        self._events.at(float(begins[0]), lambda now: self._take(host, rail, tag, nbytes, begins, factor))

    def _take(self, host: int, rail: int, tag: int, nbytes: int, begins: Times, factor: float) -> None:
        link = self._class(nbytes, factor)
        gap = self._gap(host, nbytes, link)
        index = np.arange(len(begins))
        free = np.maximum(begins, self._received_until[host])
        ends = np.maximum.accumulate(free - gap * index) + gap * (index + 1)
        self._received_until[host] = last = float(ends[-1])
        cost = link.receive_overhead_s + nbytes * link.receive_overhead_per_byte_s
        start = max(float(begins[0]), self._busy_until[host, rail])

        def done(end: float) -> None:
            self._events.at(
                max(end, last + link.receive_overhead_s),
                lambda now: self._put(host, rail, tag, now, len(begins)),
            )

        self._work(start, host, rail, cost * len(begins), factor, done)

    def _work(
        self,
        start: float,
        host: int,
        rail: int,
        seconds: float,
        factor: float,
        done: Callable[[float], None] = lambda end: None,
    ) -> None:
        """Keep the transport thread of a rank, and a core."""
        self._busy_until[host, rail] = start + seconds
        cores = self._cores[host]
        if cores is None:
            done(start + seconds)
            return

        def finish(end: float) -> None:
            self._busy_until[host, rail] = max(self._busy_until[host, rail], end)
            done(end)

        cores.run(start, seconds, finish, who=(host, rail), factor=factor)

    def _put(self, host: int, rail: int, tag: int, now: float, number: int) -> None:
        inbox = self._inboxes[host, rail, tag]
        inbox.left -= number
        inbox.last_s = max(inbox.last_s, now)
        if inbox.left == 0 and inbox.waiting is not None:
            inbox.waiting(inbox.last_s)
