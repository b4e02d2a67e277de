""":func:`torchestra.launch` with ``on="ray"``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from torchestra.launcher.job import Job
from torchestra.launcher.launched_job import LaunchedJob
from torchestra.launcher.on_ray.backend import RayBackend
from torchestra.launcher.on_ray.options import RayOptions
from torchestra.launcher.on_ray.placement import Cluster
from torchestra.launcher.output import open_sinks
from torchestra.launcher.pickling import dump_call
from torchestra.launcher.spec import JobSpec

__all__ = ["launch_on_ray"]

T = TypeVar("T")


def launch_on_ray(
    fn: Callable[..., T],
    nproc: int | Literal["auto"],
    args: tuple[Any, ...],
    timeout: float | None,
    env: Mapping[str, str],
    options: RayOptions,
) -> list[T]:
    """See :func:`torchestra.launch`."""
    target = dump_call(fn, args, elsewhere=True)
    with contextlib.closing(Cluster(options)) as cluster:
        ranks = cluster.ranks_at_most() if nproc == "auto" else nproc
        with contextlib.closing(cluster.place(ranks)) as placement:
            spec = JobSpec(nproc=ranks, target=target, environment={}, directory="")
            job = Job(RayBackend(placement, env), spec, open_sinks(sys.stdout, sys.stderr))
            launched = LaunchedJob(job, timeout)
            with contextlib.closing(job):
                launched.run()
                return launched.results()
