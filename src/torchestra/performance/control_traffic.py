"""Control messages: who tells whom what, besides tensors, while a job joins, runs and loses a host.

They are counted by running the product's own code. At the job's size: the failure detector of the coordinator
and of another leader, over a transport that counts, and the notices of an abort. At two small sizes, whose
difference is continued as a line: joining, on threads that pretend to be hosts, over a store that counts; and
a look at the registers of a membership agreement.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchestra.engine.hosts import Hosts
from torchestra.engine.kernels.selection import SpinPolicy
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.memory.arena import Arena, layout_for
from torchestra.engine.multihost.abort_notices import AbortNotices
from torchestra.engine.multihost.heartbeat_bound import heartbeat_bound
from torchestra.engine.multihost.heartbeat_monitor import HeartbeatMonitor
from torchestra.engine.multihost.heartbeat_tree import rows_of
from torchestra.engine.multihost.host_discovery import find_hosts
from torchestra.engine.multihost.shrinking import poll_interval
from torchestra.engine.multihost.store_registers import StoreRegisters
from torchestra.engine.multihost.suspicion import PINGS_PER_BOUND
from torchestra.performance.machine import Machine
from torchestra.rendezvous.gathering import gather
from torchestra.store import HashStore
from torchestra.transport.message import Message
from torchestra.world.registry import thread_rank

_SIZES = (16, 32)
"""Ranks of the small jobs that are counted."""

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Traffic:
    """The messages of one purpose.

    Attributes:
        what: the purpose.
        sender, receiver: who sends them to whom.
        messages: how many; with the answers, of requests to the store.
        nbytes: of their contents.
        per: ``"second"`` or ``"job"``.
    """

    what: str
    sender: str
    receiver: str
    messages: float
    nbytes: float
    per: str


def control_traffic(machine: Machine) -> list[Traffic]:
    """Return the control messages of a job on a machine."""
    rows = _joining(machine.ranks, machine.ranks_per_host)
    if machine.hosts > 1:
        rows += _heartbeats(machine.hosts, machine.ranks_per_host)
        rows += _abort_notices(machine.hosts)
        rows += _agreement(machine.ranks)
    return rows


# Heartbeats


class _CountingLink:
    """A transport that sends nothing, and counts (group_transport.py:GroupTransport)."""

    def __init__(self) -> None:
        self.link = self
        self.sent: list[tuple[int, int, int]] = []
        self.arrived: Callable[[Message], None] = lambda message: None

    def listen(self, channel: int, arrived: Callable[[Message], None], ended: object) -> None:
        self.arrived = arrived

    def post_text(self, peer: int, kind: int, tag: int, text: bytes) -> None:
        self.sent.append((peer, tag, len(text)))

    def received_at(self, peer: int) -> float:
        return 0.0


def _heartbeats(hosts: int, ranks_per_host: int) -> list[Traffic]:
    """Let the coordinator and another leader look once, and answer one ping; each does so every interval."""
    starts = range(0, hosts * ranks_per_host, ranks_per_host)
    table = Hosts(
        [range(start, start + ranks_per_host) for start in starts], [str(host) for host in range(hosts)]
    )
    bound = heartbeat_bound()
    per_second = PINGS_PER_BOUND / bound
    rows = rows_of(hosts)
    coordinator, leader = (_look(table, host, bound) for host in (0, rows[0][-1]))
    # Each ping is answered with as much as it holds.
    from_coordinator, to_coordinator = coordinator, [each * coordinator[0] for each in leader]
    of_a_row = []
    if len(rows) > 1:
        sent, nbytes = _look(table, rows[1][0], bound)
        of_a_row = [
            Traffic(
                "pings and answers",
                "each row's coordinator",
                "its row, the coordinator",
                2 * per_second * sent,
                2 * per_second * nbytes,
                "second",
            )
        ]
    return [
        Traffic(
            "pings and answers",
            "the coordinator",
            "one rank of each host it watches",
            2 * per_second * from_coordinator[0],
            2 * per_second * from_coordinator[1],
            "second",
        ),
        Traffic(
            "pings and answers",
            "those hosts' leaders",
            "the coordinator",
            2 * per_second * to_coordinator[0],
            2 * per_second * to_coordinator[1],
            "second",
        ),
        *of_a_row,
    ]


def _look(table: Hosts, host: int, bound: float) -> list[int]:
    """Return how many messages a leader sends at each look, and their bytes."""
    ranks = table.on(host)
    arena, descriptor = Arena.create(layout_for(len(ranks)), "counted")
    os.close(descriptor)  # the arena has its own
    context = RankContext(arena, 0, "counted", SpinPolicy(0, 0))
    context.group_ranks = ranks
    detector = HeartbeatMonitor(HashStore(), table, host, context, bound)
    link: Any = _CountingLink()
    detector.attach(link)
    detector.has_met = True
    detector.check()
    return [len(link.sent), sum(nbytes for _, _, nbytes in link.sent)]


# The end of a group


def _abort_notices(hosts: int) -> list[Traffic]:
    """Let host 0 tell all that the group is over, and one that it tells pass that on; none is gone."""
    reason: list[object] = ["host 1 has been silent for 10 s: it is down, or the network to it is", [], ""]
    told: list[tuple[int, list[int]]] = []
    passed_on: list[int] = []
    originator: AbortNotices

    def tell(host: int, notice: list[object], onward: list[int]) -> None:
        told.append((len(json.dumps([*notice, onward])), onward))
        originator.confirm([host, *onward])

    originator = AbortNotices(hosts, 0, lambda host: host, tell, lambda rank, confirmed: None)
    originator.tell(reason, [], lambda host: False)
    onward = max((each for _, each in told), key=len)
    relay = AbortNotices(
        hosts,
        1,
        lambda host: host,
        lambda rank, notice, _: passed_on.append(len(json.dumps(notice))),
        lambda rank, confirmed: None,
    )
    relay.relay(0, reason, onward)
    found = [
        Traffic(
            "the end of a group",
            "who finds it out",
            "its row, one host of each other row" if len(rows_of(hosts)) > 1 else "all other hosts",
            len(told),
            sum(nbytes for nbytes, _ in told),
            "job",
        )
    ]
    if passed_on:
        found.append(
            Traffic("the end of a group", "that host", "its row", len(passed_on), sum(passed_on), "job")
        )
    return found


# Joining


class _CountingStore(HashStore):
    """Counts requests, and the bytes of keys, values and answers."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self.nbytes = 0
        self._counting = threading.Lock()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in _REQUESTS:
            return found

        def counted(*arguments: Any, **named: Any) -> Any:
            answer = found(*arguments, **named)
            with self._counting:
                self.requests += 1
                self.nbytes += sum(map(_length, (*arguments, answer)))
            return answer

        return counted


_REQUESTS = frozenset(
    {"set", "get", "add", "append", "compare_set", "multi_get", "multi_set", "check", "wait", "await_values"}
)


def _length(value: Any) -> int:
    """Return about how many bytes travel for a key, a value, or several of them."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return sum(map(_length, value))
    return len(value) if isinstance(value, str | bytes) else 8


def _joining(ranks: int, ranks_per_host: int) -> list[Traffic]:
    """Count the requests with which ranks meet and find out who is on which host."""
    per_host = min(ranks_per_host, _SIZES[0] // 2)
    small, large = (_count_joining(size, per_host) for size in _SIZES)
    requests, nbytes = (_line(*counts, ranks) for counts in zip(small, large, strict=True))
    return [
        Traffic("joining: meeting, finding hosts", "every rank", "the store", 2 * requests, nbytes, "job")
    ]


def _count_joining(size: int, per_host: int) -> tuple[int, int]:
    store = _CountingStore()
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            with thread_rank(rank, size, store, f"host{rank // per_host}"):
                find_hosts(gather(store, rank, size, _TIMEOUT_S), rank, size, "counted", _TIMEOUT_S)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return store.requests, store.nbytes


def _line(small: int, large: int, size: int) -> float:
    """Continue what was counted at the two sizes."""
    slope = (large - small) / (_SIZES[1] - _SIZES[0])
    return max(0.0, large + slope * (size - _SIZES[1]))


# The agreement after a death


def _agreement(ranks: int) -> list[Traffic]:
    """Count what a rank reads when it looks at the registers, as each does again and again."""
    small, large = (_count_look(size) for size in _SIZES)
    requests = large[0]
    nbytes = _line(small[1], large[1], ranks)
    per_second = ranks / poll_interval(ranks).longest
    return [
        Traffic(
            "shrink(): who goes on",
            "every rank",
            "the store",
            2 * requests * per_second,
            nbytes * per_second,
            "second",
        )
    ]


def _count_look(size: int) -> tuple[int, int]:
    store = _CountingStore()
    registers = [StoreRegisters(store, rank, size, "counted") for rank in range(size)]
    for each in registers:
        each.ballot()
        each.announce()
    before = store.requests, store.nbytes
    registers[0].ballot()
    return store.requests - before[0], store.nbytes - before[1]
