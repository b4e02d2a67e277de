"""Simulate the replicas of a store, and look for a schedule in which they break a promise.

The simulation is the network, the clock, the clients, and what crashes. The replicas are the product's own
(store/replicated/replica.py, contents.py), which have neither sockets nor threads nor clocks; so one seed is
one schedule, whoever runs it. Messages are lost, late, repeated and overtaken; replicas are cut off from the
others, and crash and come back with nothing but their number. As in swarm testing (Groce et al. 2012), a seed
first draws how often each of these happens, from never to often: rare conjunctions are common in some runs.
A replica may also be replaced by one on another host while it lives: then it goes on, and of the messages to
its index some come to it and some to the other one.

Checked: all replicas execute the same entries; each request exactly once; no sum that a client was told is
forgotten (so reads are linearizable); and once all is repaired, they go on and are alike.

:data:`HARMFUL` are ways to break the protocol, which tests/store/test_replica_protocol.py sees found.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from torchestra.store.replicated import replica as protocol
from torchestra.store.replicated.contents import Contents
from torchestra.store.replicated.messages import Entry, Kind, Message
from torchestra.store.replicated.replica import Messages, Replica, Status
from torchestra.store.table import Table
from torchestra.store.tcp.protocol import Reply, Request

STEPS = 500
_COUNTS = (2, 3, 3, 3, 4, 5)


class Machine:
    """A replica's copy of the store, which checks that all execute the same."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.table = Table()
        self.contents = Contents(self.table)

    def execute(self, op: int, entry: Entry) -> None:
        assert self.cluster.committed.setdefault(op, entry) == entry, f"two entries have number {op}"
        code, fields = self.contents.change(entry)
        assert code is Reply.OK
        self.cluster.answer(self, entry, int(fields[0]))

    def snapshot(self) -> tuple[bytes, ...]:
        return self.contents.snapshot()

    def restore(self, snapshot: tuple[bytes, ...]) -> None:
        self.contents.restore(snapshot)


class Client:
    """A session that adds 1 again and again, and repeats each request until it is answered."""

    def __init__(self, number: int) -> None:
        self.name = bytes([number]) * 16
        self.number = 1
        self.floor: int | None = None  # the largest sum that anybody was told before this request was made
        self.asked: set[Machine] = set()  # those of the replicas that have the request

    @property
    def entry(self) -> Entry:
        return Entry(self.name, self.number, Request.ADD, (b"sum", b"1"))


class Cluster:
    """Replicas, the messages between them, and clients; ``choices`` decides what happens next."""

    def __init__(self, count: int, choices: random.Random) -> None:
        self.count, self.choices = count, choices
        self.committed: dict[int, Entry] = {}
        self.told: list[int] = []
        self.clients = [Client(number) for number in range(1, 4)]
        self.now = 0.0
        self.lives = Counter(range(count))
        self.machines = [Machine(self) for _ in range(count)]
        self.replicas: list[Replica | None] = [
            Replica(index, count, machine, 1) for index, machine in enumerate(self.machines)
        ]
        self.replaced: list[tuple[Replica, Machine]] = []  # those that live on
        self.network: list[tuple[int, Message]] = []
        self.cut: set[tuple[int, int]] = set()  # senders and receivers
        self.held: list[tuple[int, Message]] = []  # what comes when the network is repaired
        self.healed = False
        self.disorder = choices.choice((0.0, 0.1, 0.4, 0.8))
        self.events = self._drawn_events()

    def _drawn_events(self) -> tuple[list[Callable[[], object]], list[float]]:
        """Return what may happen, and how often each does."""
        rarely, often = (0.0, 0.01, 0.02, 0.04, 0.08), (0.03, 0.06, 0.12)
        weights: dict[Callable[[], object], tuple[float, ...]] = {
            self._deliver: (0.4, 0.8),
            self._settle: rarely,
            self._submit: often,
            self._tick: often,
            self._lose: rarely,
            self._miss: rarely,
            self._cut: rarely,
            lambda: self.crash(self._any()): rarely,
            lambda: self.restart(self._any()): often,
            lambda: self.replace(self._any()): rarely,
        }
        return list(weights), [self.choices.choice(each) for each in weights.values()]

    def answer(self, machine: Machine, entry: Entry, total: int) -> None:
        """A replica has executed an entry: the client hears of it if it has asked there."""
        for client in self.clients:
            if client.entry == entry and machine in client.asked:
                assert client.floor is not None
                assert total > client.floor, "a sum was forgotten"
                self.told.append(total)
                client.number += 1
                client.asked = set()
                client.floor = None

    def send(self, sender: int, messages: Messages) -> None:
        for receiver, message in messages:
            decoded = Message.decode(message.kind, message.encode())
            assert decoded == message
            if (sender, receiver) not in self.cut:
                self.network.append((receiver, decoded))
            elif self.choices.random() < self.disorder:
                self.held.append((receiver, decoded))

    def deliver(self, index: int, *, keep: bool) -> None:
        receiver, message = self.network[index] if keep else self.network.pop(index)
        if (replica := self._life(receiver)[0]) is not None:
            self.send(receiver, replica.on_message(message))

    def _life(self, index: int) -> tuple[Replica | None, Machine]:
        """Return whom a message to a replica reaches: the latest of this index, or one that was replaced."""
        lives = [each for each in self.replaced if each[0].index == index]
        latest = self.replicas[index], self.machines[index]
        return self.choices.choice([latest, *lives]) if lives and not self.healed else latest

    def submit(self, client: Client, index: int) -> None:
        replica, machine = self._life(index)
        if replica is not None and replica.is_primary:
            client.floor = max(self.told, default=0) if client.floor is None else client.floor
            client.asked.add(machine)
            self.send(index, replica.submit(client.entry))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for replica in (*self.replicas, *(replica for replica, _ in self.replaced)):
            if replica is not None:
                self.send(replica.index, replica.on_tick(self.now))

    def down(self) -> int:
        """How many replicas know nothing now."""
        return sum(each is None or each.status is Status.RECOVERING for each in self.replicas)

    def crash(self, index: int) -> None:
        if self.replicas[index] is not None and self.down() < self.count - (self.count // 2 + 1):
            self.replicas[index] = None
            for client in self.clients:
                client.asked.discard(self.machines[index])
            for other, replica in enumerate(self.replicas):
                if replica is not None and self.choices.random() < 0.5:
                    self.send(other, replica.on_disconnect(index))

    def restart(self, index: int) -> None:
        if self.replicas[index] is None:
            self.lives[index] += 1
            self.machines[index] = Machine(self)
            self.replicas[index] = Replica(
                index, self.count, self.machines[index], 1 + self.lives[index], recovering=True, now=self.now
            )

    def replace(self, index: int) -> None:
        """Let another host take the place of a replica, which goes on: it was only thought to be lost."""
        replica = self.replicas[index]
        is_spare = self.down() < self.count - (self.count // 2 + 1)
        if replica is not None and replica.status is not Status.RECOVERING and is_spare:
            self.replaced.append((replica, self.machines[index]))
            self.replicas[index] = None
            self.restart(index)

    def step(self) -> None:
        """Let one thing happen."""
        (event,) = self.choices.choices(*self.events)
        event()

    def _deliver(self) -> None:
        if self.network:
            late = self.choices.random() < self.disorder
            index = self.choices.randrange(len(self.network)) if late else 0
            self.deliver(index, keep=self.choices.random() < 0.05)

    def _settle(self) -> None:
        """Deliver what is under way, but for some messages that are late."""
        late = [each for each in self.network if self.choices.random() < self.disorder / 4]
        now = [each for each in self.network if each not in late]
        self.network = now
        while self.network:
            self.deliver(0, keep=False)
        self.network = late

    def _lose(self) -> None:
        if self.network:
            self.network.pop(self.choices.randrange(len(self.network)))

    def _submit(self) -> None:
        self.submit(self.choices.choice(self.clients), self._any())

    def _tick(self) -> None:
        self.tick(self.choices.choice((0.05, 0.2, 0.2, 2.2)))

    def _miss(self) -> None:
        """One replica believes that it has lost the primary."""
        index, other = self._any(), self._any()
        if (replica := self.replicas[index]) is not None and index != other:
            self.send(index, replica.on_disconnect(other))

    def _cut(self) -> None:
        """Cut a replica off, or some connections in one direction, or repair the network."""
        pairs = {(one, other) for one in range(self.count) for other in range(self.count)}
        kind, index = self.choices.random(), self._any()
        if kind < 0.4:
            self.cut = {pair for pair in pairs if index in pair}
        elif kind < 0.7:
            self.cut = {pair for pair in sorted(pairs) if self.choices.random() < 0.4}
        else:
            self.cut = set()
        self.network += self.held
        self.held = []

    def _any(self) -> int:
        return self.choices.randrange(self.count)

    def heal(self) -> None:
        """Repair everything; the replicas must then agree and go on within some seconds."""
        self.cut, self.healed = set(), True
        for index in range(self.count):
            self.restart(index)
        for client in self.clients:
            client.asked = set()
        before = len(self.told)
        for _ in range(400):
            self.tick(0.1)
            for client in self.clients if len(self.told) == before else ():
                for index in range(self.count):
                    self.submit(client, index)
            while self.network:
                self.deliver(0, keep=False)
            states = {machine.snapshot() for machine in self.machines}
            commits = {replica.commit for replica in self.replicas if replica is not None}
            if len(self.told) > before and len(commits) == 1:
                assert len(states) == 1, "replicas differ"
                return
        raise AssertionError("the replicas do not go on")


@contextmanager
def short_logs() -> Iterator[None]:
    """Let logs be cut early, so that those behind need the state."""
    with (
        mock.patch.object(protocol, "_KEPT_ENTRIES", 3),
        mock.patch.object(protocol, "_KEPT_BYTES", 5 * len("sum1")),
    ):
        yield


def run(seed: int, count: int | None = None) -> Cluster:
    """Run one schedule; raise AssertionError if a promise was broken.

    Args:
        count: how many replicas; drawn from the seed if None.
    """
    choices = random.Random(seed)
    cluster = Cluster(choices.choice(_COUNTS) if count is None else count, choices)
    with short_logs():
        for _ in range(STEPS):
            cluster.step()
        cluster.heal()
    requests = {(entry.session, entry.number) for entry in cluster.committed.values()}
    assert cluster.machines[0].table.get("sum") == str(len(requests)).encode(), "not exactly once"
    assert len(set(cluster.told)) == len(cluster.told), "two adds had the same sum"
    return cluster


def first_failure(seeds: Sequence[int]) -> tuple[int, Exception] | None:
    """Return the first of these seeds that breaks a promise, and which."""
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:
            return seed, error
    return None


# Ways to break the protocol


def _commit_what_one_has(self: Replica) -> None:
    self._execute_to(self.op)


def _recover_from_the_primary_alone(self: Replica, message: Message) -> None:
    is_to_me = message.incarnations[self.index] == self.incarnations[self.index]
    if self.status is Status.RECOVERING and is_to_me and message.view % self.count == message.sender:
        self._install(message)
        self._become_normal(message.view)
        self._execute_to(message.commit)


def _take_an_old_prepare_in_a_view_change(self: Replica, message: Message) -> None:
    first = message.op - len(message.entries)
    if self.status is Status.VIEW_CHANGE and message.view == self.normal_view and first <= self.op:
        self.log += message.entries[self.op - first :]
        self._send(message.sender, Kind.PREPARE_OK, view=message.view)
    else:
        _on_prepare(self, message)


def _take_an_old_prepare_as_one_of_this_view(self: Replica, message: Message) -> None:
    first = message.op - len(message.entries)
    if self.status is Status.NORMAL and message.view < self.view and first <= self.op:
        self.log += message.entries[self.op - first :]
    else:
        _on_prepare(self, message)


def _take_the_own_log_for_the_best(self: Replica) -> Message | None:
    best = _best_vote(self)
    return None if best is None else self._votes[self.index]


def _count_earlier_lives(self: Replica, incarnations: Sequence[int]) -> None:
    """Take an old incarnation for as good as a new one: votes and acknowledgements of before still count."""
    self.incarnations = list(map(max, self.incarnations, incarnations))


def _vote_at_once(self: Replica) -> None:
    with mock.patch.object(self, "_started", set(range(self.count))):
        _vote(self)


_on_prepare, _best_vote, _vote = Replica._on_prepare, Replica._best_vote, Replica._vote

HARMFUL: dict[str, tuple[int, str, Callable[..., object]]] = {
    "commit what one has": (11, "_commit_what_a_majority_has", _commit_what_one_has),
    "recover from the primary alone": (10602, "_on_recovery_response", _recover_from_the_primary_alone),
    "take an old PREPARE in a view change": (594, "_on_prepare", _take_an_old_prepare_in_a_view_change),
    "take an old PREPARE as one of this view": (
        1838,
        "_on_prepare",
        _take_an_old_prepare_as_one_of_this_view,
    ),
    "count what a replica's earlier lives have said": (3, "_note_incarnations", _count_earlier_lives),
    "take the own log for the best": (0, "_best_vote", _take_the_own_log_for_the_best),
}
"""The first seed that finds it, which method of Replica is replaced, by what."""

HARMLESS = {"vote at once": (None, "_vote", _vote_at_once)}
"""Why voting before a majority has sent START_VIEW_CHANGE does no harm is told in replica.py."""


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Break the protocol in the way that has this name."""
    _, method, replacement = {**HARMFUL, **HARMLESS}[name]
    with mock.patch.object(Replica, method, replacement):
        yield
