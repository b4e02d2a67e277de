"""How the workers come to an end together.

All calls are over when no worker has one pending, at one moment. Each waits until it has none, and tells how
many it has made so far; when everybody has told, it begins again. If two rounds in succession tell the same
numbers, no call was made between a worker's word in the first and its word in the second, and none was
pending at either; so at the moment when all had told the first, none was under way anywhere.

(The counting argument is Mattern's: Algorithms for distributed termination detection, 1987.)
"""

from __future__ import annotations

import time
from typing import Any

from torchestra.errors import RpcTimeoutError, WorkerFailedError
from torchestra.rpc.agent import Agent

_NAP_SECONDS = 0.001


class Closing:
    """One worker's part in a graceful shutdown.

    Args:
        seconds: how long it may take; 0 is without end.

    Raises:
        RpcTimeoutError: it took longer; names the workers that have not come.
        WorkerFailedError: a worker is gone.
    """

    def __init__(self, agent: Agent, seconds: float) -> None:
        self._agent = agent
        self._began = time.monotonic()
        self._seconds = seconds
        self._round = -1

    def await_quiet(self) -> None:
        """Wait until no worker has a call pending. Must be called by every worker."""
        before: list[Any] | None = None
        while True:
            self._await_own()
            told = self._gather(self._agent.calls_made)
            if told == before:
                return
            before = told

    def _await_own(self) -> None:
        agent = self._agent
        while not agent.is_quiet:
            time.sleep(_NAP_SECONDS)
            self._check(())

    def _gather(self, value: object) -> list[Any]:
        """What all workers have told in this round."""
        agent = self._agent
        number = self._round = next(agent.rounds)
        for rank in range(len(agent.workers)):
            agent.tell(rank, number, value)
        while len(agent.gathered.get(number, ())) < len(agent.workers):
            time.sleep(_NAP_SECONDS)
            told = agent.gathered.get(number, {})
            self._check(tuple(rank for rank in range(len(agent.workers)) if rank not in told))
        told = agent.gathered.pop(number)
        return [told[rank] for rank in sorted(told)]

    def _check(self, missing: tuple[int, ...]) -> None:
        agent = self._agent
        for rank in missing:
            if agent.is_gone(rank) and rank not in agent.gathered.get(self._round, ()):
                raise WorkerFailedError(
                    f"worker {agent.workers[rank].name!r} (rank {rank}) {agent.how_gone(rank)} before worker"
                    f" {agent.info.name!r} could shut down together with it",
                    agent.workers[rank].name,
                )
        waited = time.monotonic() - self._began
        if self._seconds and waited > self._seconds:
            names = ", ".join(repr(agent.workers[rank].name) for rank in missing)
            what = (
                f"{names} had not called shutdown()" if missing else f"{len(agent.pending)} calls are pending"
            )
            raise RpcTimeoutError(
                f"the shutdown of worker {agent.info.name!r} timed out after {waited:.1f} s: {what}"
            )
