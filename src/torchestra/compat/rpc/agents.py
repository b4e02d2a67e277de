"""A worker with the methods of torch's agents."""

from __future__ import annotations

from torchestra.rpc.agent import Agent
from torchestra.rpc.api import debug_info
from torchestra.rpc.starting import stop
from torchestra.rpc.termination import TerminationDetector
from torchestra.rpc.worker_info import WorkerInfo

__all__ = ["RpcAgent", "TensorPipeAgent"]


class RpcAgent:
    """The base class of registered backends' agents."""


class TensorPipeAgent(RpcAgent):
    """The worker of the calling thread's rank."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    @property
    def is_static_group(self) -> bool:
        """Return whether no workers join and leave."""
        return self._agent.router.members is None

    def get_worker_info(self, name: str | int | None = None) -> WorkerInfo:
        """Return the worker with a name or rank; this one by default."""
        return self._agent.info if name is None else self._agent.find(name)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return all workers."""
        return self._agent.current_workers()

    def get_debug_info(self) -> dict[str, str]:
        """Return the counts of calls and threads."""
        return {name: count for name, count in debug_info().items() if name.startswith("agent.")}

    get_metrics = get_debug_info

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until all workers have come here, and no call is pending anywhere."""
        TerminationDetector(self._agent, timeout).await_quiet()

    sync = join

    def shutdown(self) -> None:
        """Stop answering."""
        stop(self._agent)
