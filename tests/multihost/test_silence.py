"""Test failure detectors: when they, or survivors that shrink, take a host for gone, and which ranks hear."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from simulated import SECONDS

from torchestra.engine import layout as at
from torchestra.engine.hosts import Hosts
from torchestra.engine.memory.arena import Arena, layout_for
from torchestra.engine.multihost import failure_detector, peer_values
from torchestra.engine.multihost.control_message import ControlMessage
from torchestra.engine.multihost.heartbeat_monitor import HeartbeatMonitor
from torchestra.errors import GroupAbortedError
from torchestra.monitor.metrics import HEARTBEAT_AGE, HEARTBEATS, _heartbeats
from torchestra.store import HashStore
from torchestra.store.rate_limited import RateLimitedWarnings
from torchestra.system import deadline
from torchestra.transport.message import Message

BOUND = 8.0
NOBODY: frozenset[int] = frozenset()


class Clock:
    """The time, for who asks for it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(failure_detector, "time", clock)
    monkeypatch.setattr(deadline, "time", clock)
    return clock


class LoneMember:
    """The only rank of its host, as its detector sees it.

    Attributes:
        told: why it has been told to abort.
        over: set when it has.
    """

    name, rank, size = "lone", 0, 1
    global_ranks = ()
    program = threading.main_thread()
    peers = None

    def __init__(self, number: int = 0) -> None:
        self.group_rank = number
        self.arena = Arena.create(layout_for(1), "lone")[0]
        self.told: list[str] = []
        self.over = threading.Event()

    @property
    def is_aborted(self) -> bool:
        return bool(self.told)

    def aborted(self) -> GroupAbortedError:
        return GroupAbortedError(self.told[0])

    def has_left(self, place: int) -> bool:
        return False

    def to_group_ranks(self, places: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.group_rank for _ in places)

    def abort(self, why: str, failed: tuple[int, ...], report: Callable[[], str] = str) -> None:
        self.told.append(why + report())
        self.over.set()


class Link:
    """In place of a group's transport: what this rank says, and what it hears."""

    def __init__(self) -> None:
        self.link = self
        self.said: list[tuple[int, int, bytes]] = []
        self.came_at: dict[int, float] = {}
        self.hear: Callable[[Message], None]
        self.lose: Callable[[int, str], None]

    def listen(self, channel: int, arrived: Any, ended: Any) -> None:
        self.hear, self.lose = arrived, ended

    def post_text(self, rank: int, channel: int, what: int, text: bytes) -> None:
        self.said.append((rank, what, text))

    def received_at(self, rank: int) -> float:
        return self.came_at.get(rank, 0.0)

    def receive(self, source: int, what: ControlMessage, value: object) -> None:
        text = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.hear(Message(source, 3, what, text, ()))

    def pinged(self) -> list[int]:
        """Whom this rank has pinged since the last time."""
        found = [rank for rank, what, _ in self.said if what == ControlMessage.ping]
        self.said.clear()
        return found


def detector_of(
    members: list[list[int]], host: int, kind: type[HeartbeatMonitor] = HeartbeatMonitor
) -> tuple[HeartbeatMonitor, LoneMember, Link]:
    """The detector of the leader of a host."""
    hosts = Hosts(members, [chr(ord("a") + host) for host in range(len(members))])
    member, link = LoneMember(members[host][0]), Link()
    made = kind(HashStore(), hosts, host, member, BOUND)  # type: ignore[arg-type]
    made.attach(link)  # type: ignore[arg-type]
    made.has_met = True
    return made, member, link


def ack(link: Link, source: int, dead: tuple[int, ...] = (), left: tuple[int, ...] = ()) -> None:
    link.receive(source, ControlMessage.ack, [dead, left, []])


def test_survivors_take_a_host_for_gone_that_acknowledges_nothing_for_the_bound(clock: Clock) -> None:
    made, _, link = detector_of([[0, 1], [2, 3], [4]], 0)
    for second in range(int(BOUND) + 2):
        ack(link, 4, dead=(3,) if second == 2 else ())
        gone = made.gone(NOBODY, {0})
        # A host that is looked for every second is given up up to 1.5 looks early.
        expected = {2, 3} if second > BOUND - 1.5 else {3} if second >= 2 else set()
        assert gone == expected, second
        clock.now += 1.0


def test_who_was_stopped_itself_does_not_take_the_others_for_silent(clock: Clock) -> None:
    made, _, link = detector_of([[0, 1], [2, 3], [4]], 0)
    assert made.gone(NOBODY, {0}) == set()
    clock.now += 100 * BOUND
    assert made.gone(NOBODY, {0}) == set()
    ack(link, 2)
    for _ in range(int(BOUND)):
        clock.now += 1.0
        ack(link, 2)
        gone = made.gone(NOBODY, {0})
    assert gone == {4}  # it has had its time to be heard again


def test_who_shrinks_pings_another_rank_of_a_host_than_one_that_is_gone(clock: Clock) -> None:
    """Else it takes the host for silent: nobody answers for a leader that has died."""
    made, _, link = detector_of([[0, 1], [2, 3], [4]], 0)
    assert made.gone(NOBODY, {0}) == set()
    assert sorted(link.pinged()) == [2, 4]
    clock.now += BOUND / 4
    made.gone({2}, {0})  # as its own host says, in the registers
    assert sorted(link.pinged()) == [3, 4]


def test_of_the_ranks_of_a_host_that_shrink_only_the_first_pings_other_hosts(clock: Clock) -> None:
    """Else a job of 1,000 ranks would send 100,000 pings, eight times in a heartbeat bound."""
    made, _, link = detector_of([[0, 1], [2, 3]], 1)
    made.gone(NOBODY, {0, 2, 3})
    assert link.pinged() == [0]
    made, member, link = detector_of([[0, 1], [2, 3]], 1)
    member.group_rank = 3
    for _ in range(2 * int(BOUND)):  # it pings nobody, so nobody owes it an answer
        assert made.gone(NOBODY, {0, 2, 3}) == set()
        clock.now += 1.0
    assert link.pinged() == []
    made.gone({2}, {0, 2, 3})
    assert link.pinged() == [0]
    for _ in range(int(BOUND)):
        clock.now += 1.0
        gone = made.gone({2}, {0, 2, 3})
    assert gone == {0, 1}


def test_a_rank_answers_others_before_it_has_met_all_and_pings_nobody(clock: Clock) -> None:
    """They have met all, so they know it; but it cannot know whether others do."""
    made, _, link = detector_of([[0], [1]], 0)
    made.has_met = False
    made.check()
    assert not link.said
    link.receive(1, ControlMessage.ping, [[], [], []])
    assert [(rank, what) for rank, what, _ in link.said] == [(1, ControlMessage.ack)]


NONSENSE = [
    b"",
    b"\xff",
    b"5",
    b"[1, 2]",
    b'["1", [], []]',
    b"[[99], [], []]",
    b"[[], [], [7]]",
    b"[" * 100_000,
]


@pytest.mark.parametrize("text", NONSENSE)
def test_what_no_rank_can_have_said_is_dropped(
    text: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = RateLimitedWarnings(logging.getLogger("torchestra.test_silence"))
    for module in (failure_detector, peer_values):
        monkeypatch.setattr(module, "warnings", told)
    made, member, link = detector_of([[0], [1]], 0)
    made._do = lambda task: None  # type: ignore[method-assign]
    for what in ControlMessage:
        if what not in (ControlMessage.answer, ControlMessage.confirm, ControlMessage.recount):
            link.receive(1, what, text)
    assert made.end_reason(1) is None
    assert (made.dead, made.left, made.silent) == (set(), set(), set())
    assert not member.told
    assert "an invalid message of rank" in caplog.messages[0]


def test_a_monitor_that_looks_often_keeps_to_its_bound(clock: Clock) -> None:
    made, _, _ = detector_of([[0], [1]], 0)
    for _ in range(100):
        made.check()
        clock.now += BOUND / 1000
    assert not made.silent


def test_a_monitor_gives_up_a_host_that_has_been_silent_for_the_bound(clock: Clock) -> None:
    made, member, link = detector_of([[0], [1]], 0)
    link.receive(1, ControlMessage.ack, [[], [], [], "train.py:9 in main"])
    began = clock.now
    while not made.silent:
        made.check()
        clock.now += 0.25
        assert clock.now - began <= BOUND
    assert clock.now - began > 0.75 * BOUND
    assert member.over.wait(SECONDS)
    why, diagnosis = member.told[0].splitlines()[:2]
    assert why.startswith("host b with rank 1 has been silent for 8 s")
    assert diagnosis.startswith("diagnosis (likely): killed host: host b with rank 1 does not answer: ")
    assert diagnosis.endswith("; rank 1 on host b was at train.py:9 in main")


def test_a_host_whose_large_message_is_still_coming_is_not_silent(clock: Clock) -> None:
    """Its acknowledgements come after the message."""
    made, _, link = detector_of([[0], [1, 2]], 0)
    for _ in range(3 * int(BOUND)):
        made.check()
        clock.now += 1.0
        link.came_at[2] = clock.now
    assert not made.silent
    ended = clock.now
    while not made.silent:
        made.check()
        clock.now += 1.0
        assert clock.now - ended <= BOUND + 1.0
    assert clock.now - ended > 0.75 * BOUND


def test_a_monitor_that_gives_a_host_up_pings_on_while_the_others_are_told(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a second host is gone too, it is waited for; meanwhile survivors would take this one for gone."""
    made, member, link = detector_of([[0], [1]], 0)
    has_looked = threading.Event()
    waited: list[bool] = []
    monkeypatch.setattr(member, "abort", lambda *_: waited.append(has_looked.wait(SECONDS)))
    while not made.silent:
        made.check()
        clock.now += 0.25
    link.said.clear()
    made.check()
    assert link.pinged() == [1]
    has_looked.set()
    assert waited in ([], [True]), "the monitor looks again before all have been told"


def test_who_waits_for_a_host_pings_it_and_gives_it_up_itself(clock: Clock) -> None:
    """The coordinator may reach both while these are cut off from each other."""
    made, member, link = detector_of([[0], [1], [2]], 1)
    began = clock.now
    pings = 0
    while not made.silent:
        ack(link, 0)
        made.check()
        made.watch([2])
        pings += link.pinged().count(2)
        clock.now += 0.05
        assert clock.now - began <= BOUND
    assert clock.now - began > 0.75 * BOUND
    assert made.silent == {2}
    assert 6 <= pings <= 8
    assert member.over.wait(SECONDS)
    assert member.told[0].startswith("host c with rank 2 has been silent for 8 s")


def test_who_waits_for_many_hosts_pings_the_first_few(clock: Clock) -> None:
    made, _, link = detector_of([[rank] for rank in range(100)], 99)
    made.watch(range(50))
    assert link.pinged() == [0, 1, 2, 3]


def test_who_waits_before_it_can_ping_gives_nobody_up(clock: Clock) -> None:
    hosts = Hosts([[0], [1]], ["a", "b"])
    made = HeartbeatMonitor(HashStore(), hosts, 0, LoneMember(), BOUND)  # type: ignore[arg-type]
    for _ in range(3 * int(BOUND)):
        made.watch([1])
        clock.now += 1.0
    assert not made.silent


def test_the_coordinator_pings_all_hosts_and_the_others_ping_it_and_its_successor(clock: Clock) -> None:
    members = [[0, 1], [2, 3], [4]]
    first, _, link = detector_of(members, 0)
    first.check()
    assert link.pinged() == [2, 4]
    second, _, link = detector_of(members, 1)
    second.check()
    assert link.pinged() == [0]
    link.lose(0, "has shut down")
    second.check()
    assert link.pinged() == [1, 4]


def test_another_rank_of_a_host_is_asked_when_the_connection_to_one_has_ended(clock: Clock) -> None:
    made, _, link = detector_of([[0], [1, 2]], 0)
    made.check()
    assert link.pinged() == [1]
    link.lose(1, "died (its connection has ended)")
    assert link.pinged() == [2]
    ack(link, 2, dead=(1,))
    assert made.end_reason(1) == "died"
    assert made.end_reason(2) is None


def test_any_rank_answers_a_ping_with_what_it_knows() -> None:
    _, _, link = detector_of([[0], [1], [2]], 0)
    ack(link, 1, dead=(2,))
    link.receive(1, ControlMessage.ping, [[], [], []])
    ((rank, what, text),) = link.said
    *updates, site = json.loads(text)
    assert (rank, what, updates) == (1, ControlMessage.ack, [[2], [], []])
    assert site.startswith(f"{__file__}:")  # where its program is, for the day on which it is silent


def test_an_answer_that_comes_too_late_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, link = detector_of([[0], [1]], 0)
    monkeypatch.setattr(failure_detector, "_ANSWER_SECONDS", 0.0)
    assert made.ask_what_they_did() == {}
    question = json.loads(link.said[-1][2])[0]
    link.receive(1, ControlMessage.answer, question.to_bytes(8, "little") + b"too late")
    assert made._answers == {}


def test_the_thread_that_answers_questions_keeps_nothing_when_it_has_answered() -> None:
    """It waited for more, and kept the memory of a group that was long over."""
    made, _, link = detector_of([[0], [1]], 0)
    answered: list[int] = []
    for number in range(3):
        made._do(partial(answered.append, number))
    detector = weakref.ref(made)
    del made, link
    deadline = time.monotonic() + SECONDS
    while len(answered) < 3 or detector() is not None:
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.001)
    assert answered == [0, 1, 2]


def test_who_tells_that_a_group_is_over_waits_until_the_other_hosts_have_confirmed_it() -> None:
    """Its process may end next, and they would never know why."""
    made, member, link = detector_of([[0], [1]], 0)
    other, elsewhere, back = detector_of([[0], [1]], 1)
    has_told = threading.Event()

    def carry(rank: int, channel: int, what: int, text: bytes) -> None:
        link.said.append((rank, what, text))
        has_told.set()

    link.post_text = carry  # type: ignore[method-assign]
    back.post_text = lambda rank, channel, what, text: link.receive(1, ControlMessage(what), text)  # type: ignore[method-assign]
    member.abort("it is over", ())
    teller = threading.Thread(target=made.tell_aborted, args=("it is over", (), ""))
    teller.start()
    assert has_told.wait(SECONDS)
    assert teller.is_alive()
    back.receive(0, ControlMessage.abort, json.loads(link.said[0][2]))
    teller.join(SECONDS)
    assert not teller.is_alive()
    assert elsewhere.over.wait(SECONDS)
    assert elsewhere.told == ["it is over"]
    assert SimpleNamespace(heard=other._heard_abort).heard


def test_a_host_that_is_given_up_is_told_so_without_waiting_for_it() -> None:
    """Where the network is cut one way only, it hears the others, and would learn of nothing by itself."""
    made, _, link = detector_of([[0], [1], [2]], 0)
    link.receive(1, ControlMessage.confirm, None)
    link.said.clear()
    made.tell_aborted("host c has been silent", (2,), "")
    told = [(rank, json.loads(text)[:2]) for rank, what, text in link.said if what == ControlMessage.abort]
    assert told == [(2, ["host c has been silent", [2]])]


def test_what_a_leader_hears_is_noted_for_readers_outside_of_the_job() -> None:
    _, member, link = detector_of([[0], [1], [2]], 0)
    for _ in range(3):
        link.receive(2, ControlMessage.ack, [[], [], []])
    entries = [at.HEARTBEATS_AT + host * at.HEARTBEAT_BYTES for host in range(3)]
    assert [member.arena.load_word(entry + at.HEARTBEAT_COUNT) for entry in entries] == [0, 0, 3]
    assert 0 < member.arena.load_word(entries[2] + at.HEARTBEAT_NANOSECONDS) <= time.monotonic_ns()
    told = {(family, labels): number for family, labels, number in _heartbeats(member.arena, ("7", "g"))}
    assert told[HEARTBEATS, ("7", "g", "2")] == 3
    assert 0 <= told[HEARTBEAT_AGE, ("7", "g", "2")] < SECONDS
    assert len(told) == 2
