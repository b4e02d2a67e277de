"""The machine that a prediction is for: hosts, their ranks, links, and what is slower than the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchestra.errors import InvalidArgumentError
from torchestra.performance.calibration import HostCalibration, LinkCalibration


@dataclass(frozen=True)
class Machine:
    """Hosts that are alike, each with one link into a network that carries what the links can.

    Attributes:
        hosts, ranks_per_host: how many.
        host, link: the calibration of each; a link is needed for several hosts.
        stragglers: by rank, how much longer its own compute takes: 1.5 is 50 % more.
        slow_links: by host, the share of the speed that its link has: 0.5 is half.

    Raises:
        InvalidArgumentError: a number makes no sense, or there is no link.
    """

    hosts: int
    ranks_per_host: int
    host: HostCalibration
    link: LinkCalibration | None = None
    stragglers: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("hosts", "ranks_per_host"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"Machine.{name} must be at least 1, got {getattr(self, name)}")
        if self.hosts > 1 and self.link is None:
            raise InvalidArgumentError(
                f"{self.hosts} hosts need a link: run `torchestra calibrate` on ranks of two hosts (its"
                " --help tells how), or give the link's latency and bandwidth"
            )
        for rank, factor in self.stragglers.items():
            if not 0 <= rank < self.ranks or not (math.isfinite(factor) and factor > 0):
                raise InvalidArgumentError(
                    f"a straggler is a rank from 0 to {self.ranks - 1} and a factor above 0, got"
                    f" {rank}: {factor}"
                )
        for host, share in self.slow_links.items():
            if not 0 <= host < self.hosts or not (math.isfinite(share) and 0 < share <= 1):
                raise InvalidArgumentError(
                    f"a slow link is a host from 0 to {self.hosts - 1} and a share of its speed, above 0"
                    f" and up to 1, got {host}: {share}"
                )

    @property
    def ranks(self) -> int:
        """Return the number of ranks of all hosts."""
        return self.hosts * self.ranks_per_host

    @property
    def shares_cores(self) -> bool:
        """Return whether all hosts are namespaces of one machine."""
        return self.link is not None and self.link.shares_cores and self.hosts > 1

    @property
    def apart(self) -> frozenset[int]:
        """Return the hosts that are not like the others."""
        return frozenset(self.slow_links) | {rank // self.ranks_per_host for rank in self.stragglers}
