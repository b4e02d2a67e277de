"""``torchestra run --on ray``, and :func:`torchestra.launch` with ``on="ray"``."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Literal, NoReturn, TypeVar

from torchestra.engine.layout import RECORD_VARIABLE
from torchestra.errors import DistError
from torchestra.launcher.failure_report import conclude, survived_report
from torchestra.launcher.job import Job
from torchestra.launcher.launched_job import LaunchedJob
from torchestra.launcher.on_ray.backend import RayBackend
from torchestra.launcher.on_ray.options import RayOptions, ray_options
from torchestra.launcher.on_ray.placement import Cluster
from torchestra.launcher.output import open_sinks
from torchestra.launcher.pickling import dump_call
from torchestra.launcher.replacements import PRELOADED, ElasticLimits, Replacements
from torchestra.launcher.signals import run_job
from torchestra.launcher.spec import JobSpec, Script

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


def run_on_ray(options: argparse.Namespace) -> int:
    """Run the script on all ranks; return the exit code."""
    received: list[int] = []
    try:
        with contextlib.closing(Cluster(ray_options(options))) as cluster:
            for signum in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(signum, _leave)
            ranks = options.nproc or cluster.ranks_at_most()
            with contextlib.closing(cluster.place(ranks, options.spares)) as placement:
                elastic = options.elastic is not None
                backend = RayBackend(placement, _environment(options), elastic=elastic)
                job = _job(options, ranks, backend)
                with contextlib.closing(job):
                    code = run_job(job, received)
        return conclude(job, received) if code is None else code
    except DistError as error:
        print(f"torchestra run: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("torchestra: ended by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    """Exit before there is a job, with nothing left on the cluster."""
    sys.exit(128 + signum)


def _job(options: argparse.Namespace, ranks: int, backend: RayBackend) -> Job:
    spec = JobSpec(
        nproc=ranks,
        target=Script(options.script, tuple(options.arguments), options.module),
        environment={},
        directory=os.getcwd() if options.working_dir is None else "",
        preload=PRELOADED if options.elastic is not None else (),
    )
    sinks = open_sinks(sys.stdout, sys.stderr)
    job = Job(backend, spec, sinks, options.max_failures)
    if options.elastic is not None:
        least, most = options.elastic
        limits = ElasticLimits(least, most, options.max_restarts)
        job.policy = Replacements(job, limits, sinks[1].say)
    job.when_survived = lambda failed: sinks[1].say(survived_report(job, failed))
    return job


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that the command line names."""
    variables: dict[str, str] = {}
    for text in options.env:
        name, equals, value = text.partition("=")
        if equals or name in os.environ:
            variables[name] = value if equals else os.environ[name]
    if options.record is not None:
        variables[RECORD_VARIABLE] = os.path.abspath(options.record)
    return variables
