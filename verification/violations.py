"""The violations that a search can find."""

from __future__ import annotations


class Violation(Exception):
    """A property that does not hold in some order of events."""


class DataRace(Violation):
    """Two accesses to a word, one of them a write, that nothing orders."""

    def __init__(self, address: int, rank: int, verb: str, other: int, did: str) -> None:
        super().__init__(address, rank, verb, other, did)
        self.address = address
        whom = "another rank" if other < 0 else f"rank {other}"
        self._text = f"data race: rank {rank} {verb} a word that {whom} {did}"

    def __str__(self) -> str:
        return self._text


class WrongResult(Violation):
    """A rank has got a wrong result of an operation."""


class Deadlock(Violation):
    """No rank can go on, and not all have ended: a wake-up is lost, or ranks wait for each other."""


class NeverEnds(Violation):
    """The ranks may run for ever."""
