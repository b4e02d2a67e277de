"""Which workers are gone: dead, shut down, or given up for what they sent."""

from __future__ import annotations

import logging

from torchestra.errors import WorkerFailedError
from torchestra.rpc.calls import PendingCall, name_of
from torchestra.rpc.router import Router
from torchestra.rpc.workers import Workers

_log = logging.getLogger(__name__)


class Liveness:
    """Knows which of the workers are gone, for one of them.

    Attributes:
        gone: how workers ended that have died or shut down, once all that they had sent has been received.
    """

    def __init__(self, router: Router, workers: Workers) -> None:
        self._router = router
        self._workers = workers
        self._own_name = workers[router.number].name
        self.gone: dict[int, str] = {}
        self._unreadable: dict[int, str] = {}

    def is_lost(self, rank: int) -> bool:
        """Return whether a worker has died or shut down."""
        return rank in self.gone or rank in self._lost()

    def _lost(self) -> dict[int, str]:
        return {**self._router.lost(self.gone), **self._unreadable}

    def newly_lost(self) -> dict[int, str]:
        """Return the fate of lost workers that are not yet known to be gone."""
        return {rank: how for rank, how in self._lost().items() if rank not in self.gone}

    def end_reason(self, rank: int) -> str:
        """Return how a worker ended that is lost."""
        return self.gone.get(rank) or self._lost().get(rank, "is gone")

    def failure_of(self, rank: int, what: str) -> WorkerFailedError:
        """Return the error of a worker that is gone; ``what`` says before which event."""
        info = self._workers[rank]
        return WorkerFailedError(
            f"worker {info.name!r} (rank {info.id}) {self.end_reason(rank)} {what}", info.name
        )

    def failure_of_call(self, call: PendingCall) -> WorkerFailedError:
        """Return the error of a call to a worker that is gone."""
        what = f"before it answered the call of {name_of(call.function)} from worker {self._own_name!r}"
        return self.failure_of(call.peer, what)

    def give_up(self, source: int, error: Exception) -> None:
        """Treat a worker as gone that sends unreadable messages."""
        _log.exception("worker %r gives up worker %r", self._own_name, self._workers[source].name)
        self._unreadable[source] = f"sent a message that cannot be read ({type(error).__name__}: {error})"
