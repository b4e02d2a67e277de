"""Which hosts ping each other, whichever of their leaders have gone."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest

from torchestra.engine.multihost import heartbeat_tree
from torchestra.engine.multihost.heartbeat_tree import pinged_by, rows_of


def pings(hosts: int, gone: frozenset[int]) -> dict[int, list[int]]:
    """By host whose leader is there, whom it pings."""
    rows = rows_of(hosts)
    there = (host for host in range(hosts) if host not in gone)
    return {host: pinged_by(host, rows, lambda each: each not in gone) for host in there}


def reached(hosts: int, pinging: dict[int, list[int]]) -> set[int]:
    """The hosts that news reach from one of them, as pings and answers carry them."""
    edges = {frozenset((host, other)) for host, others in pinging.items() for other in others}
    found, last = {next(iter(pinging))}, set()
    while found != last:
        last = found
        found = found.union(*(edge for edge in edges if edge & found))
    return found


def cases() -> Iterator[tuple[int, frozenset[int]]]:
    for hosts in range(2, 10):
        for number in range(hosts):
            yield from ((hosts, frozenset(gone)) for gone in itertools.combinations(range(hosts), number))
    choices = random.Random(1)
    for hosts in (13, 30, 37):
        for number in (0, 1, 5, hosts // 2, hosts - 1):
            yield hosts, frozenset(choices.sample(range(hosts), number))


def test_every_host_is_pinged_and_no_cut_goes_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_tree, "MIN_HOSTS", 4)
    for hosts, gone in cases():
        pinging = pings(hosts, gone)
        everybody = set(range(hosts))
        assert reached(hosts, pinging) == everybody, (hosts, gone)
        for host, others in pinging.items():
            assert host not in others
            assert len(set(others)) == len(others) > 0
        pinged = {other for others in pinging.values() for other in others}
        assert pinged >= (everybody if len(pinging) > 1 else everybody - set(pinging)), (hosts, gone)


@pytest.mark.parametrize("hosts", [64, 65, 1009, 12_500])
def test_no_host_pings_more_than_twice_the_root(hosts: int) -> None:
    pinging = pings(hosts, frozenset())
    assert max(map(len, pinging.values())) <= 2 * math.isqrt(hosts) + 2
    assert sum(map(len, pinging.values())) == 2 * (hosts - 1)


def test_few_hosts_have_one_coordinator() -> None:
    assert pings(63, frozenset({0})) == {1: [0, *range(2, 63)], **{host: [1] for host in range(2, 63)}}
