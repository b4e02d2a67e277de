"""All live hosts hear that a group is over, and none sends or hears more than a row, whoever is gone."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import pytest

from torchestra.engine.multihost import abort_notices
from torchestra.engine.multihost.abort_notices import CONFIRM_SECONDS, RELAY_SECONDS, AbortNotices
from torchestra.engine.multihost.heartbeat_tree import rows_of

NOTICE: list[object] = ["it is over", [], ""]


class Network:
    """Hosts of one rank each, a clock, and what is on its way between them.

    Args:
        gone: hosts that answer nothing; nobody knows of them.
        mute: hosts that hear, and end before they pass anything on.

    Attributes:
        told: by host, how often it has been told.
        sent: by sender and receiver, how many notices.
        elapsed: the seconds that have passed.
    """

    def __init__(self, hosts: int, gone: Iterable[int] = (), mute: Iterable[int] = ()) -> None:
        self.hosts, self.gone, self.mute = hosts, frozenset(gone), frozenset(mute)
        self.told: Counter[int] = Counter()
        self.sent: Counter[tuple[int, int]] = Counter()
        self.elapsed = 0.0
        self.on_the_way: deque[tuple[int, int, str, list[int]]] = deque()
        self._notices: dict[int, AbortNotices] = {}

    def of(self, host: int) -> AbortNotices:
        if host not in self._notices:
            made = self._notices[host] = AbortNotices(
                self.hosts,
                host,
                contact=lambda other: other,
                say_abort=lambda rank, _, onward: self._send(host, rank, "abort", onward),
                say_confirm=lambda rank, hosts: self._send(host, rank, "confirm", hosts),
            )
            made.changed = self  # type: ignore[assignment]
        return self._notices[host]

    def _send(self, sender: int, receiver: int, what: str, hosts: list[int]) -> None:
        self.sent[sender, receiver] += what == "abort"
        self.on_the_way.append((sender, receiver, what, hosts))

    def deliver(self) -> None:
        while self.on_the_way:
            sender, receiver, what, hosts = self.on_the_way.popleft()
            if receiver in self.gone:
                continue
            if what == "confirm":
                self.of(receiver).confirm({sender, *hosts})
                continue
            self.told[receiver] += 1
            self._send(receiver, sender, "confirm", [])
            if hosts and receiver not in self.mute:
                self.of(receiver).relay(sender, NOTICE, hosts)

    # -- as the condition, and the clock, of those who wait

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None: ...

    def wait(self, seconds: float) -> None:
        self.deliver()
        self.elapsed += seconds

    def monotonic(self) -> float:
        return self.elapsed

    def tell(self, monkeypatch: pytest.MonkeyPatch, originator: int, failed: Iterable[int] = ()) -> None:
        monkeypatch.setattr(abort_notices, "time", self)
        self.of(originator).tell(NOTICE, [*failed], lambda host: False)
        self.deliver()

    def most_sent(self) -> int:
        """Return how many notices the busiest host has sent."""
        by_sender: Counter[Any] = Counter()
        for (sender, _), number in self.sent.items():
            by_sender[sender] += number
        return max(by_sender.values())


def test_few_hosts_are_all_told_by_the_one_that_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(8)
    network.tell(monkeypatch, 3)
    assert +network.sent == {(3, host): 1 for host in range(8) if host != 3}


def test_of_twelve_thousand_hosts_none_tells_more_than_rows_and_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """12,500 hosts with 8 ranks each are 100,000 ranks."""
    hosts, originator = 12_500, 5_000
    network = Network(hosts)
    network.tell(monkeypatch, originator)
    assert network.told == {host: 1 for host in range(hosts) if host != originator}
    rows = rows_of(hosts)
    assert network.most_sent() <= len(rows) + len(rows[0])
    assert network.elapsed < RELAY_SECONDS


def test_relays_that_are_gone_hide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows that they are; one hears and ends. Their rows are told when no confirmation has come."""
    rows = rows_of(400)
    gone, mute = {rows[2][0], rows[5][0], rows[5][1], 399}, {rows[7][0]}
    network = Network(400, gone, mute)
    network.tell(monkeypatch, 0)
    assert set(network.told) == set(range(1, 400)) - gone
    assert network.most_sent() < 150  # the rows of the relays that were gone, and not all hosts
    assert RELAY_SECONDS <= network.elapsed <= CONFIRM_SECONDS + 0.2


def test_hosts_that_were_given_up_are_no_relays_and_are_told_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = rows_of(100)
    failed = [rows[1][0], rows[2][3]]
    network = Network(100, failed)
    network.tell(monkeypatch, 99, failed)
    assert set(network.told) == set(range(99)) - set(failed)
    assert all(network.sent[99, host] == 1 for host in failed)
    assert network.elapsed < RELAY_SECONDS


def test_a_relay_confirms_for_its_row_when_all_of_it_have_confirmed() -> None:
    network = Network(100)
    relay = network.of(10)
    relay.relay(55, NOTICE, [11, 12])
    assert [each[:3] for each in network.on_the_way] == [(10, 11, "abort"), (10, 12, "abort")]
    network.on_the_way.clear()
    relay.confirm([11])
    assert not network.on_the_way
    relay.confirm([12])
    assert [*network.on_the_way] == [(10, 55, "confirm", [11, 12])]
    network.on_the_way.clear()
    relay.relay(56, NOTICE, [11, 12])  # another one finds out as well: nobody has to be told again
    assert [*network.on_the_way] == [(10, 56, "confirm", [11, 12])]


def test_a_relay_does_not_wait_for_hosts_on_which_nobody_is_and_does_not_confirm_for_them() -> None:
    said: list[tuple[int, object]] = []
    relay = AbortNotices(
        100,
        10,
        contact=lambda host: None if host == 11 else host,
        say_abort=lambda rank, _, onward: said.append((rank, "abort")),
        say_confirm=lambda rank, hosts: said.append((rank, hosts)),
    )
    relay.relay(55, NOTICE, [11, 12])
    relay.confirm([12])
    assert said == [(12, "abort"), (55, [12])]
