"""Simulate groups on several hosts that lose ranks and hosts, shrink, and go on.

The ranks meet over a TCPStore, sum something again and again, and call ``shrink()`` where that fails: all by
the public functions. Checked are:

* agreement: of each group at most one comes out, and all that are in it know the same members;
* no operation's result is wrong;
* nobody is named as failed, nor left out, whose machine was always in reach and whose processes ran (but a
  rank may be left out whose neighbours on the machine ended because they lost the store);
* who waits for a rank that is gone, or cut off, learns so before the operation's time is over;
* every wait ends; and when nothing goes wrong any more, all that live and were not left out are in one group
  and go on.
"""

from __future__ import annotations

import random

import torch

import torchestra as dist
from torchestra.errors import (
    CollectiveTimeoutError,
    DistError,
    DistNetworkError,
    DistStoreError,
    RankExcludedError,
    RankFailedError,
)
from torchestra.process_group import ProcessGroup
from torchestra.store import TCPStore
from torchestra.world.registry import thread_rank
from verification.simulation.faults import drawn
from verification.simulation.world import PORT, JobWorld, Plan, draw_quality

BOUND_S = 2.0
_FAULTS_S, REST_S, _LIMIT_S = 5.0, 3 * BOUND_S, 400.0
_TIMEOUT_S = 25.0
_BITS = 50  # of a sum: ranks that share one add up, so that there may be many
_SHAPES = (
    (0, 0, 1, 1, 2, 2, 3, 3),
    (0, 0, 0, 0, 1, 1, 1, 1),
    (0, 1, 2, 3, 4, 5, 6, 7),
    (0, 1, 1, 2, 2, 2, 3, 3),
    (0, 0, 1, 1),
    (0, 1, 2, 0, 1, 2),
    (0, 1, 2),
)

Lineage = tuple[tuple[int, ...], ...]
"""By generation, the members (numbers in the first group)."""


def plan(seed: int) -> Plan:
    """Draw a run."""
    choices = random.Random(f"{seed} plan")
    hosts = choices.choice(_SHAPES)
    faults = drawn(choices, hosts, max(hosts) + 2, BOUND_S, _FAULTS_S)
    return Plan(seed, hosts, choices.choice((0.0, 0.01, 0.1)), draw_quality(choices), faults)


class GroupsWorld(JobWorld):
    """The ranks of one run, whose outcomes are ``"done"``, ``"excluded"`` or ``"failed"``.

    Attributes:
        last: by rank, the groups it has been in.
        until: when they end, unless they shrink then: some time after the last fault is over.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, _LIMIT_S, BOUND_S)
        self.last: dict[int, Lineage] = {}
        self._out_of: dict[Lineage, tuple[int, ...]] = {}
        self.until = max((fault.ends for fault in plan.faults), default=0.0) + REST_S

    # -- the program of a rank

    def program(self, rank: int) -> str:
        """Train, in smaller and smaller groups."""
        size = len(self.ranks)
        lineage: Lineage = (tuple(range(size)),)
        self.last[rank] = lineage
        try:
            store = TCPStore(self.network.address(self.server_machine), PORT, timeout=_TIMEOUT_S)
        except DistError as error:
            self._judge(rank, lineage, error)
            return "failed"
        with thread_rank(rank, size, store, f"machine-{self.plan.hosts[rank]}"):
            try:
                dist.init_process_group(
                    "threads", rank=rank, world_size=size, store=store, timeout=_TIMEOUT_S
                )
            except DistError as error:
                self._judge(rank, lineage, error)
                return "failed"
            self.has_begun = True
            group = dist.group.WORLD
            assert isinstance(group, ProcessGroup)
            outcome = self._work(rank, lineage, group)
            if outcome == "done":
                dist.destroy_process_group()
        return outcome

    def _work(self, rank: int, lineage: Lineage, group: ProcessGroup) -> str:
        """Sum until it is time to end, in smaller and smaller groups; return the outcome."""
        while True:
            try:
                if self._step(group, lineage):
                    return "done"
                continue
            except DistError as error:
                self._judge(rank, lineage, error)
                if isinstance(error, RankExcludedError):
                    return "excluded"
                if isinstance(error, CollectiveTimeoutError):
                    self.run.fail(f"rank {rank} waited for its time-out: {error}")
            try:
                group = group.shrink()
            except DistError as error:
                self._judge(rank, lineage, error)
                if isinstance(error, RankExcludedError):
                    return "excluded"
                if isinstance(error, (DistNetworkError, DistStoreError)):
                    return "failed"
                if not isinstance(error, CollectiveTimeoutError):
                    self.run.fail(f"rank {rank}: shrink() ended with {type(error).__name__}: {error}")
                continue
            lineage = self._shrunk(rank, lineage, group)

    def _step(self, group: ProcessGroup, lineage: Lineage) -> bool:
        """Sum something; return whether all are to end."""
        members = lineage[-1]
        mine = 1 << members[group.rank()] % _BITS
        numbers = torch.tensor([mine, int(self.run.now > self.until), len(lineage)])
        dist.all_reduce(numbers)
        expected = sum(1 << member % _BITS for member in members)
        if numbers[0] != expected or numbers[2] != len(lineage) * len(members):
            self.run.fail(f"all_reduce among {members} gave {numbers.tolist()}, not {expected}")
        self.time.sleep(self.choices.choice((0.02, 0.1, 0.5)))
        return bool(numbers[1])

    def _shrunk(self, rank: int, lineage: Lineage, group: ProcessGroup) -> Lineage:
        """Note which group has replaced another one."""
        members = tuple(lineage[-1][previous] for previous in group.previous_ranks)
        self.run.note(f"rank {rank} is in the group of {members}")
        if self._out_of.setdefault(lineage, members) != members:
            self.run.fail(
                f"split brain: out of {lineage} came {self._out_of[lineage]}, and {members} on rank {rank}"
            )
        if rank not in members:
            self.run.fail(f"rank {rank} is in a group of {members}")
        self.last[rank] = (*lineage, members)
        return self.last[rank]

    # -- what is promised

    def _judge(self, rank: int, lineage: Lineage, error: DistError) -> None:
        """Check that an error blames nobody who has done nothing."""
        self.run.note(f"rank {rank}: {type(error).__name__}: {str(error).splitlines()[0]}")
        blamed: tuple[int, ...] = ()
        if isinstance(error, RankFailedError):
            blamed = error.ranks
        elif isinstance(error, CollectiveTimeoutError) and "other hosts had not arrived" not in str(error):
            blamed = error.missing
        for number in blamed if self.has_begun or not self.plan.faults else ():
            member = lineage[-1][number]
            if not self.is_guilty(member):
                self.run.fail(f"rank {rank} blames rank {member}, which is well: {error}")
        if isinstance(error, RankExcludedError) and not (self.is_guilty(rank) or self._has_lost_others(rank)):
            self.run.fail(f"rank {rank} was left out though it was well: {error}")

    def go(self) -> None:
        super().go()
        self._check_end()
        self.run.raise_failure()

    def _has_lost_others(self, rank: int) -> bool:
        """Return whether a rank of its machine has ended because its connection to the store was reset."""
        machine = self.plan.hosts[rank]
        mates = (each for each, where in enumerate(self.plan.hosts) if where == machine)
        return any(self.outcomes.get(mate) == "failed" for mate in mates)

    def _check_end(self) -> None:
        """Check that all that could go on are in one group."""
        done = {rank for rank, outcome in self.outcomes.items() if outcome == "done"}
        if len({self.last[rank] for rank in done}) > 1:
            self.run.fail(f"ranks ended in different groups: { {rank: self.last[rank] for rank in done} }")
        for rank in done:
            for member in self.last[rank][-1]:
                if member not in done and not self.ranks[member].has_crashed:
                    self.run.fail(f"rank {member} ended as {self.outcomes.get(member)}, unlike rank {rank}")
        resets = any(fault.kind == "reset" for fault in self.plan.faults)  # may cost a request to the store
        if not (self.is_harmed() or resets) and len(done) < len(self.ranks):
            self.run.fail(f"nothing lasted long, and only ranks {sorted(done)} got to the end")
