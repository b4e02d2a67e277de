"""Watch over calls: fail those that take too long, or whose worker is gone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torchestra.errors import WorkerFailedError
from torchestra.rpc import remote_errors

if TYPE_CHECKING:
    from torchestra.rpc.agent import Agent

_log = logging.getLogger(__name__)


class Liveness:
    """Looks after the calls of one worker, some 20 times a second.

    Attributes:
        gone: how workers ended that have died or shut down, once all that they had sent has been received.
        checks: called each time.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.gone: dict[int, str] = {}
        self.checks: set[Callable[[], None]] = set()
        self._unreadable: dict[int, str] = {}

    def is_lost(self, rank: int) -> bool:
        """Return whether a worker has died or shut down."""
        return rank in self.gone or rank in self._lost()

    def _lost(self) -> dict[int, str]:
        """Return the fate of lost workers, whether or not they are known to be gone."""
        return {**self._agent.router.lost(self.gone), **self._unreadable}

    def failure_of(self, rank: int, what: str) -> WorkerFailedError:
        """Return the error of a worker that is gone; ``what`` says before which event."""
        name = self._agent.workers[rank].name
        return WorkerFailedError(f"worker {name!r} (rank {rank}) {self.gone[rank]} {what}", name)

    def give_up(self, source: int, error: Exception) -> None:
        """Treat a worker as gone that sends unreadable messages."""
        agent = self._agent
        _log.exception("worker %r gives up worker %r", agent.info.name, agent.workers[source].name)
        self._unreadable[source] = f"sent a message that cannot be read ({type(error).__name__}: {error})"

    def check(self) -> None:
        """Fail calls that have taken too long or whose worker is gone.

        Other threads add and remove calls meanwhile. Copying a dictionary is one step; making a tuple of its
        items is many, and the garbage collector may run between them.
        """
        agent = self._agent
        if agent.closed:
            return
        if not agent.router.context.program.is_alive():
            agent.close()  # a rank that is a thread has ended without shutdown()
            return
        now = agent.clock.elapsed()
        if any(call.is_late(now) for call in agent.pending.copy().values()):
            agent.pool.drain()  # the answer may be here, but no thread has had the time to read it
        for call_id, call in agent.pending.copy().items():
            if call.is_late(now):
                agent.fail(call_id, remote_errors.too_late(call, now, agent))
        for call_id, wait in agent.waits.copy().items():
            if wait.is_late(now) and agent.waits.pop(call_id, None) is not None:
                agent.finish(wait, None, remote_errors.too_late(wait, now, agent))
        agent.rrefs.clear_dropped()
        self._note_gone()
        for check in tuple(self.checks):
            check()
        for call_id, call in agent.pending.copy().items():
            if call.peer in self.gone:
                agent.fail(call_id, remote_errors.gone(call, agent))

    def _note_gone(self) -> None:
        """Note workers as gone, once all that they had sent, answers included, has been received."""
        agent = self._agent
        lost = {rank: how for rank, how in self._lost().items() if rank not in self.gone}
        if lost and agent.pool.drain():
            self.gone.update(lost)
            for rank in lost:
                agent.pool.submit(partial(agent.rrefs.remove_lost, rank))
                agent.pool.submit(partial(agent.scope.remove_lost, rank))
