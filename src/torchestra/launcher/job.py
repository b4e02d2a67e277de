"""One job, in the process that launched it: starts the ranks, shows their output, ends them.

Its launch backend (:mod:`.backend`) knows where the ranks are: forked on this host (:mod:`.fork_backend`), or
on the nodes of a Ray cluster (:mod:`.on_ray`). Everything happens in one thread, in one event loop: messages
of the backend and of the ranks, output, deadlines. A job ends when every rank has ended, by itself or through
:meth:`Job.stop`.

The first failure stops the job (or the first that is one too many, where some are to be survived), after a
moment in which more failures may arrive: of ranks that fail nearly together, the one to blame is often not
the first to report (see :mod:`.root_cause`).
"""

from __future__ import annotations

import itertools
import math
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO

from torchestra.launcher.backend import JobListener, LaunchBackend
from torchestra.launcher.event_loop import EventLoop
from torchestra.launcher.failure_policy import FailurePolicy
from torchestra.launcher.output import OutputSink, OutputSource, colours_wanted, prefix
from torchestra.launcher.root_cause import FailedRank
from torchestra.launcher.spec import Call, Ended, Failure, JobSpec, PhaseReached, StoreServed

StopPlan = tuple[tuple[signal.Signals, float], ...]
"""Signals to the ranks, each with the seconds given to them before the next; SIGKILL follows the last."""

AFTER_FAILURE: StopPlan = ((signal.SIGTERM, 0.4),)

SETTLE_S = 0.05
"""How long to wait for more failures after one: a cause may be reported just after its consequence."""
_SETTLE_CONSEQUENCE = 5
"""The factor on SETTLE_S while every failure only says that another rank is gone."""


class RankState:
    """The state of one rank.

    Attributes:
        rank: its number, counted from the job's first rank here.
        pid: its process, once there is one.
        host: the host of the process, if it is not this one.
        failure: its report of the exception that ends it.
        result: the file with its pickled result.
        ended: the end of its process, once it is gone.
        dismissed: whether it was killed because the job has ended without it, which is no failure.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid: int | None = None
        self.host = ""
        self.failure: Failure | None = None
        self.result: BinaryIO | None = None
        self.ended: Ended | None = None
        self.dismissed = False

    def failed_rank(self, must_return: bool) -> FailedRank | None:
        """Return how the rank failed, if it has; if it ``must_return``, ending without a result is one."""
        if self.dismissed:
            return None
        if self.failure is not None:
            return FailedRank(self.rank, self.failure.exit_code, self.failure.time, self.failure, self.pid)
        if self.ended is not None and (self.ended.exit_code != 0 or (must_return and self.result is None)):
            return FailedRank(self.rank, self.ended.exit_code, self.ended.time, pid=self.pid)
        return None


class Job(JobListener):
    """The ranks of one job.

    Args:
        backend: starts and holds its ranks.
        spec: what they run.
        sinks: the sinks of their standard output and standard error.
        max_failures: how many ranks may fail without ending the job; at least one must end well, here or
            on another host.
        settle_s: how many seconds to wait for more failures after one.

    Attributes:
        loop: calls functions while :meth:`run` runs.
        ranks: the state of each; empty until they are being started.
        first_rank: the number of the first of them, if the job has ranks on other hosts as well.
        cause: the failure that stopped the job, or with which the job ended.
        policy: decides which failures end the job.
        survived: the failures that the job has survived, in the order in which these processes ended.
        when_survived: called with each of them.
        when_failing: called at each failure, at once; the other ranks may end because of it before they
            are ended.
        when_stopped: called before the ranks are ended.
        consequence_settle_s: how many seconds to wait for a cause while every failure only says that another
            rank is gone.
        spans_nodes: whether the job has ranks on other nodes, so that the cause may be there: then it is
            waited for although all ranks here have ended.
    """

    def __init__(
        self,
        backend: LaunchBackend,
        spec: JobSpec,
        sinks: tuple[OutputSink, OutputSink],
        max_failures: int = 0,
        settle_s: float = SETTLE_S,
    ) -> None:
        self.ranks: list[RankState] = []
        self.spec = spec
        self.loop = EventLoop()
        self.first_rank = spec.first_rank
        self.cause: FailedRank | None = None
        self.survived: list[FailedRank] = []
        self.when_failing: Callable[[], None] = lambda: None
        self.when_stopped: Callable[[], None] = lambda: None
        self.consequence_settle_s = settle_s * _SETTLE_CONSEQUENCE
        self.spans_nodes = False
        self.when_survived: Callable[[FailedRank], None] = lambda _: None
        self.policy = FailurePolicy(min(max_failures, (spec.world_size or spec.nproc) - 1))
        self._settle_s = settle_s
        self._backend = backend
        self._sinks = sinks
        self._must_return = isinstance(spec.target, Call)
        self._alive = spec.nproc
        self._any_failed = False
        self._stop_time: float | None = None
        self._outputs: list[tuple[OutputSource, OutputSource]] = []  # of each rank

    @property
    def stopping(self) -> bool:
        """Return whether the ranks are being ended."""
        return self._stop_time is not None

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Return the ranks whose processes have not ended."""
        return tuple(state.rank for state in self.ranks if state.ended is None)

    @property
    def failed_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose last process has failed."""
        return tuple(state.rank for state in self.ranks if state.failed_rank(self._must_return) is not None)

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the process ids of the ranks that have a process by now."""
        return tuple(state.pid for state in self.ranks if state.pid is not None)

    def run(self) -> None:
        """Start the ranks; return when all have ended and all their output is shown.

        Raises:
            DistError: the backend is lost, and the ranks with it.
            BrokenPipeError: the reader of this process's output is gone; the ranks still run.
        """
        self.start()
        self.wait()

    def start(self) -> None:
        """Begin to start the ranks, as :meth:`run` does; :meth:`step` and :meth:`wait` go on from there."""
        self._backend.start(self)

    def step(self, until: float = math.inf) -> None:
        """Wait for something to do, at most until a ``time.monotonic()``, and do it."""
        show_due = min((output.due() for output in self._all_outputs()), default=math.inf)
        self.loop.run_once(min(until, self._stop_due(), show_due))
        self._do_what_is_due()

    def show_all(self) -> None:
        """Show all output of the ranks so far, including unfinished lines."""
        self._backend.drain()
        for output in self._all_outputs():
            output.show_unfinished()
        for sink in self._sinks:
            sink.end_line()

    def wait(self, until: float = math.inf) -> None:
        """Continue a :meth:`run` that an exception left, at most until a ``time.monotonic()``."""
        while (self._alive or self._awaits_cause()) and time.monotonic() < until:
            self.step(until)
        self.show_all()
        self.cause = self.cause or self._cause_so_far()

    def stop(self, plan: StopPlan) -> None:
        """Begin to end the ranks; they are gone when :meth:`run` returns. An empty plan kills them now.

        A plan that began earlier continues: only an empty plan overrides it.
        """
        if self.stopping and plan:
            return
        if not self.stopping:
            self.when_stopped()
        when = time.monotonic()
        self._stop_time = self._stop_time or when
        if not self.ranks:
            self._alive = 0
        for signum, grace_s in plan:
            self.loop.call_at(when, partial(self.signal, signum))
            when += grace_s
        self.loop.call_at(when, partial(self.signal, signal.SIGKILL))

    def signal(self, signum: signal.Signals, final: bool = True) -> None:
        """Signal the ranks (see :class:`~torchestra.launcher.spec.SignalRanks`)."""
        if self.ranks:
            self._backend.signal(signum, final)

    def replace(self, rank: int) -> None:
        """Begin to start a rank again whose process has ended; it is to join the others."""
        self.ranks[rank] = RankState(rank)
        self._alive += 1
        self._backend.replace(rank)

    def kill(self, rank: int) -> None:
        """Kill the process of a rank, and what it has started."""
        self._backend.signal(signal.SIGKILL, final=False, rank=rank)

    def close(self) -> None:
        """Close everything that this job opened here. The ranks are gone, or their backend is about to be."""
        self.loop.close()
        self._backend.close()
        self.policy.close()
        for state in self.ranks:
            if state.result is not None:
                state.result.close()

    # Events from the backend: see JobListener

    def begun(self) -> None:
        coloured = [colours_wanted(sink.terminal) for sink in self._sinks]
        size = self.spec.world_size or self.spec.nproc
        for rank in range(self.spec.nproc):
            self.ranks.append(RankState(rank))
            out, err = (
                OutputSource(sink, prefix(self.first_rank + rank, size, colour))
                for sink, colour in zip(self._sinks, coloured, strict=True)
            )
            self._outputs.append((out, err))
        self.policy.begun()

    def forked(self, rank: int, pid: int, host: str = "") -> None:
        self.ranks[rank].pid, self.ranks[rank].host = pid, host
        self.policy.forked(rank)

    def store_served(self, served: StoreServed) -> None:
        self.policy.store_served(served)

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        output = self._outputs[rank][stream]
        if data:
            output.feed(data, time.monotonic())
        else:
            output.show_unfinished()

    def reached(self, rank: int, reached: PhaseReached) -> None:
        self.policy.reached(rank, reached)

    def failed(self, rank: int, failure: Failure) -> None:
        self.ranks[rank].failure = failure
        self._any_failed = True
        self.when_failing()
        self.policy.failing(rank)

    def returned(self, rank: int, result: BinaryIO) -> None:
        self.ranks[rank].result = result

    def ended(self, end: Ended) -> None:
        state = self.ranks[end.rank]
        state.ended = end
        self._alive -= 1
        failed = state.failed_rank(self._must_return)
        if failed is None:
            self.policy.ended_well(end.rank)
            return
        self._any_failed = True
        self.when_failing()
        self.policy.failed(failed)
        if not self.stopping and self._cause_so_far() is None:
            self.survived.append(failed)
            self.when_survived(failed)
            self.policy.survived(failed)

    def lost(self) -> None:
        self._alive = 0

    # Failures

    def _cause_so_far(self) -> FailedRank | None:
        """Return the failure that the others followed from, of those before the job was stopped."""
        until = self._stop_time or math.inf
        all_failed = (state.failed_rank(self._must_return) for state in self.ranks)
        in_time = [failed for failed in all_failed if failed is not None and failed.time <= until]
        return self.policy.cause(in_time)

    def _awaits_cause(self) -> bool:
        """Return whether all failures here are consequences, of which another node may yet tell the cause."""
        if not self.spans_nodes or self.stopping:
            return False
        cause = self._cause_so_far()
        return cause is not None and cause.consequence

    def _stop_due(self) -> float:
        """Return when the first failure is to stop the job; infinity if there is none."""
        cause = self._cause_so_far() if self._any_failed and not self.stopping else None
        if cause is None:
            return math.inf
        return cause.time + (self.consequence_settle_s if cause.consequence else self._settle_s)

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        if self._stop_due() <= now:
            self.cause = self._cause_so_far()
            self.stop(AFTER_FAILURE)
        for output in self._all_outputs():
            if output.due() <= now:
                output.show_unfinished()

    def _all_outputs(self) -> Iterator[OutputSource]:
        return itertools.chain.from_iterable(self._outputs)
