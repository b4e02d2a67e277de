"""When a host is taken for gone: by the wardens of the others, and by survivors that shrink a group."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from torchestra.engine.multihost import warden
from torchestra.engine.multihost.hosts import Hosts
from torchestra.store import HashStore

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
    monkeypatch.setattr(warden, "time", clock)
    return clock


def watching(store: HashStore) -> warden.Silence:
    outlook: Any = SimpleNamespace(
        bound=BOUND, hosts=Hosts([[0, 1], [2, 3], [4]], ["a", "b", "c"]), host=0, store=store
    )
    return warden.Silence(outlook)


def beat(store: HashStore, host: int, count: int, dead: tuple[int, ...] = ()) -> None:
    store.set(f"beat/{host}", json.dumps([count, dead, []]))


def test_a_host_whose_beat_does_not_change_for_the_heartbeat_bound_is_gone(clock: Clock) -> None:
    store = HashStore()
    silence = watching(store)
    beat(store, 1, 7)
    for second in range(int(BOUND) + 2):
        beat(store, 2, second, dead=(4,) if second == BOUND else ())
        gone = silence.gone()
        assert gone == ({2, 3} if second > BOUND else {4} if second == BOUND else set())
        clock.now += 1.0


def test_who_was_stopped_itself_does_not_take_the_others_for_silent(clock: Clock) -> None:
    store = HashStore()
    silence = watching(store)
    for host in (1, 2):
        beat(store, host, 7)
    assert silence.gone() == set()
    clock.now += 100 * BOUND
    assert silence.gone() == set()
    beat(store, 1, 8)
    for _ in range(int(BOUND)):
        clock.now += 1.0
        gone = silence.gone()
    assert gone == {4}  # it has had its time to beat again


class LoneMember:
    """The only rank of its host, as its warden sees it.

    Attributes:
        aborted: why it has been told to abort.
    """

    name, rank, size, own_number = "lone", 0, 1, 0
    peers = None

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def has_left(self, place: int) -> bool:
        return False

    def called(self, places: Iterable[int]) -> list[int]:
        return list(places)

    def abort(self, why: str, failed: tuple[int, ...], standing: object = None) -> None:
        self.aborted.append(why)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[warden.Warden, LoneMember, HashStore]]:
    """The warden of the first of two hosts, of one rank each."""
    monkeypatch.setenv(warden.HEARTBEAT_VARIABLE, str(BOUND))
    store, member = HashStore(), LoneMember()
    made = warden.Warden(store, Hosts([[0], [1]], ["a", "b"]), 0, member)  # type: ignore[arg-type]
    yield made, member, store
    made.leave()


def test_a_warden_that_looks_often_because_there_are_many_news_does_not_run_out_of_patience(
    clock: Clock, head: tuple[warden.Warden, LoneMember, HashStore]
) -> None:
    """As when many ranks ask for a flight record at once: it looks again after each of the news."""
    made, member, store = head
    beat(store, 1, 7)
    for _ in range(100):
        made.listen()
        clock.now += BOUND / 1000
    assert not member.aborted


def test_a_warden_gives_up_a_host_that_has_been_silent_for_the_bound(
    clock: Clock, head: tuple[warden.Warden, LoneMember, HashStore]
) -> None:
    made, member, store = head
    beat(store, 1, 7)
    began = clock.now
    while not member.aborted:
        made.listen()
        clock.now += 0.25
        assert clock.now - began <= BOUND
    assert clock.now - began > 0.75 * BOUND
    assert "host b with rank 1 has been silent for 8 s" in member.aborted[0]
