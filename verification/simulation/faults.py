"""What goes wrong in a run: crashes, stalls, cuts of the network and the like, drawn from a seed.

As in swarm testing (Groce et al. 2012), a seed first draws which kinds of faults there are at all, so rare
conjunctions are common in some runs. The list of faults is drawn before the run begins, so that a failing run
can be tried again with fewer of them (:func:`fewer`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

KINDS = ("crash", "stop", "power", "cut", "deaf", "reset", "slow", "clock")
ODD = ("sleep", "flap")
_SHORT, _LONG = (0.05, 0.25), (1.5, 2.5)


class Fault(NamedTuple):
    """Something that goes wrong.

    Attributes:
        at: when, in seconds.
        kind: one of :data:`KINDS`: a process crashes, is stopped; a machine loses its power; two machines are
            cut off from each other, in both directions or in one; connections are reset; the network is slow;
            the wall clock is set. Or one of :data:`ODD`: a machine sleeps, as a paused virtual machine does,
            whose clock has jumped when it goes on; a link goes down and up again several times.
        rank: the process concerned.
        host, other: the machines concerned; ``other`` -1 means all others.
        lasts: for how long.
    """

    at: float
    kind: str
    rank: int
    host: int
    other: int
    lasts: float

    @property
    def ends(self) -> float:
        """Return when all is as before, including what TCP sends again later."""
        return self.at + self.lasts * (2 if self.kind in ("cut", "deaf", *ODD) else 1)


def drawn(
    choices: random.Random, ranks: Sequence[int], machines: int, bound_s: float, until_s: float
) -> list[Fault]:
    """Draw the faults of a run.

    Args:
        ranks: by rank, the machine it is on.
        machines: how many machines there are; those without ranks serve the store.
        bound_s: the heartbeat bound: faults last a small part of it, or several.
        until_s: when the last one begins.
    """
    kinds = [kind for kind in KINDS if choices.random() < 0.35]
    is_long = choices.random() < 0.7
    faults = []
    for _ in range(choices.choice((0, 1, 1, 2, 2, 3, 4)) if kinds else 0):
        rank = choices.randrange(len(ranks))
        host = choices.randrange(machines)
        other = choices.choice([-1, *(each for each in range(machines) if each != host)])
        least, most = _LONG if is_long and choices.random() < 0.6 else _SHORT
        lasts = bound_s * choices.uniform(least, most)
        kind = choices.choice(kinds)
        if kind == "power" and host >= len(set(ranks)):
            kind = "reset"  # the store's machine stays
        faults.append(Fault(choices.uniform(0.0, until_s), kind, rank, host, other, lasts))
    return sorted(faults)


def odd(choices: random.Random, machines: int, bound_s: float, until_s: float) -> list[Fault]:
    """Draw up to two faults of the kinds in :data:`ODD`; the arguments are those of :func:`drawn`."""
    faults = []
    for _ in range(choices.choice((0, 1, 1, 2))):
        kind, host = choices.choice(ODD), choices.randrange(machines)
        others = [-1, *(each for each in range(machines) if each != host)]
        other = -1 if kind == "sleep" else choices.choice(others)
        least, most = choices.choice((_SHORT, _LONG))
        lasts = bound_s * choices.uniform(least, most)
        faults.append(Fault(choices.uniform(0.0, until_s), kind, 0, host, other, lasts))
    return faults


def fewer(faults: Sequence[Fault]) -> list[list[Fault]]:
    """Return shorter lists of faults to try: without half of them, then without each."""
    half = len(faults) // 2
    halves = [list(faults[half:]), list(faults[:half])] if half else []
    return halves + [[*faults[:index], *faults[index + 1 :]] for index in range(len(faults))]
