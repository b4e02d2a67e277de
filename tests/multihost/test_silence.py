"""What wardens hear: when a host is taken for gone, by them or by survivors that shrink; who is told."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator

import pytest
from simulated import SECONDS

from torchestra.engine.multihost import failure_detector, peer_values, silence
from torchestra.engine.multihost.hosts import Hosts
from torchestra.errors import GroupAbortedError
from torchestra.store import HashStore
from torchestra.store.rate_limited import RateLimitedWarnings
from torchestra.system import deadline

BOUND = 8.0


class Clock:
    """The time, for who asks for it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (silence, deadline):
        monkeypatch.setattr(module, "time", clock)
    return clock


def watching(store: HashStore) -> silence.Silence:
    return silence.Silence(store, Hosts([[0, 1], [2, 3], [4]], ["a", "b", "c"]), 0, BOUND)


def beat(store: HashStore, host: int, count: int, dead: tuple[int, ...] = ()) -> None:
    store.set(f"beat/{host}", json.dumps([count, dead, []]))


def test_a_host_whose_beat_does_not_change_for_the_heartbeat_bound_is_gone(clock: Clock) -> None:
    store = HashStore()
    watch = watching(store)
    beat(store, 1, 7)
    for second in range(int(BOUND) + 2):
        beat(store, 2, second, dead=(4,) if second == BOUND else ())
        gone = watch.gone()
        assert gone == ({2, 3} if second > BOUND else {4} if second == BOUND else set())
        clock.now += 1.0


def test_who_was_stopped_itself_does_not_take_the_others_for_silent(clock: Clock) -> None:
    store = HashStore()
    watch = watching(store)
    for host in (1, 2):
        beat(store, host, 7)
    assert watch.gone() == set()
    clock.now += 100 * BOUND
    assert watch.gone() == set()
    beat(store, 1, 8)
    for _ in range(int(BOUND)):
        clock.now += 1.0
        gone = watch.gone()
    assert gone == {4}  # it has had its time to beat again


NO_BEATS = [b"", b"\xff", b"5", b"[1, 2]", b'["1", [], []]', b"[1, 5, 5]", b"[1, [0], [99]]", b"[" * 100_000]
"""What no host says: no JSON, another form, and ranks that are not its own."""


@pytest.mark.parametrize("text", NO_BEATS)
def test_what_stands_in_the_place_of_a_beat_and_is_none_is_no_word_of_the_host(
    clock: Clock, text: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        peer_values, "warnings", RateLimitedWarnings(logging.getLogger("torchestra.test_silence"))
    )
    store = HashStore()
    watch = watching(store)
    store.set("silent", b"\xff ")
    beat(store, 1, 7, dead=(3,))
    store.set("beat/2", text)
    assert watch.gone() == {3}
    [warning] = caplog.messages
    assert "dropped what host c cannot have said" in warning
    for second in range(int(BOUND) + 2):
        clock.now += 1.0
        beat(store, 1, second, dead=(3,))
        gone = watch.gone()
    assert gone == {3, 4}  # it is silent


@pytest.mark.parametrize("text", NO_BEATS)
def test_a_warden_takes_it_for_no_word_either(
    head: tuple[failure_detector.HeartbeatMonitor, LoneMember, HashStore], text: bytes
) -> None:
    made, member, store = head
    store.set("beat/1", text)
    made.listen()
    assert made.fate(1) is None
    assert (made.dead, made.left) == (set(), set())
    assert not member.told


class LoneMember:
    """The only rank of its host, as its warden sees it.

    Attributes:
        told: why it has been told to abort.
        over: set when it has.
    """

    name, rank, size = "lone", 0, 1
    peers = None

    def __init__(self, number: int = 0) -> None:
        self.group_rank = number
        self.told: list[str] = []
        self.over = threading.Event()

    @property
    def is_aborted(self) -> bool:
        return bool(self.told)

    def aborted(self) -> GroupAbortedError:
        return GroupAbortedError(self.told[0])

    def has_left(self, place: int) -> bool:
        return False

    def to_group_ranks(self, places: Iterable[int]) -> list[int]:
        return list(places)

    def abort(self, why: str, failed: tuple[int, ...], standing: object = None) -> None:
        self.told.append(why)
        self.over.set()


@pytest.fixture
def head() -> Iterator[tuple[failure_detector.HeartbeatMonitor, LoneMember, HashStore]]:
    """The warden of the first of two hosts, of one rank each."""
    store, member = HashStore(), LoneMember()
    made = failure_detector.HeartbeatMonitor(store, Hosts([[0], [1]], ["a", "b"]), 0, member, BOUND)  # type: ignore[arg-type]
    yield made, member, store
    member.told.clear()  # nobody is there to hear it
    made.leave()


def test_a_warden_that_looks_often_because_there_are_many_news_does_not_run_out_of_patience(
    clock: Clock, head: tuple[failure_detector.HeartbeatMonitor, LoneMember, HashStore]
) -> None:
    """As when many ranks ask for a flight record at once: it looks again after each of the news."""
    made, _, store = head
    beat(store, 1, 7)
    for _ in range(100):
        made.listen()
        clock.now += BOUND / 1000
    assert not made.silent


def test_a_warden_that_gives_a_host_up_beats_on_while_the_others_are_told(
    clock: Clock,
    head: tuple[failure_detector.HeartbeatMonitor, LoneMember, HashStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a second host is gone too, it is waited for; meanwhile survivors took the warden's host for gone."""
    made, member, store = head
    has_looked = threading.Event()
    waited: list[bool] = []
    monkeypatch.setattr(member, "abort", lambda *_: waited.append(has_looked.wait(SECONDS)))
    monkeypatch.setattr(made, "_interval", 0.01)
    beat(store, 1, 7)
    while not made.silent:
        made.listen()
        clock.now += 0.01
    has_looked.set()
    assert waited in ([], [True]), "the warden looks again before all have been told"


def test_a_warden_gives_up_a_host_that_has_been_silent_for_the_bound(
    clock: Clock, head: tuple[failure_detector.HeartbeatMonitor, LoneMember, HashStore]
) -> None:
    made, member, store = head
    beat(store, 1, 7)
    began = clock.now
    while not made.silent:
        made.listen()
        clock.now += 0.25
        assert clock.now - began <= BOUND
    assert clock.now - began > 0.75 * BOUND
    assert member.over.wait(SECONDS)
    assert "host b with rank 1 has been silent for 8 s" in member.told[0]


def test_who_tells_that_a_group_is_over_waits_until_the_other_hosts_have_heard_it(
    head: tuple[failure_detector.HeartbeatMonitor, LoneMember, HashStore],
) -> None:
    """Its process may end next, and with it the store, and they would only know that the store is gone."""
    made, member, store = head
    elsewhere = LoneMember(1)
    other = failure_detector.HeartbeatMonitor(store, made.hosts, 1, elsewhere, BOUND)  # type: ignore[arg-type]
    member.abort("it is over", ())
    teller = threading.Thread(target=made.tell_aborted, args=("it is over", (), ""))
    teller.start()
    store.wait(["news/1"], SECONDS)
    assert teller.is_alive()
    other.start()
    teller.join(SECONDS)
    assert not teller.is_alive()
    store.wait(["heard/1"], 0)
    assert elsewhere.over.wait(SECONDS)
    assert elsewhere.told == ["it is over"]
    other.leave()
