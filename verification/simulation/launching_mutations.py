"""Ways to break the launchers of a job on several hosts, each with a run that shows it.

The last three are defects that the simulation has found, put back.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import NamedTuple
from unittest import mock

from torchestra.launcher import failure_policy, node_ranks, nodes
from torchestra.launcher.job import Job
from torchestra.launcher.node_ranks import LauncherDetector, NodeRanks
from torchestra.launcher.nodes import Nodes
from torchestra.launcher.replacements import ElasticLimits, Replacements
from torchestra.launcher.root_cause import FailedRank
from verification.simulation import launching
from verification.simulation.faults import Fault
from verification.simulation.launching import LaunchingWorld, Terms
from verification.simulation.network import Quality
from verification.simulation.scheduler import SimulationError
from verification.simulation.world import Plan, World

_TRIED = 20


class Mutation(NamedTuple):
    """One way to break launchers, or others.

    Attributes:
        owner, method, replacement: what is replaced, by what.
        plan: returns a run by its seed; most of them show it, and break nothing without.
        says: a part of what the failure says.
    """

    owner: type | ModuleType
    method: str
    replacement: object
    plan: Callable[[int], World]
    says: str

    def failure(self, seed: int) -> str:
        """Return what a run without the mutation breaks."""
        try:
            self.plan(seed).go()
        except SimulationError as failure:
            return str(failure)
        finally:
            gc.collect()
        return ""

    def is_found(self) -> bool:
        """Return whether one of some runs with the mutation fails as it says."""
        with mock.patch.object(self.owner, self.method, self.replacement):
            return any(self.says in self.failure(seed) for seed in range(_TRIED))


def _job(
    seed: int,
    *faults: Fault,
    hosts: int = 2,
    ranks: int = 2,
    limits: ElasticLimits | None = None,
    spares: int = 0,
    max_failures: int = 0,
    until: float = 4.0,
) -> LaunchingWorld:
    starts = (0.0,) * (hosts + spares)
    given = Terms(hosts, spares, (ranks,) * hosts, limits, max_failures, 1, starts, until)
    plan = Plan(seed, range(hosts + spares), 0.0, Quality(), [*faults], most_turns=60_000)
    return LaunchingWorld(plan, given)


def _one_error(seed: int) -> LaunchingWorld:
    return _job(seed, Fault(2.0, "error", 1, 1, -1, 0.0), until=5.0)


def _one_dies(seed: int) -> LaunchingWorld:
    return _job(seed, Fault(2.0, "death", 1, 1, -1, 0.0), until=5.0)


def _one_dies_elsewhere(seed: int) -> LaunchingWorld:
    """Return a run in which all ranks of a host fail, and the cause is on another."""
    return _job(seed, Fault(2.0, "death", 0, 1, -1, 0.0), ranks=1, until=5.0)


def _one_too_many(seed: int) -> LaunchingWorld:
    deaths = [Fault(2.0 + 0.5 * host, "death", 0, host, -1, 0.0) for host in range(2)]
    return _job(seed, *deaths, max_failures=1, until=5.0)


def _nothing(seed: int) -> LaunchingWorld:
    return _job(seed, until=2.0)


_ELASTIC = ElasticLimits(1, 6, None)


def _spare(seed: int) -> LaunchingWorld:
    return _job(seed, hosts=2, spares=1, limits=_ELASTIC, until=5.0)


def _stopped(seed: int) -> LaunchingWorld:
    """Return a run in which a launcher is stopped for long, and a spare host takes its place."""
    return _job(seed, Fault(2.0, "stop", 1, 1, -1, 9.0), spares=1, limits=_ELASTIC, until=18.0)


def _one_death(seed: int) -> LaunchingWorld:
    return _job(seed, Fault(3.0, "death", 0, 1, -1, 0.0), limits=_ELASTIC, until=8.0)


def _lost_host(seed: int) -> LaunchingWorld:
    """Return a run in which the host of the launchers' store is lost, shortly before the ranks end."""
    return _job(seed, Fault(3.0, "power", 0, 0, -1, 0.0), limits=_ELASTIC, until=5.0)


def _lost_primary(seed: int) -> LaunchingWorld:
    """Return a run in which the machine of the store's primary loses its power: heartbeats go to another."""
    plan = launching.plan(1000249)
    faults = [fault._replace(at=fault.at + 0.01 * seed) for fault in plan.faults]
    return LaunchingWorld(plan.with_faults(faults), launching.terms(1000249))


def _report_nothing(self: Nodes, code: int, why: str) -> None:
    pass


def _count_here_alone(self: Nodes, failed: FailedRank, most: int) -> None:
    pass


def _take_all_for_silent(self: LauncherDetector, name: str) -> bool:
    return True


def _keep_the_place(self: NodeRanks, node_rank: int) -> bool:
    return True


def _wait_for_no_launcher(self: Nodes) -> None:
    pass


def _replace_nobody(self: Replacements, failed: FailedRank) -> None:
    pass


def _blame_the_first(failed_ranks: Iterable[FailedRank], survived: int = 0) -> FailedRank | None:
    ordered = sorted(failed_ranks, key=lambda failed: failed.time)
    return ordered[survived] if len(ordered) > survived else None


MUTATIONS: dict[str, Mutation] = {
    "report no failure": Mutation(Nodes, "report_failure", _report_nothing, _one_error, "blames ranks"),
    "count failures here alone": Mutation(
        Nodes, "count_failure", _count_here_alone, _one_too_many, "ranks failed"
    ),
    "take all for silent": Mutation(
        LauncherDetector, "is_silent", _take_all_for_silent, _spare, "which is well"
    ),
    "keep a place that is taken": Mutation(NodeRanks, "is_mine", _keep_the_place, _stopped, "live on"),
    "wait for no launcher": Mutation(
        Nodes, "_await_the_others", _wait_for_no_launcher, _nothing, "nothing went wrong"
    ),
    "replace nobody": Mutation(Replacements, "survived", _replace_nobody, _one_death, "have ended well"),
    "blame the first": Mutation(failure_policy, "root_cause", _blame_the_first, _one_dies, "blames ranks"),
    "take looking for a primary for silence": Mutation(
        node_ranks, "FAILOVER_SECONDS", 0.0, _lost_primary, "which is well"
    ),
    "await no cause of another host": Mutation(
        Job, "_awaits_cause", lambda self: False, _one_dies_elsewhere, "blames ranks"
    ),
    "await a lost store": Mutation(nodes, "_LAST_WORDS_SECONDS", 600.0, _lost_host, "ended long after"),
}
