"""The scope of a thread's calls, as RPC asks it about the tensors in a message; see message_scope.py."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class TensorRecorder(Protocol):
    """Records the tensors in a message that is being pickled."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor that requires gradients is to be given to :meth:`MessageScope.read`."""

    def close(self) -> Any:
        """Return the mark of the message, or None, when all is pickled."""

    def sent(self) -> None:
        """Note that the message has been sent."""


class CallScope(Protocol):
    """The scope of the calls of a thread, and of the answers to a call."""

    def outgoing(self, to: int, content: object, *, is_call: bool) -> TensorRecorder | None:
        """Return a recorder for a message to a worker; None if the scope is over."""
