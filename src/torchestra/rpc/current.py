"""The registry of workers: finds the worker of the calling thread."""

from __future__ import annotations

from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.errors import RpcError
from torchestra.rpc.agent import Agent

_agent_of_process: Agent | None = None


def agent_or_none() -> Agent | None:
    """Return the worker of the calling thread, if it has one."""
    rank = current_thread_rank()
    agent: Agent | None = _agent_of_process if rank is None else rank.worker
    return agent


def current_agent() -> Agent:
    """Return the worker of the calling thread.

    Raises:
        RpcError: there is none.
    """
    rank = current_thread_rank()
    agent: Agent | None = _agent_of_process if rank is None else rank.worker
    if agent is None:
        raise RpcError("RPC has not been initialized. Call torchestra.rpc.init_rpc first.")
    return agent


def set_agent(agent: Agent | None) -> None:
    """Make ``agent`` the worker of the calling thread's rank; None for no worker."""
    global _agent_of_process
    rank = current_thread_rank()
    if rank is None:
        _agent_of_process = agent
    else:
        rank.worker = agent  # and not in a table: the worker's threads refer to the rank
