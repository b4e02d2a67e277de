"""Test that the requests of joining to the store grow with the number of ranks, not with its square."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

import torchestra as dist
from torchestra.engine.multihost.bridge_selection import BRIDGE_VARIABLE
from torchestra.engine.multihost.heartbeat_bound import HEARTBEAT_VARIABLE
from torchestra.engine.multihost.host_discovery import find_hosts
from torchestra.rendezvous.gathering import gather
from torchestra.store import HashStore
from torchestra.store.missing_keys import missing_indices
from torchestra.store.secret import SECRET_VARIABLE
from torchestra.world.registry import thread_rank

PER_HOST = 4
SIZES = (8, 16, 32)
CARD_BYTES = 100


class CountingStore(HashStore):
    """Counts requests and the bytes of their keys, values and answers."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()
        self.traffic = [0]
        self._counting = threading.Lock()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("set", "get", "add", "compare_set", "multi_get", "multi_set", "check", "wait"):
            return found

        def counted(*arguments: Any, **named: Any) -> Any:
            answer = found(*arguments, **named)
            with self._counting:
                self.requests[name] += 1
                self.traffic[0] += sum(map(length, (*arguments, answer)))
            return answer

        return counted


def length(value: Any) -> int:
    """About how many bytes travel for a key, a value, or several of them."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return sum(map(length, value))
    return len(value) if isinstance(value, (str, bytes)) else 8


def on_simulated_hosts(size: int, join: Any) -> Counter[str]:
    """Return what a store is asked by ranks that are threads and call ``join(store, rank, size)``."""
    store = CountingStore()
    asked: Counter[str] = Counter()
    errors: list[BaseException] = []
    met = threading.Barrier(size)

    def body(rank: int) -> None:
        try:
            with thread_rank(rank, size, store, f"host{rank // PER_HOST}"):
                join(store, rank, size)
                met.wait(60.0)
                if rank == 0:
                    asked.update(store.requests)
                    asked["bytes"] = store.traffic[0]
                met.wait(60.0)
        except BaseException as error:
            errors.append(error)
            met.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return asked


def meet_and_find(store: HashStore, rank: int, size: int) -> None:
    """As processes do."""
    find_hosts(gather(store, rank, size, 60.0), rank, size, "group", 60.0)


def join_world(store: HashStore, rank: int, size: int) -> None:
    dist.init_process_group(timeout=60.0)


@pytest.mark.parametrize(
    ("join", "bridge", "most"), [(meet_and_find, "", 10), (join_world, "", 20), (join_world, "curve", 20)]
)
def test_requests_and_bytes_grow_with_the_number_of_ranks(
    join: Any, bridge: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "1000")  # what is counted is joining, not watching
    if bridge:
        monkeypatch.setenv(BRIDGE_VARIABLE, bridge)
        monkeypatch.setenv(SECRET_VARIABLE, "a secret of these tests")
    per_rank = {}
    for size in SIZES:
        asked = on_simulated_hosts(size, join)
        moved = asked.pop("bytes")
        per_rank[size] = asked.total() / size, moved / size
    requests, moved = zip(*per_rank.values(), strict=True)
    assert max(requests) <= most, per_rank
    assert requests[-1] <= 1.15 * requests[0], per_rank
    # Of every other host, each has to be told the key that it proves itself with.
    keys = CARD_BYTES * (SIZES[-1] - SIZES[0]) / PER_HOST if bridge else 0
    assert moved[-1] <= 1.3 * moved[0] + keys, per_rank


def test_the_missing_of_many_keys_are_found_in_few_requests() -> None:
    store = CountingStore()
    keys = [f"key{number}" for number in range(1000)]
    missing = [0, 7, 500, 501, 999]
    for number in set(range(1000)).difference(missing):
        store.set(keys[number], b"")
    store.requests.clear()
    assert missing_indices(store, keys) == missing
    assert store.requests.total() <= 2 * len(missing) * 10 + 1
    assert missing_indices(store, keys[1:7]) == missing_indices(store, []) == []
