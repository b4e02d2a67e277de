"""One job, as the process that launched it sees it: start the ranks, show what they print, end them.

Everything happens in one thread around one ``select``: words of the server and of the ranks, output,
deadlines. A job ends when every rank has ended, by itself or because :meth:`Job.stop` saw to it.

The first failure stops the job (or the first that is one too many, where some are to be survived), after a
moment in which failures may still come in: of ranks that fail nearly together, the one to blame is often not
the first to be heard of (see :mod:`.blame`).
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import BinaryIO

from torchestra.errors import DistError
from torchestra.launcher.blame import Fault, cause_of
from torchestra.launcher.output import Device, Source, colours_wanted, prefix
from torchestra.launcher.spec import Call, Ended, Failure, Forked, JobSpec, Ready, Returned, SignalRanks
from torchestra.launcher.surroundings import MeetingPoint
from torchestra.launcher.warm import WarmServer
from torchestra.launcher.wire import channel, receive, send

__all__ = ["AFTER_FAILURE", "Job", "StopPlan"]

StopPlan = tuple[tuple[signal.Signals, float], ...]
"""Signals to the ranks, each with the seconds given to them before the next; SIGKILL follows the last."""

AFTER_FAILURE: StopPlan = ((signal.SIGTERM, 0.4),)

_SETTLE_S = 0.05
"""How long after a failure others are listened for: a cause may be heard of just after its consequence."""
_SETTLE_CONSEQUENCE_S = 0.25
"""The same while every failure only says that another rank is gone."""
_READ_SIZE = 1 << 16
_MOST_READS_AT_THE_END = 17
"""Enough for the largest pipe, and an end to it if a child of a rank writes on for ever."""


class RankState:
    """What is known of one rank.

    Attributes:
        control: the launcher's end of its control channel.
        failure: what it said of the exception that ends it.
        result: the file with its pickled result.
        ended: the server's word that its process is gone.
    """

    def __init__(self, rank: int, control: socket.socket) -> None:
        self.rank = rank
        self.failure: Failure | None = None
        self.result: BinaryIO | None = None
        self.ended: Ended | None = None
        self.control = control

    def hear(self) -> bool:
        """Take every message that the rank has sent so far; False when no more can come."""
        with contextlib.suppress(BlockingIOError):
            while (message := receive(self.control)) is not None:
                if isinstance(message.content, Failure):
                    self.failure = message.content
                else:
                    assert isinstance(message.content, Returned)
                    self.result = os.fdopen(message.files[0], "rb")
            return False
        return True

    def fault(self, must_return: bool) -> Fault | None:
        """How the rank failed, if it has. One that ``must_return`` fails also by ending without a result."""
        if self.failure is not None:
            return Fault(self.rank, self.failure.exit_code, self.failure.time, self.failure)
        if self.ended is not None and (self.ended.exit_code != 0 or (must_return and self.result is None)):
            return Fault(self.rank, self.ended.exit_code, self.ended.time)
        return None

    def close(self) -> None:
        """Close its channel and its result."""
        self.control.close()
        if self.result is not None:
            self.result.close()


class Job:
    """The ranks of one job.

    Args:
        max_failures: how many ranks may fail without ending the job; one at least must end well.

    Attributes:
        ranks: what is known of each; empty until they are asked for.
        pids: the process id of each; empty until they exist.
        first_rank: what the first of them is numbered where the job has ranks on other hosts as well.
        cause: the failure for which the job was stopped, or with which it ended.
        survived: the failures that the job has outlived, in the order in which these ranks ended.
        when_survived: called with each of them.
        when_stopped: called before the ranks are ended.
    """

    def __init__(
        self,
        server: WarmServer,
        spec: JobSpec,
        meeting: MeetingPoint,
        devices: tuple[Device, Device],
        stdin: int | None = None,
        max_failures: int = 0,
    ) -> None:
        self.ranks: list[RankState] = []
        self.pids: tuple[int, ...] = ()
        self.first_rank = spec.first_rank
        self.cause: Fault | None = None
        self.survived: list[Fault] = []
        self.when_stopped: Callable[[], None] = lambda: None
        self.when_survived: Callable[[Fault], None] = lambda _: None
        self._max_failures = min(max_failures, spec.nproc - 1)
        self._server = server
        self._spec = spec
        self._meeting = meeting
        self._devices = devices
        self._stdin = stdin
        self._must_return = isinstance(spec.target, Call)
        self._alive = spec.nproc
        self._fault_seen = False
        self._stop_time: float | None = None
        self._alarms: list[tuple[float, Callable[[], None]]] = []
        self._sources: dict[int, Source] = {}  # by the descriptor that is read
        self._selector = selectors.DefaultSelector()
        self.watch(server.end, self._on_server)

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

    def run(self) -> None:
        """Start the ranks; return when all have ended and all that they printed is shown.

        Raises:
            DistError: the fork server died, and the ranks with it.
            BrokenPipeError: nobody reads this process's output any more; the ranks still run.
        """
        if self._server.warm:
            self._start_ranks()
        self.wait()

    def wait(self, until: float = math.inf) -> None:
        """Go on with a :meth:`run` that an exception left, at most until a ``time.monotonic()``."""
        while self._alive and time.monotonic() < until:
            for key, _ in self._selector.select(self._time_to_next(until)):
                key.data()
            self._do_what_is_due()
        self._show_the_rest()
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
            send(self._server.end, SignalRanks(signum, final))

    def close(self) -> None:
        """Close what this job opened in this process. The ranks are gone, or the server is about to be."""
        self._selector.close()
        for state in self.ranks:
            state.close()
        for descriptor in self._sources:
            os.close(descriptor)
        self._meeting.close()

    # What happens to the ranks

    def _start_ranks(self) -> None:
        send(self._server.end, self._spec, [self._meeting.listener.fileno()])
        null = os.open(os.devnull, os.O_RDONLY)
        coloured = [colours_wanted(device.terminal) for device in self._devices]
        for rank in range(self._spec.nproc):
            control, ranks_control = channel()
            control.setblocking(False)
            state = RankState(rank, control)
            self.ranks.append(state)
            self.watch(control, partial(self._on_rank, state))
            ends = []
            for device, colour in zip(self._devices, coloured, strict=True):
                descriptor, ranks_end = os.pipe()
                os.set_blocking(descriptor, False)
                self._sources[descriptor] = Source(device, self._prefix(rank, colour))
                self.watch(descriptor, partial(self._on_output, descriptor))
                ends.append(ranks_end)
            stdin = self._stdin if rank == 0 and self._stdin is not None else null
            send(self._server.end, rank, [ranks_control.fileno(), stdin, *ends])
            ranks_control.close()
            for ranks_end in ends:
                os.close(ranks_end)
        os.close(null)

    def _prefix(self, rank: int, coloured: bool) -> bytes:
        spec = self._spec
        return prefix(self.first_rank + rank, spec.world_size or spec.nproc, coloured)

    def _on_server(self) -> None:
        message = receive(self._server.end)
        content = None if message is None else message.content
        if isinstance(content, Ready):
            self._server.warm = True
            self._start_ranks()
        elif isinstance(content, Forked):
            self.pids = content.pids
        elif isinstance(content, Ended):
            state = self.ranks[content.rank]
            state.hear()
            state.ended = content
            self._alive -= 1
            self._note_fault(state)
            self._note_survived(state)
        else:
            self._lose_server()

    def _lose_server(self) -> None:
        """The server has died, so the kernel has killed the ranks; what the ranks started is left to kill."""
        for rank in self.unfinished if self.pids else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pids[rank], signal.SIGKILL)
        self._alive = 0
        self._server.warm = False
        if not self.ranks:
            raise DistError("the ranks could not be started: the process that loads torch for them failed")
        raise DistError("the launcher's fork server was killed, and its ranks with it; start the job again")

    def _on_rank(self, state: RankState) -> None:
        if not state.hear():
            self.unwatch(state.control)
        self._note_fault(state)

    def _note_fault(self, state: RankState) -> None:
        self._fault_seen = self._fault_seen or state.fault(self._must_return) is not None

    def _note_survived(self, state: RankState) -> None:
        """A rank has ended: if it has failed and the others go on, say so."""
        fault = state.fault(self._must_return)
        if fault is not None and not self.stopping and self._cause_so_far() is None:
            self.survived.append(fault)
            self.when_survived(fault)

    def _cause_so_far(self) -> Fault | None:
        """The fault the others followed from, of the ranks that did not fail for being stopped."""
        until = self._stop_time or math.inf
        faults = [fault for state in self.ranks if (fault := state.fault(self._must_return)) is not None]
        return cause_of([fault for fault in faults if fault.time <= until], self._max_failures)

    # Time

    def _stop_due(self) -> float | None:
        """When the first failure shall stop the job, if there is one."""
        if not self._fault_seen or self.stopping:
            return None
        cause = self._cause_so_far()
        if cause is None:
            return None
        return cause.time + (_SETTLE_CONSEQUENCE_S if cause.consequence else _SETTLE_S)

    def _time_to_next(self, until: float) -> float | None:
        """Seconds until something is to be done though nothing can be read; None for no end."""
        times = [source.wake_at() for source in self._sources.values()]
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
        for source in self._sources.values():
            wake_at = source.wake_at()
            if wake_at is not None and wake_at <= now:
                source.show_unfinished()

    # Output

    def _on_output(self, descriptor: int) -> bool:
        """Show what a rank has written; False when there was nothing."""
        source = self._sources[descriptor]
        try:
            data = os.read(descriptor, _READ_SIZE)
        except BlockingIOError:
            return False
        if data:
            source.feed(data, time.monotonic())
            return True
        source.show_unfinished()
        self.unwatch(descriptor)
        del self._sources[descriptor]
        os.close(descriptor)
        return False

    def _show_the_rest(self) -> None:
        """Show what the ranks wrote before they ended, though a child of theirs may hold the pipe open."""
        for descriptor, source in list(self._sources.items()):
            for _ in range(_MOST_READS_AT_THE_END):
                if not self._on_output(descriptor):
                    break
            source.show_unfinished()
        for device in self._devices:
            device.end_line()
