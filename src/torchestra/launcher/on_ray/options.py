"""Options for the placement of ranks on a Ray cluster, and the arguments of ``torchestra run`` for them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torchestra.arguments.annotations import checked_methods
from torchestra.errors import InvalidArgumentError
from torchestra.types import Timeout, timeout_seconds

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
_STRATEGIES: tuple[str, ...] = get_args(Strategy)
_GIVEN_BY = {
    "num_cpus": "--num-cpus",
    "num_gpus": "--num-gpus",
    "strategy": "--strategy",
    "address": "--ray-address",
    "placement_timeout": "--placement-timeout",
}


@checked_methods
@dataclass(frozen=True)
class RayOptions:
    """Options of :func:`torchestra.launch` on a Ray cluster.

    Args:
        num_cpus: CPUs of each rank, as Ray counts them.
        num_gpus: GPUs of each rank. Ranks on one node see the GPUs of all, in the order of LOCAL_RANK.
        strategy: Ray's placement strategy for the bundles: on few nodes (``"PACK"``), on many (``"SPREAD"``),
            strictly on one (``"STRICT_PACK"``) or strictly each on a different one (``"STRICT_SPREAD"``).
        address: the cluster, for ``ray.init``, unless this process is connected to one already. None: the one
            that RAY_ADDRESS names, else one that runs on this host, else one started for the call.
        runtime_env: Ray's description of the environment on the nodes, such as ``{"working_dir": "."}``.
        placement_timeout: seconds (or a timedelta) within which the cluster must place the ranks.

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
        if self.strategy not in _STRATEGIES:
            raise InvalidArgumentError(
                f"RayOptions: strategy must be one of {', '.join(_STRATEGIES)}, got {self.strategy!r}"
            )
        timeout_seconds(self.placement_timeout)

    @property
    def bundle(self) -> dict[str, float]:
        """Return the resources of one rank, by Ray's names."""
        resources = {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus)}
        return {resource: amount for resource, amount in resources.items() if amount}


def add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that concern Ray to the parser."""
    parser.add_argument(
        "--on", choices=["ray"], help="start the ranks on a Ray cluster rather than on this host"
    )
    group = parser.add_argument_group("with --on ray")
    group.add_argument("--num-cpus", type=float, metavar="N", help="CPUs for each rank; default 1")
    group.add_argument("--num-gpus", type=int, metavar="N", help="GPUs for each rank; default 0")
    group.add_argument("--strategy", choices=_STRATEGIES, help="how to spread ranks over nodes; default PACK")
    group.add_argument(
        "--ray-address",
        dest="address",
        metavar="ADDRESS",
        help="the cluster; by default RAY_ADDRESS, or one that runs here, or one started for this job",
    )
    group.add_argument(
        "--working-dir", metavar="DIR", help="a folder, or Ray's URI of one, that Ray ships to all nodes"
    )
    group.add_argument(
        "--placement-timeout",
        type=float,
        metavar="SECONDS",
        help="how long to wait for places on the cluster; default 60",
    )
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for the ranks' environment, by default with its value here; may be repeated",
    )


def ray_arguments_given(options: argparse.Namespace) -> list[str]:
    """Return the names of Ray's arguments on the command line, except ``--on``."""
    more = {**_GIVEN_BY, "working_dir": "--working-dir", "env": "--env"}
    return [name for attribute, name in more.items() if getattr(options, attribute)]


def ray_options(options: argparse.Namespace) -> RayOptions:
    """Return the Ray options that the command line sets.

    Raises:
        InvalidArgumentError: one of them makes no sense.
    """
    values = {name: getattr(options, name) for name in _GIVEN_BY if getattr(options, name) is not None}
    if options.working_dir is not None:
        values["runtime_env"] = {"working_dir": options.working_dir}
    return RayOptions(**values)
