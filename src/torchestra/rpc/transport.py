"""What the crew and the agent need of a post office, whichever roads lead out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchestra.engine.p2p import Message

Parts = Sequence[tuple[int, int]]
"""A message: the address and length of each part, the text first."""


class Office(Protocol):
    """See :class:`~torchestra.engine.p2p.Endpoint`, which is one."""

    def send(self, peer: int, kind: int, tag: int, parts: Parts, keep: object = None) -> None:
        """Send a message to another worker. Every thread may call."""

    def send_leftovers(self) -> None:
        """Send what a thread has left that was interrupted while it sent."""

    def receive(self, *, eager: bool) -> Message | None:
        """The next message, with the lead; None if none came for a while, or attention was called."""

    def watch(self) -> bool:
        """Sleep until a message has come that nobody takes, or for a while: whether one has."""

    def wake_leader(self) -> None:
        """Have :meth:`receive` return."""

    def close(self) -> None:
        """Wake everybody; from now on nothing sleeps here."""
