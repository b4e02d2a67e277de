"""Draw rounds: world, workload, fault and times, all from one seed."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import tools.chaos.network as network
from tools.chaos import faults
from tools.chaos.rounds import Round, World
from tools.chaos.workloads import WORKLOADS

NAMESPACES, MPI, SEVERAL = "hosts that are network namespaces", "the MPI bridge", "worlds of several hosts"
MPIEXEC = Path(sys.executable).with_name("mpiexec")


def missing() -> dict[str, str]:
    """Return which worlds cannot be made here, and why."""
    absent = {}
    if why := network.why_not():
        absent[NAMESPACES] = why
    elif why := network.why_no_netem():
        absent[faults.LOSSY] = why
    if not MPIEXEC.exists() or importlib.util.find_spec("mpi4py") is None:
        absent[MPI] = f"there is no {MPIEXEC}, or no mpi4py"
    return absent


def draw(
    number: int,
    seed: int,
    chosen: Sequence[str],
    absent: Sequence[str],
    load: float,
    workloads: Sequence[str] = (*WORKLOADS,),
) -> Round:
    """Draw a round; the same one for the same arguments.

    Args:
        chosen: the names of the faults.
        absent: the worlds that cannot be made.
        load: by which all limits are multiplied, because the machine is busy.
        workloads: of which one is drawn.
    """
    dice = random.Random(f"{seed}:{number}")
    fault = faults.FAULTS[chosen[number % len(chosen)]]
    world = dice.choice([each for each in _worlds(dice, absent) if fault.fits(each)])
    timeout, heartbeat = 3.0 * load, 2.0 * load
    variant = dice.choice([each for each in fault.variants(world) if each not in absent])
    long = variant in faults.LONG
    short = dice.uniform(0.1, heartbeat / 3)  # so short that nobody may notice
    length = timeout + heartbeat + dice.uniform(1.0, 3.0) if long else short
    return Round(
        number=number,
        seed=f"{seed}:{number}",
        world=world,
        workload=dice.choice(workloads),
        fault=fault.name,
        variant=variant,
        victim=dice.randrange(world.size),
        after_s=dice.uniform(0.0, 0.8),
        length_s=length,
        work_s=1.5 + (length if fault.ends else 0.0),
        timeout_s=timeout,
        heartbeat_s=heartbeat,
    )


def undisturbed(world: World, load: float) -> Round:
    """Return the round whose training others are compared with."""
    return Round(-1, "", world, "training", "none", "", 0, 0.0, 0.0, 1.5, 30.0 * load, 20.0 * load)


def _worlds(dice: random.Random, absent: Sequence[str]) -> list[World]:
    """Return one world of every kind that there can be."""
    namespaces = NAMESPACES not in absent
    layout = dice.choice([(2, 2), (1, 2), (1, 1)])
    size = dice.randint(2, 5)
    one_host = [
        World("threads", (size,)),
        World("processes", (size,)),
        World("threads", (16,)),
        World("processes", (16,)),
    ]
    if SEVERAL in absent:
        return one_host
    worlds = [
        *one_host,
        World("threads", layout, "threads"),
        *(World("processes", layout, bridge, namespaces) for bridge in ("curve", "gloo")),
    ]
    if MPI not in absent:
        worlds.append(World("processes", layout, "mpi"))
    return worlds
