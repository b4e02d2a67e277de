"""Test how ranks find out who shares a host with them."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from torchestra.engine.hosts import Hosts
from torchestra.engine.multihost import host_discovery
from torchestra.engine.multihost.host_discovery import find_hosts
from torchestra.errors import CollectiveTimeoutError
from torchestra.store import HashStore, PrefixStore, TCPStore
from torchestra.system.deadline import Deadline
from torchestra.world.registry import thread_rank


class CountingStore(HashStore):
    """Counts what it is asked; what only waits is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("set", "get", "add", "compare_set", "multi_get", "check", "append", "wait"):
            object.__getattribute__(self, "requests")[name] += 1
        return object.__getattribute__(self, name)


def find_all(names: list[str], store: HashStore, seconds: float = 30.0) -> list[Any]:
    """Each rank, a thread, goes through the segments as processes do."""
    found: list[Any] = [None] * len(names)

    def body(rank: int) -> None:
        with thread_rank(rank, len(names), store, names[rank]):
            try:
                found[rank] = find_hosts(store, rank, len(names), "group", seconds)
            except CollectiveTimeoutError as error:
                found[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank, name in enumerate(names) if name]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_with_one_id_that_can_attach_share_a_host() -> None:
    names = ["b", "a", "b", "c", "a", "b"]
    found = find_all(names, HashStore())
    assert found[0] == Hosts([[0, 2, 5], [1, 4], [3]], ["b", "a", "c"])
    assert all(each == found[0] for each in found)


def test_one_id_does_not_make_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 2 and 3 have the id of ranks 0 and 1, but their segment cannot be reached from there."""
    plain_request, sides = host_discovery.request_descriptor, {}

    def request(invitation: str, secret: bytes | None, rank: int, name: str, deadline: Deadline) -> Any:
        opener = sides.get(invitation)
        if opener is not None and (opener < 2) != (rank < 2):
            try:
                raise ConnectionRefusedError("nobody listens there")
            except OSError as error:
                raise host_discovery.DistBackendError("cannot reach it") from error
        return plain_request(invitation, secret, rank, name, deadline)

    class HostSegment(host_discovery._HostSegment):
        def __init__(self, discovery: Any) -> None:
            super().__init__(discovery)
            sides[self.sign.partition(":")[2]] = discovery.rank

    monkeypatch.setattr(host_discovery, "request_descriptor", request)
    monkeypatch.setattr(host_discovery, "_HostSegment", HostSegment)
    found = find_all(["same"] * 4, HashStore())
    assert found[0].members == ((0, 1), (2, 3))
    assert all(each == found[0] for each in found)


def test_a_rank_that_does_not_come_is_named() -> None:
    found = find_all(["a", "a", ""], HashStore(), seconds=2.0)
    assert [each.missing for each in found[:2]] == [(2,), (2,)]
    assert "rank 2 of group 'group' did not come within 2.0 s" in str(found[0])


@pytest.mark.parametrize("hosts", [1, 4])
def test_finding_costs_a_few_requests_per_rank(hosts: int) -> None:
    store = CountingStore()
    names = [f"host {rank % hosts}" for rank in range(32)]
    find_all(names, store)
    assert store.requests.total() <= 4 * len(names) + 10 * hosts, store.requests


def test_the_hosts_of_a_subgroup() -> None:
    hosts = Hosts([[3, 4], [0, 2], [1]], ["x", "y", "z"])
    assert (hosts.members, hosts.names) == (((0, 2), (1,), (3, 4)), ("y", "z", "x"))
    assert hosts.rails == 1
    assert Hosts.decode(hosts.encode()) == hosts
    assert [Hosts([[0, 1], [2], [3, 4]], ["x", "y", "z"]).on(host) for host in range(3)] == [
        (0, 1),
        (2,),
        (3, 4),
    ]
    assert Hosts([[0], [2], [1]], ["x", "x", "y"]).names == ("x:0", "y", "x:2")
    sub = hosts.among([4, 0, 3])
    assert (sub.members, sub.names) == (((0, 2), (1,)), ("x", "y"))
    assert (sub.host_of, sub.local_rank_of) == ([0, 1, 0], [0, 0, 1])
    assert sub.describe(1) == "rank 1 on host y"


def test_a_failure_is_told_to_a_store_that_is_gone_for_a_short_time_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_discovery, "_TELL_SECONDS", 0.1)
    server = TCPStore("127.0.0.1", 0, is_master=True)
    store = TCPStore("127.0.0.1", server.port, timeout=3600.0)
    discovery = host_discovery._Discovery(PrefixStore("finding", store), 1, 2, "default", 3600.0)
    server.close()
    discovery.tell_failure(ValueError("for which it cannot enter"))
    assert store.timeout.total_seconds() == 3600.0
