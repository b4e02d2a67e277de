"""How ranks are placed on a Ray cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torchestra.arguments.annotations import checked_methods
from torchestra.errors import InvalidArgumentError
from torchestra.types import Timeout, timeout_seconds

__all__ = ["STRATEGIES", "RayOptions"]

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)


@checked_methods
@dataclass(frozen=True)
class RayOptions:
    """How :func:`torchestra.launch` places its ranks on a Ray cluster, and on which.

    Args:
        num_cpus: of each rank, as Ray counts them.
        num_gpus: of each rank. Ranks on one node see the GPUs of all of them, in the order of LOCAL_RANK.
        strategy: Ray's word for where the bundles of a placement group go: on few nodes (``"PACK"``), on many
            (``"SPREAD"``), or not at all unless on one (``"STRICT_PACK"``) or each on another
            (``"STRICT_SPREAD"``).
        address: the cluster, for ``ray.init``, unless this process is connected to one already. None: what
            RAY_ADDRESS names, else a cluster that runs on this host, else one that is started for the call.
        runtime_env: in Ray's words, what the ranks need on their nodes, such as ``{"working_dir": "."}``.
        placement_timeout: seconds (or a timedelta) until the ranks must have their places.

    Raises:
        InvalidArgumentError: one of these makes no sense.
    """

    num_cpus: float = 1
    num_gpus: int = 0
    strategy: Strategy = "PACK"
    address: str | None = None
    runtime_env: Mapping[str, Any] | None = None
    placement_timeout: Timeout = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.num_cpus, (int, float)) or not 0 <= self.num_cpus < math.inf:
            raise InvalidArgumentError(f"RayOptions: num_cpus must be 0 or more, got {self.num_cpus!r}")
        if not isinstance(self.num_gpus, int) or self.num_gpus < 0:
            raise InvalidArgumentError(
                f"RayOptions: num_gpus must be an int, 0 or more, got {self.num_gpus!r}"
            )
        if self.num_cpus == 0 and self.num_gpus == 0:
            raise InvalidArgumentError("RayOptions: a rank must take something: num_cpus or num_gpus")
        if self.strategy not in STRATEGIES:
            raise InvalidArgumentError(
                f"RayOptions: strategy must be one of {', '.join(STRATEGIES)}, got {self.strategy!r}"
            )
        timeout_seconds(self.placement_timeout)

    @property
    def bundle(self) -> dict[str, float]:
        """What one rank takes, in Ray's words."""
        wanted = {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus)}
        return {resource: amount for resource, amount in wanted.items() if amount}
