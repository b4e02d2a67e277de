"""``torchestra run``: its arguments, the signals it gets, and what it says at the end."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from types import FrameType

from torchestra.engine.layout import RECORD_VARIABLE
from torchestra.errors import DistError
from torchestra.launcher.cores import usable_cores
from torchestra.launcher.job import AFTER_FAILURE, Job, StopPlan
from torchestra.launcher.nodes import Nodes
from torchestra.launcher.output import colours_wanted, open_devices
from torchestra.launcher.recorder import Recorder
from torchestra.launcher.report import (
    failure_line,
    failure_report,
    survived_report,
    survivors_report,
    tracebacks_report,
)
from torchestra.launcher.spec import JobSpec, Script
from torchestra.launcher.stdin import StandardInput
from torchestra.launcher.surroundings import MeetingPoint
from torchestra.launcher.warm import WarmServer

__all__ = ["add_arguments", "main", "ranks_argument"]

_NO_SUCH_FILE = 2
_INTERRUPT: StopPlan = ((signal.SIGINT, 5.0), (signal.SIGTERM, 0.5))
_TERMINATE: StopPlan = ((signal.SIGTERM, 5.0),)
_KILL: StopPlan = ()
_PLANS = {signal.SIGINT: _INTERRUPT, signal.SIGTERM: _TERMINATE, signal.SIGHUP: _TERMINATE}

_EPILOG = """\
Each rank is a process of its own and finds in its environment RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHESTRA_STORE, and OMP_NUM_THREADS (its share of the
cores) unless that is set already. Lines of output are prefixed by rank; with one rank output passes
through untouched. Rank 0 reads the launcher's standard input, the others read nothing.

The first rank to fail ends the job, and its exit code is the job's (128 + the number for a signal). With
--max-failures N, up to N ranks may fail (be killed, raise, exit with a code other than 0) while the others go
on; if these end well the exit code is 0. For programs that go on without the ranks they lose, by
group.shrink(): see docs/guides/surviving-failures.md.

With --nnodes N the job has ranks on N hosts: on each, run the same command with --rendezvous HOST:PORT (of
node 0) and its own --node-rank; --nproc may differ. All need the same TORCHESTRA_SECRET in their environment.
The first host to fail ends the job on all.

Ctrl-C interrupts all ranks; SIGTERM and SIGHUP are passed on; a second one kills them at once.
"""


def ranks_argument(text: str) -> int:
    """A number of ranks from the command line: a positive integer, or ``auto`` for one per usable core."""
    if text == "auto":
        return usable_cores()
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive number or 'auto', got {text!r}")
    return int(text)


def failures_argument(text: str) -> int:
    """A number of failures from the command line: an integer, not negative."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number, 0 or more, got {text!r}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "-n",
        "--nproc",
        type=ranks_argument,
        default="auto",
        metavar="N",
        help="how many ranks to start; 'auto', the default, is one per usable core",
    )
    parser.add_argument(
        "--nnodes",
        type=ranks_argument,
        default=1,
        metavar="N",
        help="how many hosts the job has; the same command is run on each, with another --node-rank",
    )
    parser.add_argument(
        "--node-rank",
        type=failures_argument,
        default=0,
        metavar="K",
        help="which of the hosts this is, from 0",
    )
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where node 0 listens for the others; the same on all",
    )
    parser.add_argument(
        "--max-failures",
        type=failures_argument,
        default=0,
        metavar="N",
        help="how many ranks may fail without ending the job; default 0",
    )
    parser.add_argument(
        "--record",
        metavar="DIR",
        help="keep in DIR what the ranks did last, for 'torchestra report --from DIR'",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="the script is a module's name, as for python -m"
    )
    parser.add_argument("script", help="the Python file that every rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")


def main(options: argparse.Namespace) -> int:
    """Run the script on all ranks; the exit code."""
    if not options.module and not os.path.exists(options.script):
        print(f"torchestra run: there is no file {options.script!r}", file=sys.stderr)
        return _NO_SUCH_FILE
    if options.nnodes > 1 and options.rendezvous is None:
        print("torchestra run: --nnodes needs --rendezvous HOST:PORT of node 0", file=sys.stderr)
        return _NO_SUCH_FILE
    _fill_standard_files()
    meeting = MeetingPoint("" if options.nnodes > 1 else "127.0.0.1")
    environment = meeting.environment(os.environ, options.nproc)
    # Before torch is imported, so that every library it brings reads the same number.
    os.environ["OMP_NUM_THREADS"] = environment["OMP_NUM_THREADS"]
    if options.record is not None:
        environment[RECORD_VARIABLE] = os.path.abspath(options.record)
    server = WarmServer.forked()
    nodes = None
    if options.nnodes > 1:
        try:
            nodes = Nodes(
                options.nnodes, options.node_rank, options.rendezvous, options.nproc, meeting.master_port
            )
        except DistError as error:
            server.close()
            meeting.close()
            print(f"torchestra run: {error}", file=sys.stderr)
            return 1
        environment = nodes.environment(environment)
    spec = JobSpec(
        nproc=options.nproc,
        target=Script(options.script, tuple(options.arguments), options.module),
        environment=environment,
        directory=os.getcwd(),
        first_rank=nodes.first_rank if nodes else 0,
        world_size=nodes.world_size if nodes else None,
    )
    stdin = StandardInput()
    devices = open_devices(sys.stdout, sys.stderr)
    job = Job(server, spec, meeting, devices, stdin.for_rank, options.max_failures)
    job.when_survived = lambda fault: devices[1].say(survived_report(job, fault))
    recorder = Recorder(environment.get(RECORD_VARIABLE))
    job.when_stopped = lambda: recorder.hold(job.pids)
    stdin.relay(job)
    if nodes is not None:
        job.watch(nodes.news, partial(_end_with_others, job, nodes))
    received: list[int] = []
    try:
        with _signals_to(job, received):
            job.run()
    except BrokenPipeError:
        _give_up_output()
        return 128 + signal.SIGPIPE
    except _SecondSignal:
        pass
    except DistError as error:
        print(f"torchestra: {error}", file=sys.stderr)
        return 1
    finally:
        server.close()
        job.close()
        recorder.write()
        if nodes is not None:
            for signum in _PLANS:  # the ranks are gone, and this may wait for hours
                signal.signal(signum, signal.SIG_DFL)
            _tell_others(job, nodes, received)
            nodes.close()
    return _conclude(job, received, nodes)


def _end_with_others(job: Job, nodes: Nodes) -> None:
    """Another node has failed: end this one's ranks."""
    job.unwatch(nodes.news)
    job.stop(AFTER_FAILURE)


def _tell_others(job: Job, nodes: Nodes, received: list[int]) -> None:
    """Have the other nodes end, if this one has failed or was ended."""
    if received:
        nodes.tell_failed(128 + received[0], f"ended by {signal.Signals(received[0]).name}")
    elif job.cause is not None and nodes.other is None:
        nodes.tell_failed(job.cause.shell_code, failure_line(job, job.cause))


def _conclude(job: Job, received: list[int], nodes: Nodes | None = None) -> int:
    if nodes is not None and nodes.other is not None and not received:
        node, code, why = nodes.other
        sys.stderr.write(f"{tracebacks_report(job)}torchestra: ended because node {node} failed: {why}\n")
        return code
    if received:
        name = signal.Signals(received[0]).name
        sys.stderr.write(f"{tracebacks_report(job)}torchestra: ended by {name}\n")
        return 128 + received[0]
    if job.cause is not None:
        sys.stderr.write(failure_report(job, colours_wanted(sys.stderr.isatty())))
        return job.cause.shell_code
    if job.survived:
        sys.stderr.write(survivors_report(job))
    return 0


class _SecondSignal(BaseException):
    """A signal came while an earlier one still waits to be seen: the launcher hangs in its output."""


@contextlib.contextmanager
def _signals_to(job: Job, received: list[int]) -> Iterator[None]:
    """Have the signals that end the job, or halt it, act on the ranks; those that end it go to ``received``.

    A handler only notes the signal and wakes the job's loop, which acts on it.
    """
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_reader, False)
    os.set_blocking(wake_writer, False)
    unseen: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if unseen and signum in _PLANS:
            received.append(signum)
            raise _SecondSignal
        unseen.append(signum)

    def act() -> None:
        os.read(wake_reader, 512)
        while unseen:
            signum = unseen.pop(0)
            if signum in _PLANS:
                job.stop(_KILL if received else _PLANS[signal.Signals(signum)])
                received.append(signum)
            elif signum == signal.SIGTSTP:
                job.signal(signal.SIGSTOP, final=False)
                os.kill(os.getpid(), signal.SIGSTOP)
                job.signal(signal.SIGCONT, final=False)

    for signum in (*_PLANS, signal.SIGTSTP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, note)
    signal.set_wakeup_fd(wake_writer)
    job.watch(wake_reader, act)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for signum in _PLANS:
            signal.signal(signum, signal.SIG_IGN)


def _fill_standard_files() -> None:
    """Let no pipe or socket of ours become file 0, 1 or 2 because the caller closed one of those."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _give_up_output() -> None:
    """Nobody reads our output: what is still buffered must not fail once more at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
