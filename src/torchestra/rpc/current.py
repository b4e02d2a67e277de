"""Which worker the calling thread belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torchestra.engine.thread_ranks import ThreadRank, current_thread_rank
from torchestra.errors import RpcError

if TYPE_CHECKING:
    from torchestra.rpc.agent import Agent

_F = TypeVar("_F", bound=Callable[..., Any])
_TAKES_AGENT = "_torchestra_takes_agent"

_of_process: Agent | None = None
_of_threads: weakref.WeakKeyDictionary[ThreadRank, Agent] = weakref.WeakKeyDictionary()


def agent_or_none() -> Agent | None:
    """The worker of the calling thread, if it has one."""
    here = current_thread_rank()
    return _of_process if here is None else _of_threads.get(here)


def current_agent() -> Agent:
    """The worker of the calling thread.

    Raises:
        RpcError: there is none.
    """
    agent = agent_or_none()
    if agent is None:
        raise RpcError("RPC has not been initialized. Call torchestra.rpc.init_rpc first.")
    return agent


def set_agent(agent: Agent | None) -> None:
    """Make it the worker of the calling thread's rank."""
    global _of_process
    here = current_thread_rank()
    if here is None:
        _of_process = agent
    elif agent is None:
        _of_threads.pop(here, None)
    else:
        _of_threads[here] = agent


def takes_agent(fn: _F) -> _F:
    """Mark a function of the package: the agent that performs a call of it passes itself first.

    So what workers tell each other needs no global to find the worker that has been told.
    """
    setattr(fn, _TAKES_AGENT, True)
    return fn


def is_given_agent(fn: object) -> bool:
    """Return whether a function is marked by :func:`takes_agent`."""
    return getattr(fn, _TAKES_AGENT, None) is True
