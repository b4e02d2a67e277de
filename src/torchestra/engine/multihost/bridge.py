"""What moves bytes between hosts: one end of a rail, which joins one rank of every host.

A bridge brings four operations, which begin at once and end when they are waited for. All ends call the same
ones in the same order with lengths that fit; that is made sure of before (agreement.py). Tensors are
contiguous, on the CPU, of bytes (uint8), and stay as they are until the operation has ended. What is reduced
is reduced by this package's own kernels, so that every dtype and operation is there, and every host gets the
same bits, whatever the bridge is.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        kind: what it is made of: ``"gloo"`` or ``"threads"``.
        host: which end this is: the index of its host.
        size: how many ends there are.
    """

    kind: str
    host: int
    size: int

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, seconds: float) -> Pending:
        """Put every end's tensor, one after the other, into the output; all are equally long."""

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
        """Send each end the next ``sent[h]`` bytes of the tensor, and get ``expected[h]`` from it."""

    def close(self) -> None:
        """Give back what it holds; what is under way is given up. Never waits for another end."""
