"""Ranks that are threads of this process: no start-up cost, one debugger, shared memory as it is.

A thread cannot be ended from outside. When a rank fails, its groups are destroyed as it leaves, so that
its peers get an error in the operation they wait in; a rank that waits for something else is given up
after a moment and keeps running, as a daemon, until it ends or the process does.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from torchestra.errors import LaunchTimeoutError, RankError
from torchestra.launcher.failure_report import ranks_phrase
from torchestra.launcher.root_cause import FailedRank, failure_from, root_cause
from torchestra.launcher.spec import Failure
from torchestra.store import HashStore, Store
from torchestra.world.registry import thread_rank

__all__ = ["launch_threads"]

T = TypeVar("T")

_PEERS_GRACE_S = 0.8


class _Rank:
    """One rank: its thread, and what became of it."""

    def __init__(
        self, rank: int, nproc: int, store: Store, call: Callable[[], Any], told: threading.Condition
    ) -> None:
        self.rank = rank
        self.result: Any = None
        self.error: BaseException | None = None
        self.failure: Failure | None = None
        self.done = False
        self._nproc = nproc
        self._store = store
        self._call = call
        self._told = told
        self.thread = threading.Thread(target=self._run, name=f"torchestra rank {rank}", daemon=True)

    def _run(self) -> None:
        try:
            with thread_rank(self.rank, self._nproc, self._store):
                try:
                    self.result = self._call()
                except BaseException as error:
                    self._note(error)
        except BaseException as error:
            self._note(error)
        finally:
            with self._told:
                self.done = True
                self._told.notify_all()

    def _note(self, error: BaseException) -> None:
        """Before the rank's groups are destroyed, so that its peers' errors come later."""
        if self.failure is None:
            with self._told:
                self.error, self.failure = error, failure_from(error)
                self._told.notify_all()

    def failed_rank(self) -> FailedRank | None:
        """How the rank failed, if it has."""
        return None if self.failure is None else FailedRank(self.rank, 1, self.failure.time, self.failure)

    def stack(self) -> str:
        """Where the rank is just now."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        lines = traceback.format_stack(frame) if frame is not None else []
        return "".join(f"[rank {self.rank}] {line}" for line in "".join(lines).splitlines(keepends=True))


def launch_threads(fn: Callable[..., T], nproc: int, args: tuple[Any, ...], timeout: float | None) -> list[T]:
    """:func:`torchestra.launch` with ``kind="threads"``; each rank finds its world by itself.

    Raises:
        RankError, LaunchTimeoutError: as told there.
    """
    store = HashStore()
    told = threading.Condition()
    ranks = [_Rank(rank, nproc, store, lambda: fn(*args), told) for rank in range(nproc)]
    for rank in ranks:
        rank.thread.start()
    with told:
        in_time = told.wait_for(lambda: _all_done(ranks) or _any_failed(ranks), timeout)
        if _any_failed(ranks):
            told.wait_for(lambda: _all_done(ranks), _PEERS_GRACE_S)
    cause = root_cause([failed for rank in ranks if (failed := rank.failed_rank()) is not None])
    if cause is not None:
        assert cause.failure is not None
        message = f"rank {cause.rank} of {nproc} failed: {cause.failure.summary.splitlines()[0]}"
        raise RankError(message, cause.rank, traceback=cause.failure.traceback) from ranks[cause.rank].error
    if not in_time:
        late = [rank for rank in ranks if not rank.done]
        numbers = [rank.rank for rank in late]
        raise LaunchTimeoutError(
            f"launch: {ranks_phrase(numbers)} of {nproc} had not finished after {timeout:g} s, and a thread"
            " cannot be ended; raise timeout= if that is not a hang",
            tuple(numbers),
            "".join(rank.stack() for rank in late),
        )
    return [rank.result for rank in ranks]


def _all_done(ranks: list[_Rank]) -> bool:
    return all(rank.done for rank in ranks)


def _any_failed(ranks: list[_Rank]) -> bool:
    return any(rank.failure is not None for rank in ranks)
