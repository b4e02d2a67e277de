"""The course of a job on one node: what a launcher does when ranks fail, here and on the other nodes."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from functools import partial

from torchestra.launcher.failure_report import remote_failure_line, survived_report
from torchestra.launcher.flight_dumps import FlightDumps
from torchestra.launcher.job import AFTER_FAILURE, Job
from torchestra.launcher.nodes import Nodes
from torchestra.launcher.output import OutputSink
from torchestra.launcher.replacements import ElasticLimits, Replacements
from torchestra.launcher.root_cause import FailedRank

_SETTLE_CONSEQUENCE_OF_NODES_S = 1.0  # the cause may be on another node, whose launcher tells of it


def prepare(
    job: Job,
    nodes: Nodes | None,
    limits: ElasticLimits | None,
    max_failures: int,
    screen: OutputSink,
    dumps: FlightDumps,
) -> None:
    """Have a job, before it runs, do what its failures and those of other nodes ask for.

    Args:
        nodes: its other nodes, if there are any.
        limits: of an elastic job, in which ranks that die are replaced.
        max_failures: how many ranks may fail on all nodes, where it is not elastic.
        screen: where survived failures are reported.
        dumps: writes the records of ranks that are ended.
    """
    if limits is not None:
        _be_elastic(job, limits, nodes, screen)
        max_failures = 1 << 62 if limits.restarts is None else limits.restarts
    job.when_survived = partial(_survive, job, nodes, screen, max_failures, dumps)
    job.when_stopped = job.when_failing = lambda: dumps.hold(job.pids)
    if nodes is not None:
        job.when_stopped = partial(_stopped, job, nodes, dumps)
        job.spans_nodes, job.consequence_settle_s = True, _SETTLE_CONSEQUENCE_OF_NODES_S
        nodes.notify(partial(job.loop.call_soon_threadsafe, partial(_end_with_others, job, nodes)))


def tell_others(job: Job, nodes: Nodes, received: Sequence[int]) -> None:
    """Make the other nodes end if this one has failed or was ended.

    Args:
        job: it has ended.
        received: the signals that ended it.
    """
    nodes.finish_asking()
    job.cause = job.cause or nodes.exceeding_failure
    if received:
        name = signal.Signals(received[0]).name
        nodes.report_failure(128 + received[0], f"ended by {name} on {socket.gethostname()}")
    elif job.cause is not None and nodes.other is None:
        why = remote_failure_line(job, job.cause, socket.gethostname())
        nodes.report_failure(job.cause.shell_code, why)


def _be_elastic(job: Job, limits: ElasticLimits, nodes: Nodes | None, screen: OutputSink) -> None:
    """Have ranks that die replaced."""
    policy = Replacements(job, limits, screen.say)
    job.policy = policy
    if nodes is not None:
        policy.when_changed = partial(setattr, nodes, "members")
        nodes.when_ending = partial(job.loop.call_soon_threadsafe, policy.end)


def _survive(
    job: Job,
    nodes: Nodes | None,
    screen: OutputSink,
    max_failures: int,
    dumps: FlightDumps,
    failed: FailedRank,
) -> None:
    """Report a failed rank that does not end the other ranks on this host."""
    dumps.release()
    screen.say(survived_report(job, failed))
    if nodes is not None:
        nodes.count_failure(failed, max_failures)


def _end_with_others(job: Job, nodes: Nodes) -> None:
    """End this node's ranks: another node has failed, or a rank here that exceeds the limit of all nodes."""
    job.cause = job.cause or nodes.exceeding_failure
    job.stop(AFTER_FAILURE)


def _stopped(job: Job, nodes: Nodes, dumps: FlightDumps) -> None:
    """Tell the other nodes of a failure before the ranks here are ended, which takes a while.

    Ranks elsewhere have failed because of it too, and their launchers do not wait for long to hear why.
    """
    dumps.hold(job.pids)
    if job.cause is not None and nodes.other is None:
        why = remote_failure_line(job, job.cause, socket.gethostname())
        nodes.report_failure_soon(job.cause.shell_code, why)
