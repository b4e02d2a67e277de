"""Bridges, which move tensors between hosts for collectives: each is one end of a rail.

A bridge begins to receive from and to send to other ends; the operations here consist of that. They begin at
once and end when the caller waits for them. All ends of a rail call the same ones in the same order with
lengths that fit; the hierarchy makes sure of that before (hierarchy.py). Tensors are contiguous, on the CPU,
of bytes (uint8), and stay as they are until the operation has ended. This package's own kernels do all
reductions, so every dtype and operation is supported, and every host gets the same bits, whatever the bridge
is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch

from torchestra.errors import DistBackendError

PeerTensors = Sequence[tuple[int, torch.Tensor]]
"""Ends, and what comes from or goes to each of them."""


class BridgeError(DistBackendError):
    """The bridge has failed: the way to another host, or a rank there, is gone."""


class Pending(Protocol):
    """An operation of a bridge that has begun."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, at most ``timeout_s`` seconds; return whether it has ended.

        Raises:
            BridgeError: it has failed.
        """

    def awaited(self) -> Sequence[int]:
        """Return the other ends that have not sent or taken all of theirs yet; none if that is not known."""


class Bridge(ABC):
    """One end of a rail. The ends meet while the first operations wait.

    Args:
        host, size: which end this is, as the index of its host, and how many there are.

    Attributes:
        kind: what it is made of: ``"curve"``, ``"gloo"``, ``"mpi"`` or ``"threads"``.
        others: the other ends, in the order in which this one sends to them.
    """

    kind: ClassVar[str]

    def __init__(self, host: int, size: int) -> None:
        self.host, self.size = host, size
        # From the next one on: if all ends began with end 0, all would send to it, then all to end 1, and so
        # on, and one link after the other would be the only busy one.
        self.others = [(host + step) % size for step in range(1, size)]

    @abstractmethod
    def begin(self, receives: PeerTensors, sends: PeerTensors, timeout_s: float) -> Pending:
        """Begin to receive from and to send to other ends, in order between each two; no tensor is empty.

        A message may be shorter than its buffer, whose rest is left as it is.

        Args:
            receives, sends: which ends, and the tensors to fill or send.
            timeout_s: after how long a waiting caller gives it up.

        Raises:
            BridgeError: the bridge has failed, or is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what it holds, and give up what is under way. Never waits for another end."""

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout_s: float) -> Pending:
        """Put every end's tensor, one after the other, into the output; all are equally long."""
        return self.tell(output, tensor, timeout_s)

    def tell(self, output: torch.Tensor, tensor: torch.Tensor, timeout_s: float) -> Pending:
        """:meth:`all_gather` of tensors whose lengths may differ, into rows that have room for the longest.

        What a row has beyond the tensor that comes is left as it is.
        """
        rows = output.view(self.size, -1) if output.numel() else [output] * self.size
        rows[self.host][: tensor.numel()].copy_(tensor)
        return self._exchange(rows, [tensor] * self.size, timeout_s)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> Pending:
        """Replace every end's tensor by that of the end ``root``."""
        if root == self.host:
            return self._begin([], [(end, tensor) for end in self.others], timeout_s)
        return self._begin([(root, tensor)], [], timeout_s)

    def exchange(
        self,
        output: torch.Tensor,
        expected: Sequence[int],
        tensor: torch.Tensor,
        sent: Sequence[int],
        timeout_s: float,
    ) -> Pending:
        """Send each end the next ``sent[h]`` bytes of the tensor, and get at most ``expected[h]`` from it.

        An end sends nothing where the length is 0, and there the other end must expect 0.
        """
        buffers, pieces = output.split(list(expected)), tensor.split(list(sent))
        buffers[self.host][: sent[self.host]].copy_(pieces[self.host])
        return self._exchange(buffers, pieces, timeout_s)

    def exchange_among(
        self,
        ends: Sequence[int],
        buffers: Sequence[torch.Tensor],
        pieces: Sequence[torch.Tensor],
        timeout_s: float,
    ) -> Pending:
        """Send each of some ends a piece, and get one from it; each of them calls this with the same ends.

        Args:
            ends: which, this one included.
            buffers, pieces: in the order of ``ends``; this end's piece is copied to its buffer.
        """
        own = ends.index(self.host)
        buffers[own][: pieces[own].numel()].copy_(pieces[own])
        peers = [(own + step) % len(ends) for step in range(1, len(ends))]
        receives = [(ends[peer], buffers[peer]) for peer in peers]
        return self._begin(receives, [(ends[peer], pieces[peer]) for peer in peers], timeout_s)

    def _exchange(
        self, buffers: Sequence[torch.Tensor] | torch.Tensor, pieces: Sequence[torch.Tensor], timeout_s: float
    ) -> Pending:
        receives = [(end, buffers[end]) for end in self.others]
        return self._begin(receives, [(end, pieces[end]) for end in self.others], timeout_s)

    def _begin(self, receives: PeerTensors, sends: PeerTensors, timeout_s: float) -> Pending:
        """Do as :meth:`begin`, but skip empty tensors."""
        return self.begin(
            [each for each in receives if each[1].numel()],
            [each for each in sends if each[1].numel()],
            timeout_s,
        )
