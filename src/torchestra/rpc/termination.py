"""Termination detection: how the workers come to an end together.

All calls are over when no worker has one pending, at one moment. Each waits until it has none, and tells how
many it has made so far; when every worker has done so, the next round begins. If two rounds in succession
give the same numbers, no call was made between a worker's report in the first and its report in the second,
and none was pending at either; so at the moment when all had sent the first, none was under way anywhere.

(The counting argument is Mattern's: Algorithms for distributed termination detection, 1987.)
"""

from __future__ import annotations

import pickle
import time
from typing import Any

from torchestra.errors import RpcTimeoutError
from torchestra.rpc.agent import Agent
from torchestra.rpc.messages import TERMINATION, address_of
from torchestra.system.deadline import Deadline

_PAUSE_SECONDS = 0.001


class TerminationDetector:
    """One worker's part in a graceful shutdown.

    Args:
        timeout_s: how long it may take; 0 for no limit.

    Raises:
        RpcTimeoutError: it took longer; names the workers that have not come.
        WorkerFailedError: a worker is gone.
    """

    def __init__(self, agent: Agent, timeout_s: float) -> None:
        self._agent = agent
        self._deadline = Deadline(timeout_s or float("inf"))
        self._round = -1

    def await_quiet(self) -> None:
        """Wait until no worker has a call pending. Must be called by every worker."""
        before: list[Any] | None = None
        while True:
            self._await_own()
            counts = self._gather(self._agent.calls_made)
            if counts == before:
                return
            before = counts

    def _await_own(self) -> None:
        agent = self._agent
        while not agent.is_quiet:
            time.sleep(_PAUSE_SECONDS)
            self._check(())

    def _gather(self, value: object) -> list[Any]:
        """Return the values of all workers in this round, by rank."""
        agent = self._agent
        round_number = self._round = next(agent.rounds)
        values = agent.termination.setdefault(round_number, {})
        values[agent.number] = value
        text = pickle.dumps(value, 5)
        for rank in range(len(agent.workers)):
            if rank != agent.number:
                assert agent.endpoint is not None
                agent.endpoint.send(rank, TERMINATION, round_number, [(address_of(text), len(text))], text)
        while len(values) < len(agent.workers):
            time.sleep(_PAUSE_SECONDS)
            self._check(tuple(rank for rank in range(len(agent.workers)) if rank not in values))
        del agent.termination[round_number]
        return [values[rank] for rank in sorted(values)]

    def _check(self, missing: tuple[int, ...]) -> None:
        agent = self._agent
        for rank in missing:
            if rank in agent.liveness.gone and rank not in agent.termination.get(self._round, ()):
                raise agent.liveness.failure_of(
                    rank, f"before worker {agent.info.name!r} could shut down together with it"
                )
        waited = self._deadline.elapsed()
        if waited > self._deadline.timeout_s:
            names = ", ".join(repr(agent.workers[rank].name) for rank in missing)
            what = (
                f"{names} had not called shutdown()" if missing else f"{len(agent.pending)} calls are pending"
            )
            raise RpcTimeoutError(
                f"the shutdown of worker {agent.info.name!r} timed out after {waited:.1f} s: {what}"
            )
