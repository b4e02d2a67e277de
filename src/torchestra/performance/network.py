"""Messages between hosts, by LogGOPS: each rank's transport thread, each host's link in both directions.

A message of k bytes keeps the sender's transport thread for o + kO and the link for g + kG, at the same time;
its first byte arrives L later, keeps the receiver's link for g + kG, and the receiver's transport thread for
o + kO. Links and threads take one message after the other. The network between the links carries all
that they can.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torchestra.performance.calibration import LinkClass
from torchestra.performance.cores import Action, Cores, EventQueue
from torchestra.performance.machine import Machine
from torchestra.performance.schedule import EventStream, Receive, Schedule, Send

_End = tuple[int, int]
_Message = tuple[int, int, int]
"""The host, local rank and tag of messages that come in."""


@dataclass
class _Inbox:
    """The messages of one tag for one rank.

    Attributes:
        expected: how many come.
        unrecorded: how many of them from hosts that are not recorded.
        numbers: of those that recorded hosts send, among what these send with the tag to anyone.
        left: how many have not come yet.
        last_s: when the last one came.
        waiting: called when the last has come.
    """

    expected: int = 0
    unrecorded: int = 0
    numbers: set[int] = field(default_factory=set)
    left: int = 0
    last_s: float = 0.0
    waiting: Callable[[float], None] | None = None

    def from_others(self, number: int, of: int) -> int:
        """Return how many come from hosts without streams when the one that stands for them sends one.

        Every host begins with the next one. So the messages that a host gets have different numbers with
        their senders, and others do not send those that recorded hosts send.

        Args:
            number, of: which message of how many it is.
        """
        if number in self.numbers:
            return 0
        taken = sum(each < number for each in self.numbers)
        free = of - sum(each < of for each in self.numbers)
        before = number - taken
        return self.unrecorded * (before + 1) // free - self.unrecorded * before // free


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
        # By local rank and tag, what the host that stands for others sends: in all, and by now.
        self._sends: Counter[tuple[int, int]] = Counter()
        self._sent: Counter[tuple[int, int]] = Counter()
        self.messages = self.nbytes = 0
        for stream in schedule.streams:
            for event in stream.events:
                if isinstance(event, Receive):
                    inbox = self._inboxes[stream.host, stream.local_rank, event.tag]
                    others = sum(host not in self._recorded for host in event.hosts)
                    inbox.expected += len(event.hosts)
                    inbox.left += len(event.hosts)
                    inbox.unrecorded += others
        for stream in schedule.streams:
            self._number_messages(stream)

    def _number_messages(self, stream: EventStream) -> None:
        """Note which of the messages that a rank sends with a tag go to which recorded host."""
        numbers: Counter[int] = Counter()
        for event in stream.events:
            if isinstance(event, Send):
                for number, other in enumerate(event.hosts, numbers[event.tag]):
                    if other in self._recorded:
                        self._inboxes[other, stream.local_rank, event.tag].numbers.add(number)
                numbers[event.tag] += len(event.hosts)
        if stream.host == self._stand_in:
            for tag, number in numbers.items():
                self._sends[stream.local_rank, tag] += number

    def send(self, now: float, host: int, local_rank: int, event: Send, factor: float = 1.0) -> None:
        """Begin to send, at ``now``; all that is done for it takes ``factor`` times as long."""
        number, nbytes, link = len(event.hosts), event.nbytes, self._class(event.nbytes, factor)
        self.messages += number
        self.nbytes += number * nbytes
        cost = link.send_overhead_s + nbytes * link.send_overhead_per_byte_s
        gap = self._gap(host, nbytes, link)
        start = max(now, self._busy_until[host, local_rank])
        self._work(start, host, local_rank, cost * number, factor)

        def leave(index: int, now: float) -> None:
            """Give a message to the link, which other ranks use as well, and go on to the next."""
            begin = max(now, self._sent_until[host])
            self._sent_until[host] = begin + gap
            left = max(start + cost * (index + 1), begin + gap)
            self._pass_on(host, local_rank, event, index, left - gap + link.latency_s, factor)
            if index + 1 < number:
                self._events.at(start + cost * (index + 1) + link.send_overhead_s, partial(leave, index + 1))

        if number:
            self._events.at(start + link.send_overhead_s, partial(leave, 0))

    def receive(
        self, now: float, host: int, local_rank: int, event: Receive, done: Action, factor: float = 1.0
    ) -> None:
        """Call ``done`` with the time at which all messages of a tag have come, or with ``now``."""
        inbox = self._inboxes[host, local_rank, event.tag]
        if inbox.unrecorded and not self._sends[local_rank, event.tag]:
            # The host that stands for others has nothing to send here: its piece is empty. Others have.
            link, number = self._class(event.nbytes, factor), inbox.unrecorded
            inbox.unrecorded = 0
            for _ in range(number):
                at_s = now + link.send_overhead_s + link.latency_s
                self._arrive(host, local_rank, event.tag, event.nbytes, at_s, factor)
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

    def _pass_on(
        self, host: int, local_rank: int, event: Send, index: int, begin: float, factor: float
    ) -> None:
        """Let one of the messages of ``event`` come, whose first byte is there at ``begin``.

        If it is from the host that stands for others, one comes from each of those as well.
        """
        other = event.hosts[index]
        if other in self._recorded:
            self._arrive(other, local_rank, event.tag, event.nbytes, begin, factor)
        if host == self._stand_in:
            key = local_rank, event.tag
            number = self._sent[key]
            self._sent[key] = number + 1
            for receiver in self._recorded:
                for _ in range(
                    self._inboxes[receiver, local_rank, event.tag].from_others(number, self._sends[key])
                ):
                    self._arrive(receiver, local_rank, event.tag, event.nbytes, begin, factor)

    def _arrive(self, host: int, local_rank: int, tag: int, nbytes: int, begin: float, factor: float) -> None:
        """Have a message come in, whose first byte is there at ``begin``."""
        self._events.at(begin, lambda now: self._take(host, local_rank, tag, nbytes, now, factor))

    def _take(self, host: int, local_rank: int, tag: int, nbytes: int, now: float, factor: float) -> None:
        link = self._class(nbytes, factor)
        self._received_until[host] = last = max(now, self._received_until[host]) + self._gap(
            host, nbytes, link
        )
        cost = link.receive_overhead_s + nbytes * link.receive_overhead_per_byte_s

        def done(end: float) -> None:
            self._events.at(
                max(end, last + link.receive_overhead_s), lambda now: self._put(host, local_rank, tag, now)
            )

        self._work(max(now, self._busy_until[host, local_rank]), host, local_rank, cost, factor, done)

    def _work(
        self,
        start: float,
        host: int,
        local_rank: int,
        seconds: float,
        factor: float,
        done: Callable[[float], None] = lambda end: None,
    ) -> None:
        """Keep the transport thread of a rank, and a core."""
        self._busy_until[host, local_rank] = start + seconds
        cores = self._cores[host]
        if cores is None:
            done(start + seconds)
            return

        def finish(end: float) -> None:
            self._busy_until[host, local_rank] = max(self._busy_until[host, local_rank], end)
            done(end)

        cores.run(start, seconds, finish, who=(host, local_rank), factor=factor)

    def _put(self, host: int, local_rank: int, tag: int, now: float) -> None:
        inbox = self._inboxes[host, local_rank, tag]
        inbox.left -= 1
        inbox.last_s = max(inbox.last_s, now)
        if inbox.left == 0 and inbox.waiting is not None:
            inbox.waiting(inbox.last_s)
