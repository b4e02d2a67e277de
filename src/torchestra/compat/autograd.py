"""As ``torch.distributed.autograd``."""

from __future__ import annotations

from torchestra.autograd import DistAutogradContext, backward, context, get_gradients, is_available
from torchestra.autograd import debug_info as _get_debug_info
from torchestra.autograd.api import current_context as _current_context
from torchestra.autograd.api import new_context as _new_context
from torchestra.autograd.api import release_context as _release_context
from torchestra.autograd.contexts import contexts_of
from torchestra.rpc.current import agent_or_none, current_agent

__all__ = [
    "DistAutogradContext",
    "_current_context",
    "_get_debug_info",
    "_get_max_id",
    "_init",
    "_is_valid_context",
    "_new_context",
    "_release_context",
    "_retrieve_context",
    "backward",
    "context",
    "get_gradients",
    "is_available",
]


def _init(worker_id: int) -> None:
    """Do nothing: a worker needs no further setup."""


def _get_max_id() -> int:
    """Return the greatest id that a context made here could have."""
    return contexts_of(current_agent()).max_number


def _is_valid_context(context_id: int) -> bool:
    """Return whether this worker has a context with this id."""
    agent = agent_or_none()
    return agent is not None and contexts_of(agent).find(context_id) is not None


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """Return the context with an id.

    Raises:
        RpcError: this worker has no such context.
    """
    return contexts_of(current_agent()).get(context_id)
