"""Scopes of messages beyond their call: the interface for distributed autograd.

RPC knows nothing of autograd. It asks the :class:`CallScope` of the calling thread what to do about the
tensors in a message, sends its *mark* with the message, and hands the mark to the :class:`MessageScope` of
the worker called. :func:`~torchestra.rpc.agent.install_scope` says how a worker gets one.

A mark is pickled as an object of the module that made it. So unpickling the first one imports that module,
and importing it installs the scope: a worker needs no import of its own to be called within a scope.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchestra.errors import RpcError
from torchestra.rpc.call_scope import CallScope
from torchestra.rpc.worker_info import WorkerInfo


class MessageScope:
    """Handles messages with a mark on one worker. This class, the default, does nothing."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info

    def enter(self, mark: Any, source: int, *, is_call: bool) -> CallScope | None:
        """Return the scope of a message that has come; in the order of messages, so it must not wait."""
        return None

    def read(self, scope: Any, mark: Any, tensors: list[torch.Tensor], source: int) -> None:
        """Take the recorded tensors of a message that has been unpickled."""

    def checked(self, note: Any) -> Any:
        """Return what another worker's scope has sent. ValueError: it is no note."""
        return note

    def receive(self, source: int, note: Any) -> None:
        """Take what the scope of another worker has sent by :meth:`Agent.send_scope_message`."""

    def backward(self, scope_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Run a backward pass from these tensors, for :meth:`RRef.backward`."""
        raise self.not_found(scope_id)

    def not_found(self, scope_id: int) -> RpcError:
        """Return the error where there is no such autograd context."""
        info = self._info
        return RpcError(
            f"Could not find autograd context with id: {scope_id} on worker {info.name!r} (rank {info.id}):"
            " it was released, or no call within it has come here"
        )

    def remove_lost(self, rank: int) -> None:
        """Clean up after a worker that is gone."""

    def close(self) -> None:
        """Forget everything."""
