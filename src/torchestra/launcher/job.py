"""One job, as the process that launched it sees it: start the ranks, show what they print, end them.

Its launch backend (:mod:`.backend`) knows where the ranks are: forked on this host (:mod:`.fork_backend`), or
on the nodes of a Ray cluster (:mod:`.on_ray`). Everything happens in one thread, in one event loop: messages
of the backend and of the ranks, output, deadlines. A job ends when every rank has ended, by itself or because
:meth:`Job.stop` saw to it.

The first failure stops the job (or the first that is one too many, where some are to be survived), after a
moment in which failures may still come in: of ranks that fail nearly together, the one to blame is often not
the first to be heard of (see :mod:`.root_cause`).
"""

from __future__ import annotations

import itertools
import math
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO

from torchestra.launcher.backend import JobListener, LaunchBackend
from torchestra.launcher.output import OutputSink, OutputSource, colours_wanted, prefix
from torchestra.launcher.root_cause import FailedRank, root_cause
from torchestra.launcher.spec import Call, Ended, Failure, JobSpec

__all__ = ["AFTER_FAILURE", "SETTLE_S", "Job", "RankState", "StopPlan"]

StopPlan = tuple[tuple[signal.Signals, float], ...]
"""Signals to the ranks, each with the seconds given to them before the next; SIGKILL follows the last."""

AFTER_FAILURE: StopPlan = ((signal.SIGTERM, 0.4),)

SETTLE_S = 0.05
"""How long after a failure others are listened for: a cause may be heard of just after its consequence."""
_SETTLE_CONSEQUENCE = 5
"""How many times as long it is while every failure only says that another rank is gone."""


class RankState:
    """What is known of one rank.

    Attributes:
        rank: which, counted from the job's first here.
        pid: its process, once there is one.
        host: where that is, if it is not here.
        failure: what it said of the exception that ends it.
        result: the file with its pickled result.
        ended: the word that its process is gone.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid: int | None = None
        self.host = ""
        self.failure: Failure | None = None
        self.result: BinaryIO | None = None
        self.ended: Ended | None = None

    def failed_rank(self, must_return: bool) -> FailedRank | None:
        """How the rank failed, if it has. One that ``must_return`` fails also by ending without a result."""
        if self.failure is not None:
            return FailedRank(self.rank, self.failure.exit_code, self.failure.time, self.failure)
        if self.ended is not None and (self.ended.exit_code != 0 or (must_return and self.result is None)):
            return FailedRank(self.rank, self.ended.exit_code, self.ended.time)
        return None


class Job(JobListener):
    """The ranks of one job.

    Args:
        backend: where its ranks will be.
        spec: what they run.
        sinks: where their standard output and standard error are shown.
        max_failures: how many ranks may fail without ending the job; one at least must end well, here or
            on another host.
        settle: for how many seconds after a failure others are waited for.

    Attributes:
        spec: what the ranks run.
        ranks: what is known of each; empty until they are asked for.
        first_rank: what the first of them is numbered where the job has ranks on other hosts as well.
        cause: the failure for which the job was stopped, or with which it ended.
        survived: the failures that the job has outlived, in the order in which these ranks ended.
        when_survived: called with each of them.
        when_stopped: called before the ranks are ended.
    """

    def __init__(
        self,
        backend: LaunchBackend,
        spec: JobSpec,
        sinks: tuple[OutputSink, OutputSink],
        max_failures: int = 0,
        settle: float = SETTLE_S,
    ) -> None:
        self.ranks: list[RankState] = []
        self.spec = spec
        self.first_rank = spec.first_rank
        self.cause: FailedRank | None = None
        self.survived: list[FailedRank] = []
        self.when_stopped: Callable[[], None] = lambda: None
        self.when_survived: Callable[[FailedRank], None] = lambda _: None
        self._max_failures = min(max_failures, (spec.world_size or spec.nproc) - 1)
        self._settle = settle
        self._backend = backend
        self._sinks = sinks
        self._must_return = isinstance(spec.target, Call)
        self._alive = spec.nproc
        self._failure_seen = False
        self._stop_time: float | None = None
        self._alarms: list[tuple[float, Callable[[], None]]] = []
        self._sources: list[tuple[OutputSource, OutputSource]] = []  # of each rank
        self._selector = selectors.DefaultSelector()

    def watch(self, file: int | socket.socket, when_readable: Callable[[], object]) -> None:
        """Have :meth:`run` call a function whenever ``file`` can be read."""
        self._selector.register(file, selectors.EVENT_READ, when_readable)

    def unwatch(self, file: int | socket.socket) -> None:
        """Undo :meth:`watch`."""
        self._selector.unregister(file)

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        """Have :meth:`run` call a function once ``time.monotonic()`` reaches ``when``."""
        self._alarms.append((when, function))
        self._alarms.sort(key=lambda alarm: alarm[0])

    @property
    def stopping(self) -> bool:
        """The ranks are being ended."""
        return self._stop_time is not None

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The ranks whose processes have not ended."""
        return tuple(state.rank for state in self.ranks if state.ended is None)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the ranks, of those that have one by now."""
        return tuple(state.pid for state in self.ranks if state.pid is not None)

    def run(self) -> None:
        """Start the ranks; return when all have ended and all that they printed is shown.

        Raises:
            DistError: the backend is lost, and the ranks with it.
            BrokenPipeError: nobody reads this process's output any more; the ranks still run.
        """
        self._backend.start(self)
        self.wait()

    def wait(self, until: float = math.inf) -> None:
        """Go on with a :meth:`run` that an exception left, at most until a ``time.monotonic()``."""
        while self._alive and time.monotonic() < until:
            for key, _ in self._selector.select(self._time_to_next(until)):
                key.data()
            self._do_what_is_due()
        self._backend.drain()
        for source in self._all_sources():
            source.show_unfinished()
        for sink in self._sinks:
            sink.end_line()
        self.cause = self.cause or self._cause_so_far()

    def stop(self, plan: StopPlan) -> None:
        """Begin to end the ranks; they are gone when :meth:`run` returns. An empty plan kills them now.

        What began earlier goes on: only an empty plan overtakes it.
        """
        if self.stopping and plan:
            return
        if not self.stopping:
            self.when_stopped()
        when = time.monotonic()
        self._stop_time = self._stop_time or when
        if not self.ranks:
            self._alive = 0
        for signum, grace in plan:
            self.call_at(when, partial(self.signal, signum))
            when += grace
        self.call_at(when, partial(self.signal, signal.SIGKILL))

    def signal(self, signum: signal.Signals, final: bool = True) -> None:
        """Signal the ranks (see :class:`~torchestra.launcher.spec.SignalRanks`)."""
        if self.ranks:
            self._backend.signal(signum, final)

    def close(self) -> None:
        """Close what this job opened in this process. The ranks are gone, or their backend is about to be."""
        self._selector.close()
        self._backend.close()
        for state in self.ranks:
            if state.result is not None:
                state.result.close()

    # What the backend says: see JobListener

    def begun(self) -> None:
        coloured = [colours_wanted(sink.terminal) for sink in self._sinks]
        size = self.spec.world_size or self.spec.nproc
        for rank in range(self.spec.nproc):
            self.ranks.append(RankState(rank))
            out, err = (
                OutputSource(sink, prefix(self.first_rank + rank, size, colour))
                for sink, colour in zip(self._sinks, coloured, strict=True)
            )
            self._sources.append((out, err))

    def forked(self, rank: int, pid: int, host: str = "") -> None:
        self.ranks[rank].pid, self.ranks[rank].host = pid, host

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        source = self._sources[rank][stream]
        if data:
            source.feed(data, time.monotonic())
        else:
            source.show_unfinished()

    def failed(self, rank: int, failure: Failure) -> None:
        self.ranks[rank].failure = failure
        self._note_failed_rank(self.ranks[rank])

    def returned(self, rank: int, result: BinaryIO) -> None:
        self.ranks[rank].result = result

    def ended(self, end: Ended) -> None:
        state = self.ranks[end.rank]
        state.ended = end
        self._alive -= 1
        self._note_failed_rank(state)
        self._note_survived(state)

    def lost(self) -> None:
        self._alive = 0

    # Faults

    def _note_failed_rank(self, state: RankState) -> None:
        self._failure_seen = self._failure_seen or state.failed_rank(self._must_return) is not None

    def _note_survived(self, state: RankState) -> None:
        """A rank has ended: if it has failed and the others go on, say so."""
        failed = state.failed_rank(self._must_return)
        if failed is not None and not self.stopping and self._cause_so_far() is None:
            self.survived.append(failed)
            self.when_survived(failed)

    def _cause_so_far(self) -> FailedRank | None:
        """The failed rank that the others followed from, of the ranks that did not fail for being stopped."""
        until = self._stop_time or math.inf
        failed_ranks = [
            failed for state in self.ranks if (failed := state.failed_rank(self._must_return)) is not None
        ]
        return root_cause([failed for failed in failed_ranks if failed.time <= until], self._max_failures)

    # Time

    def _stop_due(self) -> float | None:
        """When the first failure shall stop the job, if there is one."""
        if not self._failure_seen or self.stopping:
            return None
        cause = self._cause_so_far()
        if cause is None:
            return None
        return cause.time + self._settle * (_SETTLE_CONSEQUENCE if cause.consequence else 1)

    def _time_to_next(self, until: float) -> float | None:
        """Seconds until something is to be done though nothing can be read; None for no end."""
        times = [source.wake_at() for source in self._all_sources()]
        times.append(self._stop_due())
        times.append(self._alarms[0][0] if self._alarms else None)
        first = min((when for when in times if when is not None), default=until)
        first = min(first, until)
        return None if first == math.inf else max(0.0, first - time.monotonic())

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        while self._alarms and self._alarms[0][0] <= now:
            self._alarms.pop(0)[1]()
        stop_due = self._stop_due()
        if stop_due is not None and stop_due <= now:
            self.cause = self._cause_so_far()
            self.stop(AFTER_FAILURE)
        for source in self._all_sources():
            wake_at = source.wake_at()
            if wake_at is not None and wake_at <= now:
                source.show_unfinished()

    def _all_sources(self) -> Iterator[OutputSource]:
        return itertools.chain.from_iterable(self._sources)
