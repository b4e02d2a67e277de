"""The protocol between a measured rank and the session that drives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .shapes import Floats
from .timing import Call

__all__ = ["Member", "Prepared"]


@dataclass
class Prepared:
    """An operation on buffers that exist.

    Attributes:
        calls: what one turn of the operation calls.
        transfers: how many operations one turn is (2 for a message there and one back).
        given: the elements that this rank puts in, or None.
        result: where this rank's result will be (the same as ``given`` in place), or None.
    """

    calls: tuple[Call, ...]
    transfers: int = 1
    given: Floats | None = None
    result: Floats | None = None


class Member(Protocol):
    """One rank of a peer: makes operations ready, and knows who it is."""

    rank: int
    world: int
    description: str

    def prepare(self, operation: str, size: int, memory: str, slot: str) -> Prepared:
        """Make an operation ready; ``slot`` names the buffers, which the next operation may reuse."""

    def barrier(self) -> None:
        """Wait for all ranks of this peer."""

    def close(self) -> None:
        """Leave the group, together with the other ranks."""
