"""A round of chaos and its world: what is drawn (plan.py), and told to each rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class World:
    """Describe some ranks.

    Attributes:
        ranks: ``threads`` or ``processes``.
        layout: how many ranks each host has.
        bridge: what is between the hosts; empty for one host.
        namespaces: the hosts are network namespaces; otherwise they only pretend to be several.
    """

    ranks: str
    layout: tuple[int, ...]
    bridge: str = ""
    namespaces: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(self.layout)

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return [host for host, ranks in enumerate(self.layout) for _ in range(ranks)][rank]

    def __str__(self) -> str:
        hosts = "+".join(map(str, self.layout))
        where = f", {self.bridge} between {'namespaces' if self.namespaces else 'pretended hosts'}"
        return f"{hosts} {self.ranks}{where if self.bridge else ''}"


@dataclass(frozen=True)
class Round:
    """Describe one round.

    Attributes:
        seed: of what its ranks draw.
        variant: which form of the fault (faults.py).
        victim: the rank that the fault is for.
        after_s: from when all ranks work until the fault begins.
        length_s: how long the fault lasts, where it ends.
        work_s: how long the ranks work.
        timeout_s: of the group's operations and of remote calls.
        heartbeat_s: how long a host may be silent.
    """

    number: int
    seed: str
    world: World
    workload: str
    fault: str
    variant: str
    victim: int
    after_s: float
    length_s: float
    work_s: float
    timeout_s: float
    heartbeat_s: float

    def __str__(self) -> str:
        what = f"{self.fault}{f' ({self.variant})' if self.variant else ''}"
        return (
            f"round {self.number}: {self.world}; {self.workload}; {what} of rank {self.victim} after"
            f" {self.after_s:.2f} s for {self.length_s:.2f} s; time-out {self.timeout_s:.1f} s,"
            f" heartbeat bound {self.heartbeat_s:.1f} s"
        )

    def dump(self) -> str:
        """Return it as text, for :func:`load`."""
        return json.dumps(asdict(self))


def load(text: str) -> Round:
    """Return what :meth:`Round.dump` has written."""
    told = json.loads(text)
    world = told.pop("world")
    return Round(world=World(**{**world, "layout": tuple(world["layout"])}), **told)
