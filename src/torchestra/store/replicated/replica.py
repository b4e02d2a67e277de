"""Viewstamped Replication: how replicas of a state machine stay alike though some of them are lost.

The protocol is that of Liskov and Cowling, "Viewstamped Replication Revisited" (2012). This is one replica as
a pure state machine: each method takes what has happened and returns the messages to send, with their
receivers. It knows neither sockets nor threads nor clocks, so that tests can lose, delay, repeat and reorder
messages.

In view v, replica v mod n is the *primary*. It appends operations to its log and sends them to the others
(PREPARE); what a majority, itself included, has in its log is *committed*, and is executed in the log's
order. A replica that misses the primary proposes the next view (START_VIEW_CHANGE). One that has heard this
from a majority tells the new primary how far its log goes (DO_VIEW_CHANGE), and that primary, having heard so
from a majority, takes the log of the one with the latest view, and of these the longest. The others then
fetch its log (GET_STATE, NEW_STATE), as does a replica that finds a gap in its own.

Departures from the paper, all for simplicity: logs travel only on request, never in DO_VIEW_CHANGE;
START_VIEW and COMMIT are a PREPARE without entries; there are no checkpoints, because the executed state is
at hand to be sent: a log keeps some executed entries, for those that are a little behind, and others get the
state itself.

Invariants:

1. A log up to its commit number is a prefix of every primary's log in later views. What is committed was in
   the logs of a majority in some view; whoever forms a later view hears from one of these, and takes a log
   that is at least as late. Logs of one last normal view are prefixes of one another.
2. A log after the commit number is replaced only together with the last normal view: by NEW_STATE, as one
   step. (To cut it first and fetch later would lose what a majority relied on.)
3. A replica in a view change takes no PREPARE of an earlier view, so nothing is committed behind its back.

A replica that was restarted remembers nothing, so it must not vote as if it had never promised anything. It
asks the others (RECOVERY), and takes the state of the latest view's primary once enough have answered that
one of them knows of every view it can have taken part in. Messages from before its restart may still arrive;
the paper counts them, which is wrong (Michael, Ports, Sharma, Szekeres: "Recovering Shared Objects Without
Stable Storage", 2017). As they propose, every message bears what its sender knows of all replicas'
*incarnations*, and nothing of an earlier life is counted.

That also makes it unnecessary for safety that a majority has sent START_VIEW_CHANGE before anyone votes.
What the paper fears: R votes, crashes, recovers in the old view, and commits there what its old vote does not
tell. But n - q + 1 others (q is a majority) have answered R's recovery in the old view, and one of them is
among the other q - 1 voters, for there are n - 1 others in all. It answered before it voted, so its vote
bears R's later life (as do those of later lives of its own: the answers to two recoveries have a replica in
common), and R's old vote is not counted. The wait remains because with it fewer view changes collide.

A replica may be *replaced* by one on another host, though nobody can know whether it is lost or only cut
off. That is the recovery of the same replica: the new one has its index, a greater incarnation, and nothing
else. An old one that lives does no harm. Every message of the new one bears its incarnation, and so does all
that is sent by whoever has taken such a message, or one of these; an old one that takes one does nothing any
more. So among replicas nothing that the old one does is a consequence of what the new one has done: each run
has the same messages as one in which the old one had crashed before the new one began, and in which clients
asked at other times. In that run all logs agree, and so they do here. Nor is a client told of less than
others were told before it asked: its request would have to stand in the log before theirs, but it was
appended after they had been committed. :meth:`Replica.lost` tells the primary which replica may be replaced;
the rest is in server.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Protocol

from torchestra.store.replicated.messages import Entry, Kind, Message

HEARTBEAT_S = 0.2
"""How often a primary is heard."""
VIEW_CHANGE_TIMEOUT_S = 2.0
"""After how long a silent primary is given up."""
_KEPT_ENTRIES = 1024
_KEPT_BYTES = 1 << 28

Messages = list[tuple[int, Message]]
"""Receivers and messages."""


class Status(enum.Enum):
    """What a replica is doing."""

    NORMAL = enum.auto()
    VIEW_CHANGE = enum.auto()
    RECOVERING = enum.auto()
    REPLACED = enum.auto()  # there is a later incarnation of this replica: this one does nothing any more


class StateMachine(Protocol):
    """What is replicated. All replicas execute the same entries in the same order."""

    def execute(self, op: int, entry: Entry) -> object:
        """Carry out the entry with number ``op``."""

    def snapshot(self) -> tuple[bytes, ...]:
        """Return all it holds."""

    def restore(self, snapshot: tuple[bytes, ...]) -> None:
        """Hold what ``snapshot`` does, and nothing else."""


class Replica:
    """One replica.

    Args:
        index: which of them this is.
        count: how many there are.
        machine: this replica's copy of what is replicated.
        incarnation: larger than that of any earlier life of this replica.
        recovering: an earlier life may have taken part. If False, this is the first one.
        now: the time, in seconds since any moment.

    Attributes:
        view: the view that it is in, or about to enter.
        status: what it is doing.
        log: the entries ``log_start + 1`` to ``op``.
        commit: the number of the last entry that it has executed.
    """

    def __init__(
        self,
        index: int,
        count: int,
        machine: StateMachine,
        incarnation: int,
        *,
        recovering: bool = False,
        now: float = 0.0,
    ) -> None:
        self.index, self.count = index, count
        self.majority = count // 2 + 1
        self.view = self.normal_view = 0
        self.status = Status.RECOVERING if recovering else Status.NORMAL
        self.log: list[Entry] = []
        self.log_start = self.commit = 0
        self.incarnations = [0] * count
        self.incarnations[index] = incarnation
        self._machine = machine
        self._executed_bytes = 0  # of the entries in the log that have been executed
        self._acknowledged = [0] * count  # by replica, up to which entry it has this view's log
        self._started: set[int] = set()  # who has sent START_VIEW_CHANGE for this view
        self._votes: dict[int, Message] = {}  # DO_VIEW_CHANGE for this view, if this is its primary
        self._responses: dict[int, Message] = {}  # to RECOVERY
        self._now = self._since = self._last_heartbeat = now
        self._heard = [now] * count
        self._asked = float("-inf")
        self._outbox: Messages = []
        self._handlers: dict[Kind, Callable[[Message], None]] = {
            Kind.PREPARE: self._on_prepare,
            Kind.PREPARE_OK: self._on_prepare_ok,
            Kind.START_VIEW_CHANGE: self._on_start_view_change,
            Kind.DO_VIEW_CHANGE: self._on_do_view_change,
            Kind.GET_STATE: self._on_get_state,
            Kind.NEW_STATE: self._on_new_state,
            Kind.RECOVERY: self._on_recovery,
            Kind.RECOVERY_RESPONSE: self._on_recovery_response,
        }

    @property
    def op(self) -> int:
        """Return the number of the last entry in the log."""
        return self.log_start + len(self.log)

    @property
    def primary(self) -> int:
        """Return the index of the primary of the current view."""
        return self.view % self.count

    @property
    def is_normal(self) -> bool:
        """Return whether it is neither changing the view nor recovering."""
        return self.status is Status.NORMAL

    @property
    def is_primary(self) -> bool:
        """Return whether this is the primary, and may take requests."""
        return self.status is Status.NORMAL and self.primary == self.index

    @property
    def silent(self) -> list[int]:
        """Return the replicas that have not been heard lately."""
        return [
            other
            for other in range(self.count)
            if other != self.index and self._now - self._heard[other] > VIEW_CHANGE_TIMEOUT_S
        ]

    def lost(self, silent_s: float) -> int | None:
        """Return a replica that the primary has not heard for longer than a time; None if there is none."""
        heard = {other: self._heard[other] for other in range(self.count) if other != self.index}
        other = min(heard, key=lambda each: heard[each], default=None)
        return other if other is not None and self._now - heard[other] > silent_s else None

    def expect(self, replica: int) -> None:
        """Count a replica's silence from now on: another one is about to take its place."""
        self._heard[replica] = self._now

    @property
    def is_cut_off(self) -> bool:
        """Return whether it has not heard from a majority lately, so that nothing can be committed here."""
        return len(self.silent) > self.count - self.majority

    # -- what happens

    def submit(self, entry: Entry) -> Messages:
        """Append an operation, which must be done by the primary; it has the number :attr:`op` then."""
        assert self.is_primary
        self.log.append(entry)
        self._broadcast(Kind.PREPARE, entries=(entry,))
        self._commit_what_a_majority_has()
        return self._sent()

    def on_message(self, message: Message) -> Messages:
        """Take a message of another replica."""
        sender = message.sender
        if len(message.incarnations) != self.count or not 0 <= sender < self.count or sender == self.index:
            return []
        self._note_incarnations(message.incarnations)
        if message.incarnations[sender] < self.incarnations[sender] or self.status is Status.REPLACED:
            return []
        self._heard[sender] = self._now
        self._handlers[message.kind](message)
        return self._sent()

    def on_tick(self, now: float) -> Messages:
        """Do what is due at a time; to be called at least twice in each :data:`HEARTBEAT_S`."""
        self._now = now
        if now - self._last_heartbeat >= HEARTBEAT_S:
            self._last_heartbeat = now
            self._repeat()
        is_waiting = self.status is Status.VIEW_CHANGE or (
            self.status is Status.NORMAL and not self.is_primary
        )
        if is_waiting and now - self._since > VIEW_CHANGE_TIMEOUT_S:
            self._change_view(self.view + 1)
        return self._sent()

    def on_disconnect(self, replica: int) -> Messages:
        """Take the end of the connection from another replica, whose process has probably ended."""
        if self.status is Status.NORMAL and replica == self.primary != self.index:
            self._change_view(self.view + 1)
        return self._sent()

    # -- normal operation

    def _on_prepare(self, message: Message) -> None:
        if self.status is Status.RECOVERING or message.view < self.view:
            return
        if message.view > self.view or self.status is not Status.NORMAL:
            self._get_state(message)
            return
        self._since = self._now
        first = message.op - len(message.entries)
        if first > self.op:
            self._get_state(message)
            return
        self.log += message.entries[self.op - first :]
        self._execute_to(min(message.commit, self.op))
        self._send(message.sender, Kind.PREPARE_OK)

    def _on_prepare_ok(self, message: Message) -> None:
        if self.is_primary and message.view == self.view:
            acknowledged = self._acknowledged
            acknowledged[message.sender] = max(acknowledged[message.sender], message.op)
            self._commit_what_a_majority_has()

    def _commit_what_a_majority_has(self) -> None:
        self._acknowledged[self.index] = self.op
        self._execute_to(sorted(self._acknowledged, reverse=True)[self.majority - 1])

    def _execute_to(self, op: int) -> None:
        while self.commit < op:
            self.commit += 1
            entry = self.log[self.commit - self.log_start - 1]
            self._executed_bytes += entry.size
            self._machine.execute(self.commit, entry)
        if self.commit - self.log_start > 2 * _KEPT_ENTRIES:
            self._forget_to(self.commit - _KEPT_ENTRIES)
        if self._executed_bytes > _KEPT_BYTES:
            self._forget_to(self.commit)

    def _forget_to(self, op: int) -> None:
        """Drop executed entries from the log; who needs them gets the state."""
        dropped = self.log[: op - self.log_start]
        self._executed_bytes -= sum(entry.size for entry in dropped)
        del self.log[: len(dropped)]
        self.log_start = op

    # -- view change

    def _change_view(self, view: int) -> None:
        self.view, self.status = view, Status.VIEW_CHANGE
        self._since, self._asked = self._now, float("-inf")
        self._started, self._votes = {self.index}, {}
        self._broadcast(Kind.START_VIEW_CHANGE)
        self._vote()

    def _takes_part_in(self, view: int) -> bool:
        """Begin a newer view's change; return whether this replica is in the change to that view."""
        if self.status is Status.RECOVERING:
            return False
        if view > self.view:
            self._change_view(view)
        return view == self.view and self.status is Status.VIEW_CHANGE

    def _on_start_view_change(self, message: Message) -> None:
        if self._takes_part_in(message.view):
            self._started.add(message.sender)
            self._vote()

    def _vote(self) -> None:
        """Tell the new primary how far this log goes, once a majority is known to be in the view change."""
        if len(self._started) < self.majority:
            return
        if self.primary != self.index:
            self._send(self.primary, Kind.DO_VIEW_CHANGE)
        else:
            self._votes[self.index] = self._message(Kind.DO_VIEW_CHANGE)
            self._take_votes()

    def _on_do_view_change(self, message: Message) -> None:
        if self._takes_part_in(message.view):
            self._votes[message.sender] = message
            self._take_votes()

    def _best_vote(self) -> Message | None:
        if len(self._votes) < self.majority or self.index not in self._votes:
            return None
        return max(self._votes.values(), key=lambda vote: (vote.normal_view, vote.op))

    def _take_votes(self) -> None:
        best = self._best_vote()
        if best is None:
            return
        if (best.normal_view, best.op) == (self.normal_view, self.op):
            self._start_view()
        else:
            self._get_state(best)

    def _start_view(self) -> None:
        committed = max(vote.commit for vote in self._votes.values())
        self._become_normal(self.view)
        self._heard = [self._now] * self.count  # who was no primary has not heard them all
        self._execute_to(committed)
        self._broadcast(Kind.PREPARE)
        self._commit_what_a_majority_has()

    def _become_normal(self, view: int) -> None:
        self.view = self.normal_view = view
        self.status = Status.NORMAL
        self._acknowledged = [0] * self.count
        self._started, self._votes, self._responses = set(), {}, {}
        self._since, self._asked = self._now, float("-inf")

    # -- state transfer

    def _get_state(self, source: Message) -> None:
        """Ask the sender of a message for the log of its view; once, until the next heartbeat."""
        if self._now - self._asked < HEARTBEAT_S:
            return
        self._asked = self._now
        self._send(source.sender, Kind.GET_STATE, view=source.view)

    def _on_get_state(self, message: Message) -> None:
        votes = self.status is Status.VIEW_CHANGE and message.view == self.view
        if (self.is_primary and message.view <= self.view) or (votes and message.sender == self.primary):
            self._send_state(message.sender, Kind.NEW_STATE, message.commit)

    def _send_state(self, receiver: int, kind: Kind, known: int) -> None:
        """Send what follows entry ``known``: entries, or if the log begins later, the state as well."""
        snapshot = None
        if known < self.log_start:
            known, snapshot = self.commit, self._machine.snapshot()
        self._send(receiver, kind, entries=tuple(self.log[known - self.log_start :]), snapshot=snapshot)

    def _on_new_state(self, message: Message) -> None:
        if self.status is Status.RECOVERING or message.view < self.view:
            return
        if message.view == self.view and self.primary == self.index:
            best = self._best_vote() if self.status is Status.VIEW_CHANGE else None
            if best is not None and (best.normal_view, best.op) == (message.normal_view, message.op):
                self._install(message)
                self._start_view()
        elif message.normal_view == message.view and (
            message.view > self.normal_view or message.op > self.op
        ):
            self._install(message)
            self._become_normal(message.view)
            self._execute_to(message.commit)
            self._send(message.sender, Kind.PREPARE_OK)

    def _install(self, message: Message) -> None:
        """Take a log from another replica, in place of this one's after the commit number."""
        first = message.op - len(message.entries)
        if message.snapshot is not None and first > self.commit:
            self._machine.restore(message.snapshot)
            self.log, self.log_start, self.commit = [], first, first
            self._executed_bytes = 0
        assert first <= self.commit <= message.op
        self.log[self.commit - self.log_start :] = message.entries[self.commit - first :]

    # -- recovery

    def _on_recovery(self, message: Message) -> None:
        if self.is_primary:
            self._send_state(message.sender, Kind.RECOVERY_RESPONSE, 0)
        elif self.status is Status.NORMAL:
            self._send(message.sender, Kind.RECOVERY_RESPONSE)

    def _on_recovery_response(self, message: Message) -> None:
        if self.status is not Status.RECOVERING or (
            message.incarnations[self.index] < self.incarnations[self.index]  # to an earlier life
        ):
            return
        self._responses[message.sender] = message
        latest = max(self._responses.values(), key=lambda response: response.view)
        primary = self._responses.get(latest.view % self.count)
        if primary is None or primary.view < latest.view:
            return
        # With the majority of a view change that this replica was in, these have another replica in common.
        if len(self._responses) >= self.count - self.majority + 1:
            self._install(primary)
            self._become_normal(primary.view)
            self._execute_to(primary.commit)
            self._send(primary.sender, Kind.PREPARE_OK)

    def _note_incarnations(self, incarnations: Sequence[int]) -> None:
        """Note later lives of the replicas, and count nothing of their earlier ones."""
        for replica, incarnation in enumerate(incarnations):
            if incarnation <= self.incarnations[replica]:
                continue
            self.incarnations[replica] = incarnation
            if replica == self.index:
                self.status = Status.REPLACED
            self._started.discard(replica)
            self._votes.pop(replica, None)
            self._responses.pop(replica, None)
            self._acknowledged[replica] = 0

    # -- sending

    def _repeat(self) -> None:
        """Say again what may have been lost."""
        if self.status is Status.RECOVERING:
            self._broadcast(Kind.RECOVERY)
        elif self.status is Status.VIEW_CHANGE:
            self._broadcast(Kind.START_VIEW_CHANGE)
            self._vote()
        elif self.is_primary:
            self._broadcast(Kind.PREPARE)

    def _broadcast(self, kind: Kind, entries: tuple[Entry, ...] = ()) -> None:
        message = self._message(kind, entries=entries)
        self._outbox += [(other, message) for other in range(self.count) if other != self.index]

    def _send(
        self,
        receiver: int,
        kind: Kind,
        *,
        view: int | None = None,
        entries: tuple[Entry, ...] = (),
        snapshot: tuple[bytes, ...] | None = None,
    ) -> None:
        self._outbox.append((receiver, self._message(kind, view, entries, snapshot)))

    def _message(
        self,
        kind: Kind,
        view: int | None = None,
        entries: tuple[Entry, ...] = (),
        snapshot: tuple[bytes, ...] | None = None,
    ) -> Message:
        return Message(
            kind,
            self.index,
            self.view if view is None else view,
            tuple(self.incarnations),
            self.normal_view,
            self.op,
            self.commit,
            entries,
            snapshot,
        )

    def _sent(self) -> Messages:
        outbox, self._outbox = self._outbox, []
        return outbox
