"""What is simulated, by name; and the smallest run that shows a failure."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import SimpleQueue
from unittest import mock

import torch

from verification.simulation import (
    autograd,
    files,
    groups,
    growing,
    joining_rpc,
    launching,
    messages,
    odd,
    product,
    replicas,
    rpc,
)
from verification.simulation.faults import fewer
from verification.simulation.groups import BOUND_S
from verification.simulation.scheduler import SimulationError
from verification.simulation.world import Plan, World

_ENVIRONMENT = {
    "TORCHESTRA_SECRET": "simulated secret",
    "TORCHESTRA_HEARTBEAT": f"{BOUND_S:g}",
    "TORCHESTRA_BRIDGE": "curve",
    "TORCHESTRA_HOST_ID": "",
}


@dataclass(frozen=True)
class Failure:
    """A seed that breaks a promise.

    Attributes:
        what: the promise.
        plan: the smallest run that was found to break one.
        events: what happened in that run.
    """

    seed: int
    what: str
    plan: str = ""
    events: tuple[str, ...] = ()


@contextlib.contextmanager
def worlds() -> Iterator[None]:
    """Simulate the product's worlds in the block: its seams and its environment.

    What is frozen before, as the tests freeze all that they have loaded, stays so.
    """
    was_frozen = gc.get_freeze_count() > 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    log = logging.getLogger("torchestra")
    silence, propagates = logging.NullHandler(), log.propagate
    log.addHandler(silence)  # what threads log that a run has ended
    log.propagate = False
    gc.collect()
    gc.freeze()  # or each run would look at torch's objects again
    gc.disable()  # finalisers would run at other moments in each run of a seed
    try:
        with mock.patch.dict(os.environ, _ENVIRONMENT), product.simulated():
            yield
    finally:
        gc.enable()
        if not was_frozen:
            gc.unfreeze()
        log.removeHandler(silence)
        log.propagate = propagates
        torch.set_num_threads(threads)


def _fails(make: Callable[[Plan], World], plan: Plan) -> tuple[str, World] | None:
    world = make(plan)
    try:
        world.go()
        return None
    except SimulationError as error:
        return str(error), world
    finally:
        gc.collect()


def _check_worlds(
    draw: Callable[[int], Plan], make: Callable[[Plan], World], seeds: Sequence[int]
) -> Failure | None:
    """Run worlds; if one breaks a promise, find fewer faults with which it does, too."""
    with worlds():
        for seed in seeds:
            plan = draw(seed)
            found = _fails(make, plan)
            if found is None:
                continue
            is_smaller = True
            while is_smaller:
                is_smaller = False
                for faults in fewer(plan.faults):
                    if (again := _fails(make, plan.with_faults(faults))) is not None:
                        found, plan, is_smaller = again, plan.with_faults(faults), True
                        break
            what, world = found
            return Failure(seed, what, str(plan), tuple(world.run.events))
    return None


def _failure(found: tuple[int, Exception] | None) -> Failure | None:
    if found is None:
        return None
    seed, error = found
    notes = "\n".join(getattr(error, "__notes__", ()))
    return Failure(seed, f"{type(error).__name__}: {error}", events=tuple(notes.splitlines()))


def check(subject: str, seeds: Sequence[int]) -> Failure | None:
    """Run some seeds of a subject; return what the first that breaks something does.

    What is the same for all is set up once: that takes as long as a quarter of a world.
    """
    return SUBJECTS[subject](seeds)


def stay_on_a_core(given: SimpleQueue[int]) -> None:
    """Stay on one core, which is taken from a queue: threads hand over sooner there than between two.

    What the process was begun with is not collected as garbage any more, for that would copy its memory.
    """
    os.sched_setaffinity(0, {given.get()})
    gc.freeze()


SUBJECTS: dict[str, Callable[[Sequence[int]], Failure | None]] = {
    "replicas": lambda seeds: _failure(replicas.first_failure(seeds)),
    "disks": lambda seeds: _failure(files.first_failure(seeds)),
    "groups": partial(_check_worlds, groups.plan, groups.GroupsWorld),
    "growing": partial(_check_worlds, growing.plan, growing.GrowingWorld),
    "messages": partial(_check_worlds, messages.plan, messages.MessagesWorld),
    "launching": partial(_check_worlds, launching.plan, launching.LaunchingWorld),
    "rpc": partial(_check_worlds, rpc.plan, rpc.RpcWorld),
    "joining": partial(_check_worlds, joining_rpc.plan, joining_rpc.JoiningWorld),
    "autograd": partial(_check_worlds, rpc.plan, autograd.AutogradWorld),
    "odd": partial(_check_worlds, odd.plan, odd.world),
}
"""What runs seeds, by the name of what is simulated."""
