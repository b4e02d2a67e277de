"""The report of a run: how many rounds there were of each fault and workload, and how they ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Column, Table
from tools.chaos.invariants import Verdict
from tools.chaos.rounds import Round

_OUTCOMES = ("right", "told", "no memory", "killed")
_NAME_WIDTH = 20  # where no terminal says how wide lines may be, they have 80 columns


@dataclass
class Line:
    """Sum up the rounds of one fault, or of one workload; ``met``: how often the fault came in time."""

    rounds: int = 0
    met: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    longest_error_s: float = 0.0
    longest_round_s: float = 0.0


class Report:
    """Collect rounds, and show them.

    Attributes:
        rounds: how many there were.
        limits: by what the limits of each were multiplied, for the machine's load.
    """

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, Line]] = {"fault": defaultdict(Line), "workload": defaultdict(Line)}
        self._worlds: dict[str, Line] = defaultdict(Line)
        self._lines["world"] = self._worlds
        self.rounds = 0
        self.limits: list[float] = []

    def add(self, round_: Round, verdict: Verdict, took_s: float, limit: float) -> None:
        """Add a round."""
        world = round_.world
        kind = f"{world.ranks}{f', {world.bridge}' if world.bridge else ''}"
        kind += ", namespaces" if world.namespaces else ""
        fault = f"{round_.fault}{f', {round_.variant}' if round_.variant else ''}"
        self.rounds += 1
        self.limits.append(limit)
        for by, name in (("fault", fault), ("workload", round_.workload), ("world", kind)):
            line = self._lines[by][name]
            line.rounds += 1
            line.met += verdict.met
            line.outcomes.update(verdict.outcomes)
            line.longest_error_s = max(line.longest_error_s, verdict.longest_s)
            line.longest_round_s = max(line.longest_round_s, took_s)

    def show(self, console: Console) -> None:
        """Print the tables."""
        for by, lines in self._lines.items():
            name_column = Column(by, overflow="fold", min_width=_NAME_WIDTH)
            table = Table(name_column, "rounds, fault met", *_OUTCOMES, "last error, s", "longest, s")
            for name, line in sorted(lines.items()):
                counts = (str(line.outcomes[each]) for each in _OUTCOMES)
                times = (f"{line.longest_error_s:.1f}", f"{line.longest_round_s:.1f}")
                table.add_row(name, f"{line.rounds}, {line.met}", *counts, *times)
            console.print(table)
        if self.limits:
            least, most = min(self.limits), max(self.limits)
            console.print(f"limits were multiplied by {least:.1f} to {most:.1f}, for the load of the machine")
