"""Simulate the other worlds in odd networks: machines sleep, links flap, paths have different lengths.

Programs, promises and the other faults are those of the kind of world, one kind after the other. What is odd
is drawn besides, so the runs of the other subjects' seeds stay as they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from verification.simulation import autograd, faults, groups, growing, joining_rpc, launching, messages, rpc
from verification.simulation.groups import BOUND_S
from verification.simulation.world import Plan, World

_FAULTS_S = 4.0
_PATHS_S = (0.0, 0.02, 0.15)
_KINDS: tuple[tuple[Callable[[int], Plan], Callable[[Plan], World], int], ...] = (
    (groups.plan, groups.GroupsWorld, 1),
    (growing.plan, growing.GrowingWorld, 1),
    (messages.plan, messages.MessagesWorld, 0),
    (launching.plan, launching.LaunchingWorld, 0),
    (rpc.plan, rpc.RpcWorld, 0),
    (joining_rpc.plan, joining_rpc.JoiningWorld, 0),
    (rpc.plan, autograd.AutogradWorld, 0),
)
"""Kinds of worlds: how they are drawn and run; 1 where the store's machine, the last one, may sleep, too."""


def plan(seed: int) -> Plan:
    """Draw a run."""
    draw, _, stores = _KINDS[seed % len(_KINDS)]
    usual, choices = draw(seed), random.Random(f"{seed} odd")
    more = faults.odd(choices, max(usual.hosts) + 1 + stores, BOUND_S, _FAULTS_S)
    quality = usual.quality._replace(paths=choices.choice(_PATHS_S))
    both = sorted([*usual.faults, *more])
    return Plan(seed, usual.hosts, usual.preemption, quality, both, usual.most_turns)


def world(plan: Plan) -> World:
    """Return the world of a run."""
    assert isinstance(plan.seed, int)
    return _KINDS[plan.seed % len(_KINDS)][1](plan)
