"""Simulate messages between the ranks of a group on several hosts: `send` and `recv`.

Every rank sends the others numbered messages, small ones and ones of several frames, while connections are
reset, and machines are slow, stopped or cut off from each other for less than the heartbeat bound. None of
this may cost a message: each arrives once, whole, and in order. Where more goes wrong (a crash, a long cut),
each rank gets all its messages, or an error that blames nobody who is well.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import torch

import torchestra as dist
from torchestra.errors import DistError
from torchestra.process_group import ProcessGroup
from verification.simulation.faults import drawn
from verification.simulation.groups import BOUND_S, GroupsWorld, Lineage
from verification.simulation.world import Plan, draw_quality

_FAULTS_S = 3.0
_SHAPES = (
    (0, 1),
    (0, 1, 2),
    (0, 1, 2, 3),
    (0, 1, 2, 3, 4, 5, 6, 7),
)  # within a host kernels wait by themselves
_ROUNDS = 12
_SIZES = (1, 8, 1000, 40_000, 300_000)  # numbers of 8 bytes: 300,000 do not go along with the announcement


def plan(seed: int) -> Plan:
    """Draw a run."""
    choices = random.Random(f"{seed} plan")
    hosts = choices.choice(_SHAPES)
    faults = drawn(choices, hosts, max(hosts) + 1, BOUND_S, _FAULTS_S)
    return Plan(seed, hosts, choices.choice((0.0, 0.01, 0.1)), draw_quality(choices), faults)


class MessagesWorld(GroupsWorld):
    """The ranks of one run.

    Attributes:
        rounds, sizes: how many messages each rank sends, and of how many numbers.
        pauses: how many seconds it does something else between two.
    """

    rounds: int = _ROUNDS
    sizes: Sequence[int] = _SIZES
    pauses: Sequence[float] = (0.0, 0.1, 0.5)

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._lost: dict[int, str] = {}  # by rank, why its messages have ended

    def _work(self, rank: int, lineage: Lineage, group: ProcessGroup) -> str:
        try:
            for number in range(self.rounds):
                self._round(rank, number)
        except DistError as error:
            self._judge(rank, lineage, error)
            if "barrier" not in str(error):
                self._lost[rank] = str(error)
            return "failed"
        return "done"

    def _check_end(self) -> None:
        super()._check_end()
        if self.is_harmed():
            return
        # A reset may cost the barrier with which the group begins: who fails there is missed by others.
        excused = {rank for rank, outcome in self.outcomes.items() if outcome == "failed"} - set(self._lost)
        while also := {rank for rank in set(self._lost) - excused if self._names(rank, excused)}:
            excused |= also
        for rank in (each for each in self._lost if each not in excused):
            self.run.fail(f"rank {rank} lost messages though nothing lasted long: {self._lost[rank]}")

    def _names(self, rank: int, others: Collection[int]) -> bool:
        return any(f"rank {other} on host" in self._lost[rank] for other in others)

    def _round(self, rank: int, number: int) -> None:
        """Send something to the rank at some distance, and receive from that at the same."""
        size = len(self.ranks)
        drawn = random.Random(f"{self.plan.seed} round {number}")  # the same on all ranks
        distance, length = drawn.randrange(1, size), drawn.choice(self.sizes)
        to, source = (rank + distance) % size, (rank - distance) % size
        sent = torch.full((length,), 1000 * rank + number)
        came = torch.zeros(length, dtype=torch.int64)
        work = dist.isend(sent, to, tag=number % 3)
        assert work is not None
        got = dist.recv(came, source, tag=number % 3)
        work.wait()
        if got != source or bool((came != 1000 * source + number).any()):
            self.run.fail(f"rank {rank} got {came[:3].tolist()} of rank {got} in round {number}")
        self.time.sleep(self.choices.choice(self.pauses))
