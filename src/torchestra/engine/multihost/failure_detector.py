"""The failure detector: it finds out which hosts and ranks of a group live, and spreads events.

Hosts *ping* each other over the group's transport. The leader of each host (its first rank) has a thread for
that: the *coordinator*, the leader of the first host whose leader has not gone, pings all hosts; all others
ping the coordinator's host; of many hosts only few ping each other (heartbeat_tree.py). A ping is for a host:
it goes to the first of its ranks that has not gone, and any rank answers for its host, on the transport's
thread. After two without an answer it goes to the next, for that one may have died unnoticed. Pings and their
acknowledgements carry the *membership updates*, as in SWIM (Das, Gupta, Motivala 2002): which ranks have died
or left as far as the sender knows. For its own host a rank learns that from the arena. A rank that is no
leader pings a host when it waits for one of its ranks.

A rank that waits for other hosts in an operation pings these itself, a few at a time: so it notices a cut
between the two where the coordinator reaches both (:meth:`FailureDetector.watch`).

A host that has acknowledged nothing for the *heartbeat bound* (TORCHESTRA_HEARTBEAT, default 10 s), and of
which no other bytes have come either, is given up: the group is aborted on all remaining hosts. Only time in
which this process ran counts (:class:`SuspicionTimers`).

That the group is over is told to all hosts at once (abort_notices.py). With questions and answers ranks learn
where the others stand, and what they did last (remote_records.py).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict
from functools import partial

from torchestra.engine import layout as at
from torchestra.engine.diagnosis.facts import read_facts
from torchestra.engine.diagnosis.last_seen import write_last_seen
from torchestra.engine.failure.hang_report import HostReport, hang_report, silent_report
from torchestra.engine.failure.program_samples import sample_programs
from torchestra.engine.hosts import Hosts
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.multihost.abort_notices import AbortNotices
from torchestra.engine.multihost.control_message import REPLIES, ControlMessage
from torchestra.engine.multihost.group_transport import Channel, GroupTransport
from torchestra.engine.multihost.peer_values import ranks_in, read_counts, read_text, warnings
from torchestra.engine.multihost.remote_records import Answer, answer, understand
from torchestra.engine.multihost.store_registers import left_behind
from torchestra.engine.multihost.suspicion import PINGS_PER_BOUND, SuspicionTimers
from torchestra.engine.recorder.callsites import call_site
from torchestra.engine.recorder.flight_record import read_flight_record, waits_for_other_hosts
from torchestra.errors import RankFailedError, named_globally
from torchestra.store import Store
from torchestra.store.unreadable import UNREADABLE
from torchestra.system.limits import start_thread
from torchestra.transport.message import Message

_ANSWER_SECONDS = 3.0
_PING_SECONDS = 1.0
_MOST_WATCHED = 4
_PINGS_PER_RANK = 2


class FailureDetector:
    """One rank's view of the other hosts.

    Args:
        store: the group's, with which the survivors of a failure agree on who continues.
        host: which this rank is on.
        context: this rank's context among the ranks of its host.
        bound: the heartbeat bound.

    Attributes:
        interval: how many seconds apart the pings are.
        begun: how many operations of the group this rank has begun; set by the code that counts them.
        dead, left: ranks of other hosts, in the group's numbering, that have died, or left the group.
        silent: hosts that have been given up.
        has_met: all ranks know each other, so this one may ping.
    """

    has_met = False

    def __init__(self, store: Store, hosts: Hosts, host: int, context: RankContext, bound: float) -> None:
        self.store = store
        self.hosts = hosts
        self.host = host
        self.bound = bound
        self.begun: Callable[[], int] = lambda: 0
        self.dead: set[int] = set()
        self.left: set[int] = set()
        self.silent: set[int] = set()
        self._context = context
        self._here = frozenset(hosts.on(host))
        self._others = [each for each in range(len(hosts)) if each != host]
        self.interval = bound / PINGS_PER_BOUND
        self._timers = SuspicionTimers(2 * self.interval)
        self._transport: GroupTransport | None = None
        self._unreachable: set[int] = set()
        self._said_gone: set[int] = set()
        self._pinged: dict[int, float] = {}  # by host: when
        self._unanswered: dict[int, int] = {}  # by host: how many pings since it was heard from
        self._received_at: dict[int, float] = {}  # by host: when bytes came last, by the transport's clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = threading.Event()
        self._tasks: deque[Callable[[], None]] = deque()
        self._worker: threading.Thread | None = None
        self._questions = itertools.count(1)
        # By question that waits for answers, and by host: what, and when.
        self._answers: dict[int, dict[int, tuple[bytes, float]]] = {}
        self.notices = AbortNotices(len(hosts), host, self._contact, self._say_abort, self._say_confirm)
        self._heard_since: set[int] = set()  # hosts, since the group was over
        self._heard_abort = False
        self._last_seen: dict[int, str] = {}  # by host: the line of the program of the rank that spoke for it

    def attach(self, transport: GroupTransport) -> None:
        """Begin to listen, and to answer ranks that have met all others already."""
        self._transport = transport
        transport.listen(Channel.control, self._arrived, self._lose_connection)

    # -- which hosts and ranks are there

    def _contact(self, host: int) -> int | None:
        """Return the rank that speaks for a host; None if there is none any more."""
        gone = self.dead | self.left | self._said_gone
        there = [rank for rank in self.hosts.on(host) if rank not in gone]
        there = [rank for rank in there if rank not in self._unreachable] or there
        return there[self._unanswered.get(host, 0) // _PINGS_PER_RANK % len(there)] if there else None

    def _has_no_responder(self, host: int) -> bool:
        """Return whether a host is known to have no rank left that answers for it."""
        return host in self.silent or self._contact(host) is None

    def _say(self, rank: int, what: ControlMessage, value: object) -> None:
        # While the ranks still meet, only who says something is sure to know this rank.
        if self._transport is not None and (self.has_met or what in REPLIES):
            self._transport.link.post_text(rank, Channel.control, what, json.dumps(value).encode())

    def _updates(self) -> list[list[int]]:
        """Return the ranks that are gone as far as this one knows: dead, left, and silent hosts."""
        context = self._context
        dead = context.peers.dead() if context.peers is not None else ()
        left = [local_rank for local_rank in range(context.size) if context.has_left(local_rank)]
        here = set(context.to_group_ranks(set(dead) - set(left))), set(context.to_group_ranks(left))
        if self._closed.is_set():
            here[1].add(context.group_rank)
        with self._lock:
            return [sorted(self.dead | here[0]), sorted(self.left | here[1]), sorted(self.silent)]

    def _site(self) -> str:
        """Return the line of this rank's program."""
        return call_site(self._context.program.ident)

    def ping(self, host: int) -> None:
        """Ask a host for news of its ranks, and whether it lives."""
        self._pinged[host] = time.monotonic()
        if (rank := self._contact(host)) is not None:
            self._unanswered[host] = self._unanswered.get(host, 0) + 1
            self._say(rank, ControlMessage.ping, self._updates())

    def end_reason(self, rank: int) -> str | None:
        """Return how a remote rank ended: ``"died"``, ``"destroyed the group"``, or None if it is there.

        The answer of its host may be a second old.
        """
        host = self.hosts.host_of[rank]
        if time.monotonic() - self._pinged.get(host, 0.0) > _PING_SECONDS:
            self.ping(host)
        return "died" if rank in self.dead else "destroyed the group" if rank in self.left else None

    def gone(self, said_gone: Set[int], looking: Set[int]) -> frozenset[int]:
        """Return the ranks on other hosts that have died or left, and those of silent hosts.

        For callers that look repeatedly: the result may be an eighth of the heartbeat bound old. Of each host
        only one rank pings the others, or each of 1,000 ranks would ping all hosts; the others of its host
        learn from what it does next, and from hosts that ping them, which are silent.

        Args:
            said_gone: ranks that are gone, as ranks of their hosts say; from now on it pings others.
            looking: ranks that look, too. The first of a host that is not gone pings for its host.
        """
        failed, host_of = self._failed_ranks(), self.hosts.host_of
        wholly = {host for host in self._others if failed.issuperset(self.hosts.on(host))}
        self._said_gone.update(said_gone, (rank for rank in failed if host_of[rank] not in wholly))
        silent: set[int] = set()
        if self._context.group_rank == min(self._here & looking - said_gone, default=-1):
            for host in self._others:
                self._ping_if_due(host)
            silent = self._suspect(self._others)
        with self._lock:
            # A host given up with all its ranks is lost until it is heard from.
            lost = self.silent | silent | (wholly - self._heard_since)
            ranks = (rank for host in lost for rank in self.hosts.on(host))
            return frozenset(self.dead | self.left).union(ranks)

    def _failed_ranks(self) -> frozenset[int]:
        """Return the ranks because of which the group was aborted."""
        error = self._context.aborted() if self._context.is_aborted else None
        return frozenset(error.ranks if isinstance(error, RankFailedError) else ())

    def _suspect(self, hosts: Sequence[int]) -> set[int]:
        """Return which of some hosts with ranks that have not gone are to be given up."""
        with self._lock:
            for host in hosts:
                if host not in self._timers.heard:
                    self._record_bytes(host)
            silent_s = self._timers.silent_seconds(hosts)
        # The next look may be up to an interval too late.
        late = self.bound - 1.5 * self.interval
        return {host for host in hosts if silent_s[host] > late and self._contact(host) is not None}

    def watch(self, hosts: Sequence[int]) -> None:
        """Ping the first few of the hosts that this rank waits for; give up those that are silent too long.

        A rank that waits calls it again and again. More need no ping: it waits until these have come anyway.
        """
        if not self.has_met:
            return
        hosts = hosts[:_MOST_WATCHED]
        for host in hosts:
            self._ping_if_due(host)
        self._give_up(self._suspect(hosts))

    def _ping_if_due(self, host: int) -> None:
        if time.monotonic() - self._pinged.get(host, 0.0) > self.interval:
            self.ping(host)

    def _give_up(self, hosts: set[int]) -> None:
        """Abort the group for hosts that have been silent for too long, unless that has been done."""
        for host in hosts - self.silent:
            self.silent.add(host)
            self._aside(partial(self._abort_for_silence, host))

    def _abort_for_silence(self, host: int) -> None:
        """Abort the group for a silent host, unless the others are silent as they have gone on without us."""
        ranks, context = self.hosts.on(host), self._context
        # The store may have been on that host: the error must not come a heartbeat bound later for that.
        if gone_on := left_behind(
            self.store, context.group_rank, self.hosts.size, context.name, self.interval
        ):
            context.abort(gone_on)
            return
        who = f"host {self.hosts.names[host]} with {named_globally(ranks, context.global_ranks)}"
        context.abort(
            f"{who} has been silent for {self.bound:g} s: it is down, or the network to it is",
            ranks,
            lambda: hang_report([self._silence(host)], context.group_rank),
        )

    def _record_bytes(self, host: int) -> None:
        """Note that a host lives if bytes have come from it since it was heard from last.

        Acknowledgements queue behind a large message, of which each piece is a sign of life.
        """
        if self._transport is None:
            return
        newest = max(map(self._transport.link.received_at, self.hosts.on(host)))
        if newest > self._received_at.get(host, 0.0):
            self._received_at[host] = newest
            self._timers.record_contact(host)

    # -- incoming messages, on the thread of the transport

    def _arrived(self, message: Message) -> None:
        source, received_at = message.source, time.monotonic()
        host = self.hosts.host_of[source]
        with self._lock:
            self._unreachable.discard(source)
            self._unanswered.pop(host, None)
            self._timers.record_contact(host)
            if self._transport is not None:
                self._received_at[host] = self._transport.link.received_at(source)
            self.silent.discard(host)
            if self._context.is_aborted:
                self._heard_since.add(host)
        try:
            self._take(ControlMessage(message.tag), host, source, bytes(message.text), received_at)
        except UNREADABLE as error:
            warnings.warn("ignored an invalid message of rank %d: %r", source, error)

    def _take(self, what: ControlMessage, host: int, source: int, text: bytes, received_at: float) -> None:
        if what == ControlMessage.answer:
            with self._changed:
                answers = self._answers.get(int.from_bytes(text[:8], "little"))
                if answers is not None:  # else it is too late
                    answers[host] = text[8:], received_at
                    self._changed.notify_all()
            return
        value = json.loads(text)
        if what in (ControlMessage.ping, ControlMessage.ack):
            if what == ControlMessage.ack and isinstance(value, list) and len(value) == 4:
                self._last_seen[host] = read_text(value.pop())
            self._update(value)
            if what == ControlMessage.ping:
                self._say(source, ControlMessage.ack, [*self._updates(), self._site()])
        elif what == ControlMessage.abort:
            why, failed, report, *rest = value
            self._heard_abort = True
            failed = ranks_in(failed, range(self.hosts.size))
            onward = [*set(ranks_in(rest[0], range(len(self.hosts)))) - {self.host}] if rest else []
            self._abort_aside(read_text(why), failed, read_text(report))
            self._say_confirm(source, [])
            if onward:
                self.notices.relay(source, [why, list(failed), report], onward)
        elif what == ControlMessage.confirm:
            self.notices.confirm({host, *ranks_in(value or [], range(len(self.hosts)))})
        elif what == ControlMessage.ask:
            question, operation = read_counts(value)
            self._do(partial(self._send_host_report, source, question, operation))
        else:
            question, last = read_counts(value)
            self._do(partial(self._recount, source, question, last, received_at))

    def _update(self, value: object) -> None:
        """Take over another rank's knowledge of which ranks have gone."""
        if value == [[], [], []]:  # as in nearly all messages
            return
        if not isinstance(value, list) or len(value) != 3:
            raise ValueError(f"not updates: {value!r:.100}")
        ranks, hosts = range(self.hosts.size), range(len(self.hosts))
        dead, left = (set(ranks_in(each, ranks)) - self._here for each in value[:2])
        silent = set(ranks_in(value[2], hosts)) - {self.host}
        with self._lock:
            self.left |= left
            self.dead |= dead - self.left
            self.silent |= silent - self._timers.heard_lately(self.bound)

    def _lose_connection(self, rank: int, how: str) -> None:
        """Note that a connection has ended: the rank has left, or another will tell what became of it."""
        with self._lock:
            if how == "has shut down":
                self.left.add(rank)
            elif how.startswith("cannot be reached"):
                self.dead.add(rank)
            else:
                self._unreachable.add(rank)
        if how != "has shut down" and not self._closed.is_set():
            self.ping(self.hosts.host_of[rank])

    def _do(self, task: Callable[[], None]) -> None:
        """Run a task that may take long, on a thread for that."""
        with self._lock:
            self._tasks.append(task)
            if self._worker is None:
                name = f"torchestra-control-{self._context.name}-{self.host}"
                self._worker = threading.Thread(target=self._work, name=name, daemon=True)
                start_thread(self._worker)

    def _work(self) -> None:
        """Run the tasks, and end: a thread that waited for more would keep the group's memory for ever."""
        while (task := self._next_task()) is not None:
            task()

    def _next_task(self) -> Callable[[], None] | None:
        with self._lock:
            if self._tasks and not self.has_left:
                return self._tasks.popleft()
            self._worker = None
            return None

    # -- the end of the group

    def tell_aborted(self, why: str, failed: tuple[int, ...], report: str) -> None:
        """Tell the ranks of all hosts that the group can be used no more."""
        if not self._heard_abort and self._transport is not None:  # else another host has told all
            hosts = {self.hosts.host_at(rank) for rank in failed} - {self.host}
            given_up = [host for host in sorted(hosts) if set(failed).issuperset(self.hosts.on(host))]
            self.notices.tell([why, list(failed), report], given_up, self._has_no_responder)

    def _say_abort(self, rank: int, notice: list[object], onward: list[int]) -> None:
        self._say(rank, ControlMessage.abort, [*notice, onward] if onward else notice)

    def _say_confirm(self, rank: int, hosts: list[int]) -> None:
        self._say(rank, ControlMessage.confirm, hosts)

    def _abort_aside(self, why: str, failed: tuple[int, ...], report: str = "") -> None:
        """Abort the group, on a thread of its own, for it may take seconds.

        It waits until another rank of this host has said why it aborts the group, which may ask the other
        hosts first, and until these have confirmed it.
        """
        self._aside(partial(self._context.abort, why, failed, lambda: report))

    def _aside(self, task: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end, and begins no thread
            start_thread(threading.Thread(target=task, name="torchestra-aborting", daemon=True))

    @property
    def has_left(self) -> bool:
        """Return whether :meth:`leave` has been called."""
        return self._closed.is_set()

    def leave(self) -> None:
        """Tell the hosts with which this rank communicates that it leaves the group."""
        if self._closed.is_set():
            return
        self._closed.set()
        updates = self._updates()
        for host in tuple(self._pinged):
            if (rank := self._contact(host)) is not None and rank not in self._unreachable:
                self._say(rank, ControlMessage.ack, updates)

    # -- questions

    def ask_where_they_are(self) -> list[HostReport]:
        """Return where the ranks of each other host stand, and which have not begun this rank's operation.

        No rank of a host that does not answer is said to be missing. Takes up to some seconds.
        """
        operation = self.begun()
        answers = self._ask(ControlMessage.ask, lambda question: [question, operation])
        found: list[HostReport] = []
        for host in self._others:
            report = self._silence(host)
            with contextlib.suppress(*UNREADABLE):
                absent, lines, facts = json.loads(answers[host][0])
                absent, told = ranks_in(absent, self.hosts.on(host)), tuple(map(read_facts, facts))
                ranks_in([each.rank for each in told], self.hosts.on(host))
                report = HostReport(read_text(lines), told, tuple(absent))
            found.append(report)
        return found

    def _silence(self, host: int) -> HostReport:
        """Return what is known of the ranks of a host that does not answer."""
        seen = self._last_seen.get(host, "")
        name, ranks, known = self.hosts.names[host], self.hosts.on(host), self._context.global_ranks
        return silent_report(name, ranks, known, self.dead, self.left, seen)

    def ask_what_they_did(self, last: int = at.ENTRIES) -> dict[int, Answer]:
        """Return the records of other hosts, by host; takes some seconds if one does not answer.

        Args:
            last: how many entries of either kind to ask for of each rank, at most.
        """
        asked_at = time.monotonic()
        records: dict[int, Answer] = {}
        answers = self._ask(ControlMessage.recount, lambda question: [question, last])
        for host, (text, received_at) in answers.items():
            with contextlib.suppress(*UNREADABLE):
                records[host] = understand(text, asked_at, received_at)
        return records

    def _ask(self, what: ControlMessage, value: Callable[[int], object]) -> dict[int, tuple[bytes, float]]:
        """Ask all other hosts; return their answers, and when they came, by host."""
        question = next(self._questions)
        contacts = {host: self._contact(host) for host in self._others if not self._has_no_responder(host)}
        contacts_asked = {host: rank for host, rank in contacts.items() if rank is not None}
        with self._lock:
            answers = self._answers[question] = {}
        for rank in contacts_asked.values():
            self._say(rank, what, value(question))
        deadline = time.monotonic() + min(self.bound, _ANSWER_SECONDS)
        with self._changed:
            while any(host not in answers for host in contacts_asked):
                left = deadline - time.monotonic()
                if left <= 0 or self._closed.is_set():
                    break
                self._changed.wait(left)
            del self._answers[question]
        return {host: answers[host] for host in contacts_asked if host in answers}

    def _answer(self, rank: int, question: int, text: bytes) -> None:
        if self._transport is not None:
            raw = question.to_bytes(8, "little") + text
            self._transport.link.post_text(rank, Channel.control, ControlMessage.answer, raw)

    def _send_host_report(self, rank: int, question: int, operation: int) -> None:
        where = self._site()
        here = self._context.host_report(range(self._context.size), where)
        told = [self._missing_in(operation), here.lines, [asdict(each) for each in here.facts]]
        self._answer(rank, question, json.dumps(told).encode())

    def _recount(self, rank: int, question: int, last: int, received_at: float) -> None:
        self._note_line()
        arena = self._context.arena
        told = answer(read_flight_record(arena, last), received_at, sample_programs(arena))
        self._answer(rank, question, told)

    def _note_line(self) -> None:
        """Write where this rank's program is: one that is alone on its host does not do that every second."""
        write_last_seen(self._context.arena, self._context.rank, self._context.program)

    def _missing_in(self, operation: int) -> Sequence[int]:
        """Return the ranks of this host that have not begun an operation of the group.

        An operation has the same steps within the host for all of its ranks; so if some are behind, and do
        not wait for other hosts, return these, else all of them, if this one has not begun it.
        """
        context = self._context
        arena = context.arena
        words = (arena.progress(local_rank) for local_rank in range(context.size))
        steps = [word >> at.STEP_BITS for word in words]
        behind = [
            local_rank
            for local_rank, step in enumerate(steps)
            if step < max(steps) and not waits_for_other_hosts(arena, local_rank)
        ]
        if behind or self.begun() >= operation:
            return context.to_group_ranks(behind)
        return self.hosts.on(self.host)
