"""What moves bytes between hosts: one end of a rail, which joins one rank of every host, or of a line.

A bridge brings a few operations, which begin at once and end when they are waited for. All ends of a rail
call the same ones in the same order with lengths that fit; that is made sure of before (hierarchy.py).
Tensors are contiguous, on the CPU, of bytes (uint8), and stay as they are until the operation has ended. What
is reduced is reduced by this package's own kernels, so that every dtype and operation is there, and every
host gets the same bits, whatever the bridge is.

A line (line.py) joins two ranks, and uses what stands alone: what one end sends, the other receives, in the
order of both; beside that each end writes the other letters, which come though nobody has asked for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from torchestra.errors import DistBackendError

__all__ = ["Bridge", "BridgeError", "Pending"]


class BridgeError(DistBackendError):
    """The bridge has failed: the way to another host, or a rank there, is gone."""


class Pending(Protocol):
    """An operation of a bridge that has begun."""

    def wait(self, seconds: float) -> bool:
        """Wait for its end, at most so long; whether it has ended.

        Raises:
            BridgeError: it has failed.
        """


class Bridge(Protocol):
    """One end of a rail.

    Attributes:
        kind: what it is made of: ``"curve"``, ``"gloo"``, ``"mpi"`` or ``"threads"``.
        host: which end this is: the index of its host.
        size: how many ends there are.
    """

    kind: str
    host: int
    size: int

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, seconds: float) -> Pending:
        """Put every end's tensor, one after the other, into the output; all are equally long."""

    def tell(self, output: torch.Tensor, tensor: torch.Tensor, seconds: float) -> Pending:
        """:meth:`all_gather` of tensors whose lengths may differ, into rows that have room for the longest.

        What a row has beyond the tensor that comes is left as it is.
        """

    def broadcast(self, tensor: torch.Tensor, root: int, seconds: float) -> Pending:
        """Replace every end's tensor by that of the end ``root``."""

    def exchange(
        self,
        output: torch.Tensor,
        expected: Sequence[int],
        tensor: torch.Tensor,
        sent: Sequence[int],
        seconds: float,
    ) -> Pending:
        """Send each end the next ``sent[h]`` bytes of the tensor, and get at most ``expected[h]`` from it.

        Nothing is sent where nothing is to be, and that must be where nothing is expected.
        """

    def has_met(self, seconds: float) -> bool:
        """Wait until the ends have met, at most so long; whether they have.

        Raises:
            BridgeError: they have not, and will not any more.
        """

    def send(self, tensor: torch.Tensor, end: int, seconds: float) -> Pending:
        """Send a tensor to another end, which receives it."""

    def receive(self, tensor: torch.Tensor, end: int, seconds: float) -> Pending:
        """Receive the next tensor that another end sends, which must be as long."""

    def write(self, letter: torch.Tensor, end: int) -> object:
        """Send a letter to another end, once the ends have met. Never waits for that end.

        Returns:
            What must be kept until that end is known to have the letter.

        Raises:
            BridgeError: there is no way to it any more.
        """

    def letters(self, end: int, length: int, awaited: Callable[[], bool]) -> Iterator[torch.Tensor]:
        """The letters that another end writes, once the ends have met; waits for each. For one thread.

        Args:
            length: in bytes, of the longest there can be. What a shorter one does not fill is undefined.
            awaited: tells whether somebody waits for what may be in a letter; without that it may come late.

        Yields:
            Each letter, in memory that is used again after the next has been asked for.

        Raises:
            BridgeError: there is no way from that end any more, or this one was closed.
        """

    def hurry(self) -> None:
        """Somebody begins to wait for what may be in a letter."""

    def close(self) -> None:
        """Give back what it holds; what is under way is given up. Never waits for another end."""
