"""How long other people's software takes on Gloo and on torchestra."""

from __future__ import annotations

import os
from collections import defaultdict
from statistics import median
from typing import NamedTuple


class Seconds(NamedTuple):
    """How long a run took."""

    processor: float
    """The processor time of all ranks together, which other programs of the machine change less."""
    clock: float


class Times:
    """Collect how long software takes on Gloo and on torchestra.

    Args:
        rounds: how often to run each of the two.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.runs: dict[str, dict[bool, list[Seconds]]] = defaultdict(lambda: {False: [], True: []})
        self.load: list[float] = []

    def add(self, name: str, served: bool, processor: float, clock: float) -> None:
        """Note a run; ``served``: by torchestra."""
        self.runs[name][served].append(Seconds(processor, clock))
        self.load.append(os.getloadavg()[0])

    def lines(self) -> list[str]:
        """Return the table: medians, and of several runs the least and the largest."""
        made = [f"seconds of training, with a load of {min(self.load):.1f} to {max(self.load):.1f}"]
        made.append(f"{'':40} {'':9} {'gloo':>22} {'torchestra':>22}")
        for name, runs in self.runs.items():
            for which in Seconds._fields:
                columns = [_spread([getattr(run, which) for run in runs[served]]) for served in (False, True)]
                made.append(f"{name:40} {which:9} {columns[0]:>22} {columns[1]:>22}")
        return made


def _spread(values: list[float]) -> str:
    several = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    return f"{median(values):.2f}{several}"
