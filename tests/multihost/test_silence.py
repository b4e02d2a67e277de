"""When survivors that shrink a group take a host for gone."""

from __future__ import annotations

import json
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
