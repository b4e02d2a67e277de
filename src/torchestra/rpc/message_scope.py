"""Scopes of messages beyond their call: the interface for distributed autograd.

RPC knows nothing of autograd. It asks the :class:`CallScope` of the calling thread what to do about the
tensors in a message, sends its *mark* with the message, and hands the mark to the :class:`MessageScope` of
the worker called. :func:`install` says how a worker gets one.

A mark is pickled as an object of the module that made it. So unpickling the first one imports that module,
and importing it installs the scope: a worker needs no import of its own to be called within a scope.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchestra.errors import RpcError
from torchestra.rpc.call_scope import CallScope

if TYPE_CHECKING:
    from torchestra.rpc.agent import Agent


class MessageScope:
    """Handles messages with a mark on one worker. This class, the default, does nothing."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def enter(self, mark: Any, source: int, *, is_call: bool) -> CallScope | None:
        """Return the scope of a message that has come; in the order of messages, so it must not wait."""
        return None

    def read(self, scope: Any, mark: Any, tensors: list[torch.Tensor], source: int) -> None:
        """Take the recorded tensors of a message that has been unpickled."""

    def receive(self, source: int, note: Any) -> None:
        """Take what the scope of another worker has sent by :meth:`Agent.send_scope_message`."""

    def backward(self, scope_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Run a backward pass from these tensors, for :meth:`RRef.backward`."""
        raise self.not_found(scope_id)

    def not_found(self, scope_id: int) -> RpcError:
        """Return the error where there is no such autograd context."""
        info = self.agent.info
        return RpcError(
            f"Could not find autograd context with id: {scope_id} on worker {info.name!r} (rank {info.id}):"
            " it was released, or no call within it has come here"
        )

    def remove_lost(self, rank: int) -> None:
        """Clean up after a worker that is gone."""

    def close(self) -> None:
        """Forget everything."""


_factory: Callable[[Agent], MessageScope] | None = None


def install(factory: Callable[[Agent], MessageScope]) -> None:
    """Give every worker of this process a scope made by ``factory``, those already running included."""
    global _factory
    _factory = factory


def new_scope(agent: Agent) -> MessageScope | None:
    """Return a scope for a worker, if something is installed."""
    return None if _factory is None else _factory(agent)
