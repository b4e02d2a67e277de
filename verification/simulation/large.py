"""Simulate one large group: up to 1,000 ranks, eight to a machine, meet, lose one of them, shrink, and go on.

So what is quadratic in the number of ranks shows: in the product, as messages or requests; in the simulation,
as time.
"""

from __future__ import annotations

import math
import time
from functools import partial

from torchestra.process_group import ProcessGroup
from verification.simulation.faults import Fault
from verification.simulation.groups import GroupsWorld, Lineage
from verification.simulation.network import Quality
from verification.simulation.scheduler import SimulationError
from verification.simulation.subjects import Failure, worlds
from verification.simulation.world import Plan

_PER_MACHINE = 8
_MOST_TURNS = 10**8
_LOOK_S = 0.25


class LargeWorld(GroupsWorld):
    """A group of which a rank dies when all are at work; the others end a second later."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.until = math.inf
        self._at_work: set[int] = set()

    def _step(self, group: ProcessGroup, lineage: Lineage) -> bool:
        is_last = super()._step(group, lineage)
        self._at_work.add(group.rank())
        return is_last

    def _do(self, fault: Fault) -> None:
        if len(self._at_work) < len(self.ranks):
            self.run.call_later(_LOOK_S, partial(self._do, fault))
        else:
            super()._do(fault)
            self.until = self.run.now + 1.0

    def _check_end(self) -> None:
        super()._check_end()
        (fault,) = self.plan.faults
        expected = tuple(rank for rank in range(len(self.ranks)) if rank != fault.rank)
        for rank in expected:
            if self.last[rank][1:] != (expected,):
                self.run.fail(f"rank {rank} was in {self.last[rank]}, and ended as {self.outcomes.get(rank)}")


def plan(ranks: int, seed: int) -> Plan:
    """Return the run of a seed."""
    hosts = [rank // _PER_MACHINE for rank in range(ranks)]
    crash = Fault(_LOOK_S, "crash", (seed * 7919 + ranks // 2 + 1) % ranks, 0, 0, 0.0)
    return Plan(seed, hosts, 0.0, Quality(), [crash], _MOST_TURNS)


def check(ranks: int, seed: int) -> tuple[Failure | None, str]:
    """Run a seed; return what it breaks, if anything, and what it took."""
    began, used = time.monotonic(), time.process_time()
    drawn = plan(ranks, seed)
    with worlds():
        world = LargeWorld(drawn)
        try:
            world.go()
            failure = None
        except SimulationError as error:
            failure = Failure(seed, str(error), str(drawn), tuple(world.run.events))
    took = (
        f"{ranks} ranks on {max(drawn.hosts) + 1} machines: {world.run.now:.1f} simulated seconds,"
        f" {world.run.turns:,} turns of {len(world.run.tasks):,} threads,"
        f" {time.monotonic() - began:.0f} s, of the processor {time.process_time() - used:.0f} s"
    )
    return failure, took
