"""The arguments of ``torchestra run`` that are about Ray."""

from __future__ import annotations

import argparse

from torchestra.launcher.on_ray.options import STRATEGIES, RayOptions

__all__ = ["add_ray_arguments", "ray_arguments_given", "ray_options"]

_GIVEN_BY = {
    "num_cpus": "--num-cpus",
    "num_gpus": "--num-gpus",
    "strategy": "--strategy",
    "address": "--ray-address",
    "placement_timeout": "--placement-timeout",
}


def add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe them."""
    parser.add_argument(
        "--on", choices=["ray"], help="start the ranks on a Ray cluster rather than on this host"
    )
    group = parser.add_argument_group("with --on ray")
    group.add_argument("--num-cpus", type=float, metavar="N", help="CPUs for each rank; default 1")
    group.add_argument("--num-gpus", type=int, metavar="N", help="GPUs for each rank; default 0")
    group.add_argument("--strategy", choices=STRATEGIES, help="how to spread ranks over nodes; default PACK")
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
    """Those of them that the command line has, without ``--on``."""
    more = {**_GIVEN_BY, "working_dir": "--working-dir", "env": "--env"}
    return [name for attribute, name in more.items() if getattr(options, attribute)]


def ray_options(options: argparse.Namespace) -> RayOptions:
    """What they amount to.

    Raises:
        InvalidArgumentError: one of them makes no sense.
    """
    given = {name: getattr(options, name) for name in _GIVEN_BY if getattr(options, name) is not None}
    if options.working_dir is not None:
        given["runtime_env"] = {"working_dir": options.working_dir}
    return RayOptions(**given)
