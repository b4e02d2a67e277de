"""What the events of a schedule cost a core."""

from __future__ import annotations

from collections.abc import Callable

from torchestra.performance.interpolation import factor_at
from torchestra.performance.machine import Machine
from torchestra.performance.schedule import (
    Begin,
    Compute,
    Copy,
    Event,
    Fetch,
    LocalCopy,
    Overhead,
    PeerRead,
    Reduce,
    WriteMiss,
)


class Costs:
    """The costs of events on a machine."""

    def __init__(self, machine: Machine) -> None:
        host = machine.host
        ranks = machine.ranks_per_host * (machine.hosts if machine.shares_cores else 1)
        self._machine = machine
        self._at_once = ranks
        self._rates: dict[tuple[type, int, int], float] = {}
        self._factors: dict[Begin, float] = {}
        self._calls = host.call_slowdown(ranks)
        self._tables: dict[type, Callable[[int, int], float]] = {
            Copy: host.copy_bytes_per_s,
            LocalCopy: lambda working_set_bytes, ranks: host.copy_bytes_per_s(working_set_bytes),
            Fetch: host.fetch_bytes_per_s,
            PeerRead: host.peer_read_bytes_per_s,
            Reduce: host.reduce_bytes_per_s,
        }

    def seconds_of(self, event: Event, rank: int) -> float:
        """Return how long a core is kept."""
        if isinstance(event, Copy | LocalCopy | Fetch | PeerRead | Reduce):
            key = type(event), event.working_set_bytes, event.operation_bytes
            rate = self._rates.get(key)
            if rate is None:
                rate = self._rates[key] = self._rate(event)
            return event.nbytes / rate
        if isinstance(event, WriteMiss):
            near_s, far_s = (
                self.seconds_of(Fetch(event.nbytes, size, event.operation_bytes), rank)
                for size in (0, event.working_set_bytes)
            )
            return max(0.0, far_s - near_s)
        if isinstance(event, Compute):
            return event.seconds * self._machine.stragglers.get(rank, 1.0)
        if isinstance(event, Overhead):
            costs = self._machine.host.per_op_s
            if event.name.startswith("call."):
                return self._calls * costs.get(event.name, self._machine.host.call_s)
            return costs.get(event.name, 0.0)
        return 0.0

    def factor_of(self, event: Begin) -> float:
        """Return how many times as long an operation takes as its parts."""
        factor = self._factors.get(event)
        if factor is None:
            machine = self._machine
            known = machine.link.operations if machine.hosts > 1 and machine.link else machine.host.operations
            ranks = machine.ranks_per_host
            factor = factor_at(known, event.name, event.operation_bytes, ranks)
            self._factors[event] = factor
        return factor

    def _rate(self, event: Copy | LocalCopy | Fetch | PeerRead | Reduce) -> float:
        by_itself = self._tables[type(event)](event.working_set_bytes, self._at_once)
        return by_itself / self._machine.host.work_slowdown(event.operation_bytes, self._at_once)


class StreamCosts:
    """The costs of one stream's events, which are taken in their order.

    Attributes:
        factor: how many times as long everything takes in the operation that the stream is in.
    """

    def __init__(self, costs: Costs, rank: int) -> None:
        self._costs, self._rank = costs, rank
        self.factor = 1.0

    def begin(self, event: Begin) -> None:
        """Enter an operation."""
        self.factor = self._costs.factor_of(event)

    def seconds_of(self, event: Event) -> float:
        """Return how long a core is kept."""
        seconds = self._costs.seconds_of(event, self._rank)
        return seconds if isinstance(event, Compute) else self.factor * seconds
