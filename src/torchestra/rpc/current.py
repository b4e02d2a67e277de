"""The registry of workers: finds the worker of the calling thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torchestra.engine.thread_ranks import ThreadRank, current_thread_rank
from torchestra.errors import RpcError

if TYPE_CHECKING:
    from torchestra.rpc.agent import Agent

_F = TypeVar("_F", bound=Callable[..., Any])
TAKES_AGENT = "_torchestra_takes_agent"

_agents: weakref.WeakKeyDictionary[ThreadRank, Agent] = weakref.WeakKeyDictionary()
_agent_of_process: Agent | None = None


def agent_or_none() -> Agent | None:
    """Return the worker of the calling thread, if it has one."""
    rank = current_thread_rank()
    return _agent_of_process if rank is None else _agents.get(rank)


def current_agent() -> Agent:
    """Return the worker of the calling thread.

    Raises:
        RpcError: there is none.
    """
    rank = current_thread_rank()
    agent = _agent_of_process if rank is None else _agents.get(rank)
    if agent is None:
        raise RpcError("RPC has not been initialized. Call torchestra.rpc.init_rpc first.")
    return agent


def set_agent(agent: Agent | None) -> None:
    """Make ``agent`` the worker of the calling thread's rank; None for no worker."""
    global _agent_of_process
    rank = current_thread_rank()
    if rank is None:
        _agent_of_process = agent
    elif agent is None:
        _agents.pop(rank, None)
    else:
        _agents[rank] = agent


def takes_agent(function: _F) -> _F:
    """Mark a function of the package: the agent that executes a call of it passes itself first.

    So functions that workers call on each other need no global to find the worker.
    """
    setattr(function, TAKES_AGENT, True)
    return function
