"""Simulate jobs that ranks join while others are lost: `join()`, `pending_joiners()` and `grow()`.

Some ranks make a group; others ask to be let in, at any time. The members let them in, go on without those
that fail, and do both in one step where both happen. Every rank has its number as its member id. Checked is
what groups.py names, and besides:

* of each generation of the group at most one comes out, and all that are in it know the same members;
* a joiner gets into a group, or is told why not; where nothing lasts long, it gets in.
"""

from __future__ import annotations

import random

import torchestra as dist
from torchestra.errors import CollectiveTimeoutError, DistError, RankExcludedError
from torchestra.process_group import ProcessGroup
from torchestra.store import TCPStore
from torchestra.world.registry import thread_rank
from verification.simulation.faults import drawn
from verification.simulation.groups import BOUND_S, REST_S, GroupsWorld, Lineage
from verification.simulation.world import PORT, Plan, draw_quality

_FAULTS_S, _JOIN_S, _TIMEOUT_S = 5.0, 40.0, 25.0
_SHAPES = ((0, 1, 2), (0, 0, 1, 1), (0, 1, 2, 1), (0, 0, 1, 1, 2, 2), (0, 1, 2, 3, 0, 1))


def plan(seed: int) -> Plan:
    """Draw a run."""
    choices = random.Random(f"{seed} plan")
    hosts = choices.choice(_SHAPES)
    faults = drawn(choices, hosts, max(hosts) + 2, BOUND_S, _FAULTS_S)
    return Plan(seed, hosts, choices.choice((0.0, 0.01)), draw_quality(choices), faults)


class GrowingWorld(GroupsWorld):
    """The ranks of one run, of which the last third are joiners; these may also end as ``"refused"``."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.until = max(self.until, _FAULTS_S + REST_S)  # the last joiner comes before
        self._size = len(plan.hosts) - len(plan.hosts) // 3
        self._generations = {0: tuple(range(self._size))}

    def program(self, rank: int) -> str:
        """Train in a group that others may join; or join it."""
        lineage: Lineage = ()
        try:
            if rank >= self._size:
                self.time.sleep(random.Random(f"{self.plan.seed} joiner {rank}").uniform(1.0, _FAULTS_S))
            store = TCPStore(self.network.address(self.server_machine), PORT, timeout=_TIMEOUT_S)
            with thread_rank(rank, self._size, store, f"machine-{self.plan.hosts[rank]}"):
                if rank >= self._size:
                    dist.join(store=store, member=rank, backend="threads", timeout=_JOIN_S)
                else:
                    lineage = (tuple(range(self._size)),)
                    dist.init_process_group(
                        "threads", rank=rank, world_size=self._size, store=store, timeout=_TIMEOUT_S
                    )
                    self.has_begun = True
                return self._train(rank)
        except DistError as error:
            if lineage:
                self._judge(rank, lineage, error)
                return "failed"
            self.run.note(f"rank {rank} did not join: {type(error).__name__}: {str(error).splitlines()[0]}")
            return "refused" if "the job has ended" in str(error) else "failed"

    def _train(self, rank: int) -> str:
        """Sum until it is time to end, in one group after the other; return the outcome."""
        group = dist.group.WORLD
        assert isinstance(group, ProcessGroup)
        lineage = self._met(rank, group)
        while True:
            try:
                if group.pending_joiners() == 0:
                    if self._step(group, lineage):
                        dist.destroy_process_group()
                        return "done"
                    continue
            except DistError as error:
                self._judge(rank, lineage, error)
                if isinstance(error, RankExcludedError):
                    return "excluded"
                if isinstance(error, CollectiveTimeoutError):
                    self.run.fail(f"rank {rank} waited for its time-out: {error}")
            try:
                group = group.grow()
            except DistError as error:
                self._judge(rank, lineage, error)
                if not isinstance(error, CollectiveTimeoutError):
                    return "excluded" if isinstance(error, RankExcludedError) else "failed"
                continue
            lineage = self._met(rank, group)

    def _met(self, rank: int, group: ProcessGroup) -> Lineage:
        """Note which ranks are in a group with this one."""
        members = tuple(group.member_ids)
        self.run.note(f"rank {rank} is in generation {group.generation}, of {members}")
        if self._generations.setdefault(group.generation, members) != members or rank not in members:
            first = self._generations[group.generation]
            self.run.fail(
                f"split brain: generation {group.generation} is {first}, and {members} on rank {rank}"
            )
        self.last[rank] = (members,)
        return self.last[rank]
