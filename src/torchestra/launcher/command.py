"""``torchestra run``: its arguments, and the course of a job from its start to its exit code."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from torchestra.engine.layout import RECORD_VARIABLE
from torchestra.errors import DistError
from torchestra.launcher.cores import usable_cores
from torchestra.launcher.failure_report import conclude
from torchestra.launcher.flight_dumps import FlightDumps
from torchestra.launcher.fork_backend import ForkBackend
from torchestra.launcher.fork_server_client import ForkServerClient
from torchestra.launcher.job import Job
from torchestra.launcher.node_course import prepare, tell_others
from torchestra.launcher.nodes import Nodes
from torchestra.launcher.on_ray.options import add_ray_arguments, ray_arguments_given
from torchestra.launcher.output import open_sinks
from torchestra.launcher.port_reservation import PortReservation
from torchestra.launcher.replacements import PRELOADED, ElasticLimits
from torchestra.launcher.signals import ENDING, open_standard_files, run_job
from torchestra.launcher.spec import JobSpec, Script
from torchestra.launcher.stdin import StandardInput
from torchestra.system.switch import SERVED_BACKENDS, SWITCH_VARIABLE

_NO_SUCH_FILE = 2

_STORE_REPLICAS = 3
"""How many processes serve the store of an elastic job on one host: one may be lost at a time."""

_EPILOG = """\
Each rank is a process of its own and finds in its environment RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHESTRA_STORE, and OMP_NUM_THREADS (its share of the
cores) unless that is set already. Lines of output are prefixed by rank; with one rank output passes
through untouched. Rank 0 reads the launcher's standard input, the others read nothing.

The first rank to fail ends the job, and its exit code is the job's (128 + the number for a signal). With
--max-failures N, up to N ranks may fail (be killed, raise, exit with a code other than 0) while the others go
on; if these end well the exit code is 0. For programs that go on without the ranks they lose, by
group.shrink(): see docs/guides/surviving-failures.md. With --nnodes, N is of the ranks on all hosts together.

With --elastic MIN:MAX a rank that fails is replaced at once while the others go on; the replacement finds
TORCHESTRA_JOIN=1 and joins them in init_process_group(). The job ends when fewer than MIN ranks are left,
when --max-restarts are used up, or when three replacements of a rank in a row fail before they have done a
step. For programs that let ranks in: see docs/guides/surviving-failures.md. With --on ray it needs --nproc.

With --nnodes N the job has ranks on N hosts: on each, run the same command with --rendezvous HOST:PORT (of
node 0) and its own --node-rank; --nproc may differ. All need the same TORCHESTRA_SECRET in their environment.
The first host to fail ends the job on all. With three hosts or more, or two and --spares 1, any host of an
elastic job may be lost, and --rendezvous HOST0:PORT,HOST1:PORT,... lets one that comes later find it when the
first host is gone.

With --on ray the ranks are placed on the nodes of a Ray cluster, each with --num-cpus CPUs; 'auto' is as
many as fit. They have the environment of their nodes, with this one's TORCHESTRA_ variables and those of
--env, and read nothing. The script and the directory in which this is run must be there on all nodes, as on
a shared file system, unless --working-dir names a folder that Ray ships: then the script is one in there.

Ctrl-C interrupts all ranks; SIGTERM and SIGHUP are passed on; a second one kills them at once.
"""


def count_argument(text: str, least: int = 0, expected: str = "a number, 0 or more") -> int:
    """Parse a number of the command line: an integer, at least ``least``.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")
    return int(text)


def _ranks_or_auto(text: str) -> int | None:
    """Parse a number of ranks; return None for ``auto``, whose value is not known yet."""
    return None if text == "auto" else count_argument(text, 1, "a positive number or 'auto'")


def _least_and_most(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not (least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
        raise argparse.ArgumentTypeError(f"must be MIN:MAX, two positive numbers in order, got {text!r}")
    return int(least), int(most)


def _node_count(text: str) -> int:
    return count_argument(text, 1, "a positive number")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "-n",
        "--nproc",
        type=_ranks_or_auto,
        default=None,
        metavar="N",
        help="how many ranks to start; 'auto', the default, is one per usable core",
    )
    _add_host_arguments(parser)
    _add_failure_arguments(parser)
    parser.add_argument(
        "--record",
        metavar="DIR",
        help="keep in DIR what the ranks did last, for 'torchestra report --from DIR'",
    )
    parser.add_argument(
        "--as",
        dest="serve_as",
        choices=SERVED_BACKENDS,
        help="serve this backend of torch.distributed, for a script that names it or none, unchanged; the"
        f" same as {SWITCH_VARIABLE} in the environment (docs/interop.md)",
    )
    add_ray_arguments(parser)
    parser.add_argument(
        "-m", "--module", action="store_true", help="the script is a module's name, as for python -m"
    )
    parser.add_argument("script", help="the Python file that every rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")


def _add_host_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nnodes",
        type=_node_count,
        default=1,
        metavar="N",
        help="how many hosts the job has; the same command is run on each, with another --node-rank",
    )
    parser.add_argument(
        "--node-rank", type=count_argument, default=0, metavar="K", help="which of the hosts this is, from 0"
    )
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT,...",
        help="where node 0 listens for the others, and where nodes 1, 2, ... do for those that come when"
        " node 0 is gone; the same on all",
    )


def _add_failure_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-failures",
        type=count_argument,
        default=0,
        metavar="N",
        help="how many ranks may fail without ending the job; default 0",
    )
    parser.add_argument(
        "--elastic",
        type=_least_and_most,
        metavar="MIN:MAX",
        help="replace ranks that fail, and go on meanwhile with MIN to MAX ranks",
    )
    parser.add_argument(
        "--spares",
        type=count_argument,
        default=0,
        metavar="K",
        help="how many hosts beside --nnodes, with the next --node-ranks, wait to take a lost one's place;"
        " with --on ray, how many places for ranks are kept beside --nproc",
    )
    parser.add_argument(
        "--max-restarts",
        type=count_argument,
        metavar="N",
        help="how many replacements --elastic may start; default: any number",
    )


def main(options: argparse.Namespace) -> int:
    """Run the script on all ranks; return the exit code."""
    if not options.module and not os.path.exists(os.path.join(options.working_dir or "", options.script)):
        print(f"torchestra run: there is no file {options.script!r}", file=sys.stderr)
        return _NO_SUCH_FILE
    wrong = _contradiction(options)
    if wrong is not None:
        print(f"torchestra run: {wrong}", file=sys.stderr)
        return _NO_SUCH_FILE
    if options.serve_as is not None:  # read by `import torch` in the processes of the ranks
        os.environ[SWITCH_VARIABLE] = options.serve_as
    open_standard_files()
    if options.on == "ray":
        from torchestra.launcher.on_ray.command import run_on_ray

        return run_on_ray(options)
    return _run_here(options, options.nproc or usable_cores())


def _contradiction(options: argparse.Namespace) -> str | None:
    """Return what is wrong with the combination of options, if anything."""
    if options.nnodes > 1 and options.rendezvous is None:
        return "--nnodes needs --rendezvous HOST:PORT of node 0"
    if options.on == "ray" and options.nnodes > 1:
        return "--nnodes is for hosts on which this command is run; with --on ray, Ray chooses the nodes"
    if options.spares and (options.elastic is None or (options.nnodes == 1 and options.on is None)):
        return "--spares is for --elastic with --nnodes or --on ray"
    if options.elastic is None and options.max_restarts is not None:
        return "--max-restarts is for --elastic MIN:MAX"
    if options.elastic is not None and (wrong := _wrong_elastic(options)) is not None:
        return wrong
    if options.on is None and (names := ray_arguments_given(options)):
        return f"{names[0]} is for --on ray"
    return None


def _wrong_elastic(options: argparse.Namespace) -> str | None:
    least, most = options.elastic
    ranks = options.nproc or usable_cores()
    if options.max_failures:
        return (
            "--max-failures is for jobs that replace nobody: with --elastic, MIN says how many may be missing"
        )
    if options.on == "ray" and options.nproc is None:
        return "--elastic with --on ray needs --nproc"
    if options.nnodes == 1 and not least <= ranks <= most:
        return f"--nproc is {ranks}, which is not within --elastic {least}:{most}"
    return None


def _elastic_limits(options: argparse.Namespace) -> ElasticLimits | None:
    if options.elastic is None:
        return None
    least, most = options.elastic
    return ElasticLimits(least, most, options.max_restarts)


def _run_here(options: argparse.Namespace, nproc: int) -> int:
    replicas = _STORE_REPLICAS if options.elastic is not None and options.nnodes == 1 else 1
    ports = PortReservation("" if options.nnodes > 1 else "127.0.0.1", replicas)
    environment = ports.environment(os.environ, nproc)
    # Before torch is imported, so that every library it loads reads the same number.
    os.environ["OMP_NUM_THREADS"] = environment["OMP_NUM_THREADS"]
    if options.record is not None:
        environment[RECORD_VARIABLE] = os.path.abspath(options.record)
    server = ForkServerClient.forked()
    nodes = None
    if options.nnodes > 1:
        try:
            nodes = _meet(options, nproc, ports.master_port)
        except (DistError, KeyboardInterrupt) as error:
            server.close()
            ports.close()
            interrupted = isinstance(error, KeyboardInterrupt)
            why = "interrupted before all launchers had come" if interrupted else error
            print(f"torchestra run: {why}", file=sys.stderr)
            return 128 + signal.SIGINT if interrupted else 1
        if nodes.node_rank is None:
            server.close()
            ports.close()
            return _unneeded(nodes)
        environment, nproc = nodes.environment(environment), nodes.nproc
    spec = JobSpec(
        nproc=nproc,
        target=Script(options.script, tuple(options.arguments), options.module),
        environment=environment,
        directory=os.getcwd(),
        first_rank=nodes.first_rank if nodes else 0,
        world_size=nodes.world_size if nodes else None,
        joins=nodes.joins if nodes else False,
        preload=PRELOADED if options.elastic is not None else (),
    )
    most = min(options.max_failures, (spec.world_size or nproc) - 1)  # one must end well
    return _run_ranks(spec, server, ports, nodes, most, _elastic_limits(options))


def _run_ranks(
    spec: JobSpec,
    server: ForkServerClient,
    ports: PortReservation,
    nodes: Nodes | None,
    max_failures: int,
    limits: ElasticLimits | None,
) -> int:
    """Run the ranks of this host to their end, report how they ended, and return the exit code."""
    stdin = StandardInput()
    sinks = open_sinks(sys.stdout, sys.stderr)
    changed = dict if nodes is None else nodes.store_variables
    job = Job(ForkBackend(server, ports, stdin.for_rank, changed), spec, sinks, max_failures)
    dumps = FlightDumps(spec.environment.get(RECORD_VARIABLE))
    prepare(job, nodes, limits, max_failures, sinks[1], dumps)
    stdin.relay(job.loop)
    received: list[int] = []
    try:
        code = run_job(job, received)
    finally:
        server.close()
        job.close()
        dumps.write()
        if nodes is not None:
            for signum in ENDING:  # the ranks are gone, and this may wait for hours
                signal.signal(signum, signal.SIG_DFL)
            tell_others(job, nodes, received)
            nodes.close()
    return conclude(job, received, nodes.other if nodes is not None else None) if code is None else code


def _meet(options: argparse.Namespace, nproc: int, port: int) -> Nodes:
    least = None if options.elastic is None else options.elastic[0]
    return Nodes(options.nnodes, options.node_rank, options.rendezvous, nproc, port, least, options.spares)


def _unneeded(nodes: Nodes) -> int:
    """Say that the job has ended without this host; return the exit code."""
    nodes.close()
    why = "" if nodes.other is None else f": node {nodes.other.node} failed: {nodes.other.why}"
    print(f"torchestra run: the job has ended without this host{why}", file=sys.stderr)
    return 0 if nodes.other is None else nodes.other.code
