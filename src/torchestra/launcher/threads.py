"""Ranks that are threads of this process: no start-up cost, one debugger, shared memory as it is.

A thread cannot be ended from outside. When a rank fails, its groups are destroyed as it leaves, so that
its peers get an error in the operation that they wait in. A rank that waits for something else is given
up after a moment, and keeps running, as a daemon, until it ends or the process does.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from torchestra.errors import LaunchTimeoutError, RankError
from torchestra.launcher.failure_report import ranks_phrase
from torchestra.launcher.root_cause import FailedRank, failure_from, root_cause
from torchestra.launcher.spec import Failure
from torchestra.launcher.thread_output import outputs_by_rank
from torchestra.store import HashStore
from torchestra.system.thread_frames import current_frames, without_collections
from torchestra.world.registry import thread_rank

T = TypeVar("T")

_PEERS_GRACE_S = 0.8


class ThreadRank:
    """One rank, and how it ended.

    Attributes:
        done: whether it has ended.
        result: the result of its function.
        error: the exception that its function raised, if any.
        failure: a report of that exception.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.failure: Failure | None = None
        self.thread: threading.Thread

    def frames(self) -> traceback.StackSummary:
        """Return the rank's current stack, the outermost frame first."""
        with without_collections():
            frame = current_frames().get(self.thread.ident or 0)
            return traceback.StackSummary() if frame is None else traceback.extract_stack(frame)

    def stack(self) -> str:
        """Return :meth:`frames` as text."""
        return "".join(self.frames().format())


class ThreadRanks:
    """Threads that call a function, each as a rank of one world; they begin at once.

    Args:
        function: the function that each calls, with its rank.
        leave: the function that each calls afterwards, even if ``function`` raised; its failure counts as the
            rank's.
    """

    def __init__(
        self, size: int, function: Callable[[int], object], leave: Callable[[], object] = lambda: None
    ) -> None:
        self.ranks = [ThreadRank(rank) for rank in range(size)]
        self._function = function
        self._leave = leave
        self._store = HashStore()
        self._changed = threading.Condition()
        for each in self.ranks:
            name = f"torchestra rank {each.rank}"
            each.thread = threading.Thread(target=self._run, args=(each,), name=name, daemon=True)
        for each in self.ranks:
            each.thread.start()

    def join(self, timeout: float | None, grace_s: float) -> bool:
        """Wait until all have ended, or ``grace_s`` after one has failed; return whether all have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._all_done() or self.any_failed, timeout)
            if self.any_failed:
                self._changed.wait_for(self._all_done, grace_s)
            return self._all_done()

    @property
    def any_failed(self) -> bool:
        """Return whether a rank has raised."""
        return any(each.failure is not None for each in self.ranks)

    def _all_done(self) -> bool:
        return all(each.done for each in self.ranks)

    def _run(self, each: ThreadRank) -> None:
        try:
            with thread_rank(each.rank, len(self.ranks), self._store):
                try:
                    each.result = self._function(each.rank)
                except BaseException as error:
                    self._note(each, error)
                finally:
                    self._leave()
        except BaseException as error:
            self._note(each, error)
        finally:
            with self._changed:
                each.done = True
                self._changed.notify_all()

    def _note(self, each: ThreadRank, error: BaseException) -> None:
        """Note a failure before the rank's groups are destroyed, so that its peers' errors come later."""
        if each.failure is None:
            with self._changed:
                each.error, each.failure = error, failure_from(error)
                self._changed.notify_all()


def launch_threads(fn: Callable[..., T], nproc: int, args: tuple[Any, ...], timeout: float | None) -> list[T]:
    """Run :func:`torchestra.launch` with ``kind="threads"``; each rank finds its world by itself.

    Raises:
        RankError, LaunchTimeoutError: as documented there.
    """
    with outputs_by_rank():
        threads = ThreadRanks(nproc, lambda rank: fn(*args))
        threads.join(timeout, _PEERS_GRACE_S)
    cause = root_cause(
        FailedRank(each.rank, 1, each.failure.time, each.failure)
        for each in threads.ranks
        if each.failure is not None
    )
    if cause is not None:
        assert cause.failure is not None
        message = f"rank {cause.rank} of {nproc} failed: {cause.failure.summary.splitlines()[0]}"
        error = threads.ranks[cause.rank].error
        raise RankError(message, cause.rank, traceback=cause.failure.traceback) from error
    late = [each for each in threads.ranks if not each.done]
    if late:
        ranks = [each.rank for each in late]
        raise LaunchTimeoutError(
            f"launch: {ranks_phrase(ranks)} of {nproc} had not finished after {timeout:g} s, and a thread"
            " cannot be ended; raise timeout= if that is not a hang",
            tuple(ranks),
            "".join(
                f"[rank {each.rank}] {line}"
                for each in late
                for line in each.stack().splitlines(keepends=True)
            ),
        )
    return [each.result for each in threads.ranks]
