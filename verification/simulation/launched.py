"""The seam of a launcher's ranks: a launch backend whose ranks are simulated processes.

Of a rank there is what its launcher sees: it is forked some time after it was asked for, reports phases,
fails or ends well, and dies of a signal at once, or after a moment if it may. A rank that has lost another
one fails because of it, or goes on without it, as the job says. What ranks do with each other is simulated
elsewhere.
"""

from __future__ import annotations

import random
import signal
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torchestra.launcher.backend import LaunchBackend
from torchestra.launcher.spec import Ended, Failure, PhaseReached
from torchestra.system.phases import Phase
from verification.simulation.network import Source
from verification.simulation.scheduler import Process, Scheduler
from verification.simulation.sockets import Machine
from verification.simulation.threads import SimulatedThread, SimulatedTime

_POLL_S = 0.05
_FORK_S, _JOIN_S, _DYING_S, _NOTICE_S = 0.1, 0.4, 0.3, 0.5
_UNJOINED_S = 30.0


class Death(NamedTuple):
    """The end of a rank that is not for the end of its job.

    Attributes:
        rank: its number in the job.
        at: when.
        has_failed: it died, or raised an error, of itself; not because of another one, or of its launcher.
    """

    rank: int
    at: float
    has_failed: bool


class RankPrograms:
    """What the ranks of a job do, and what has become of them.

    Args:
        is_elastic: ranks go on without those that they lose, and let others in.
        survives: they go on without those that they lose, to the end.
        until: when they end, if they can.

    Attributes:
        alive: the processes of ranks, with the launcher's process and the rank's number in the job.
        deaths: in their order.
        well: the ranks that have ended well.
    """

    def __init__(
        self, run: Scheduler, choices: random.Random, *, is_elastic: bool, survives: bool, until: float
    ) -> None:
        self.run, self.choices, self.time = run, choices, SimulatedTime()
        self.is_elastic, self.survives, self.until = is_elastic, survives, until
        self.alive: dict[Process, tuple[Process, int]] = {}
        self.deaths: list[Death] = []
        self.well: set[int] = set()

    def losses(self, rank: int, since: int) -> int:
        """Return how many deaths others may have noticed, of those after so many."""
        return sum(death.rank != rank for death in self.deaths[since:])


class _Told(Source):
    """What ranks tell their launcher, on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: deque[Callable[[], None]] = deque()

    def is_readable(self) -> bool:
        return bool(self.calls)

    def fileno(self) -> int:
        return 0


class SimulatedBackend(LaunchBackend):
    """Holds the ranks of one launcher.

    Args:
        programs: what they do.
        process: the launcher.
    """

    def __init__(self, programs: RankPrograms, process: Process) -> None:
        self._programs, self._run, self._launcher = programs, programs.run, process
        self._told = _Told()
        self._ranks: dict[int, Process] = {}
        self._noted: set[Process] = set()  # whose death is noted
        self._pids = 100 * (process.host + 1)
        process.on_crash.append(self._lose_all)

    def _start(self) -> None:
        loop = self.listener.loop
        loop.watch(Machine.open(self._told), self._read)
        self.listener.begun()
        for rank in range(self.listener.spec.nproc):
            self._fork(rank, joins=self.listener.spec.joins)

    def _read(self) -> None:
        while self._told.calls:
            self._told.calls.popleft()()

    def _tell(self, call: Callable[[], None]) -> None:
        self._told.calls.append(call)
        self._told.changed(self._run)

    def replace(self, rank: int) -> None:
        self._fork(rank, joins=True)

    def signal(self, signum: signal.Signals, final: bool, rank: int | None = None) -> None:
        for each, process in list(self._ranks.items()):
            if rank not in (None, each):
                continue
            if signum == signal.SIGKILL:
                self.end(each, process, -signum)
            elif signum in (signal.SIGTERM, signal.SIGINT):
                seconds = self._programs.choices.uniform(0.0, 2 * _DYING_S)
                self._run.call_later(seconds, partial(self.end, each, process, -signum))

    def drain(self) -> None:
        """Ranks print nothing."""

    def close(self) -> None:
        """There is nothing to close."""

    # -- the ranks

    def _number(self, rank: int) -> int:
        return self.listener.spec.first_rank + rank

    def _now(self) -> float:
        """Return the time of this machine's monotonic clock."""
        return self._launcher.boot + self._run.now

    def _fork(self, rank: int, *, joins: bool) -> None:
        run = self._run
        process = Process(f"rank {self._number(rank)}", self._launcher.host, self._launcher.boot)
        self._ranks[rank] = process
        self._programs.alive[process] = self._launcher, self._number(rank)
        self._pids += 1
        program = partial(self._go, rank, process, self._pids, joins=joins)
        SimulatedThread.of_process(run, run.new_task(process, "program"), program).start()

    def _note_death(self, rank: int, process: Process, *, has_failed: bool) -> None:
        if process not in self._noted:
            self._noted.add(process)
            self._programs.deaths.append(Death(self._number(rank), self._run.now, has_failed))

    def fail(self, rank: int, signum: int | None) -> None:
        """Have a rank die of a signal, or raise an error."""
        process = self._ranks.get(rank)
        if process is None or process in self._noted:
            return
        self._note_death(rank, process, has_failed=True)
        self._run.note(f"rank {self._number(rank)} {'raises an error' if signum is None else 'is killed'}")
        if signum is None:
            self._raise(rank, process, "ValueError: a deliberate one", consequence=False)
        else:  # others may notice before the launcher does
            seconds = self._programs.choices.uniform(0.0, _DYING_S)
            self._run.call_later(seconds, partial(self.end, rank, process, -signum))

    def _raise(self, rank: int, process: Process, summary: str, *, consequence: bool) -> None:
        """Report an error that ends a rank; its process ends a moment later."""
        failure = Failure(self._now(), 1, summary, "", consequence)
        self._tell(lambda: self.listener.failed(rank, failure))
        self._run.call_later(
            self._programs.choices.uniform(0.0, _DYING_S), partial(self.end, rank, process, 1)
        )

    def end(self, rank: int, process: Process, code: int) -> None:
        """End the process of a rank, if it lives."""
        if self._ranks.get(rank) is not process or (code == 0 and process in self._noted):
            return
        del self._ranks[rank], self._programs.alive[process]
        if code:
            self._note_death(rank, process, has_failed=False)
        else:
            self._programs.well.add(self._number(rank))
        ended = Ended(rank, code, self._now())
        self._tell(lambda: self.listener.ended(ended))
        self._run.crash(process, f"ends with {code}")

    def _lose_all(self) -> None:
        """End the ranks with their launcher, as the kernel does."""
        for rank, process in list(self._ranks.items()):
            self._note_death(rank, process, has_failed=True)
            del self._ranks[rank], self._programs.alive[process]
            self._run.crash(process)

    def _go(self, rank: int, process: Process, pid: int, *, joins: bool) -> None:
        """Be a rank: in its own process."""
        programs, sleep, uniform = self._programs, self._programs.time.sleep, self._programs.choices.uniform
        sleep(uniform(0.0, _FORK_S))
        self._tell(lambda: self.listener.forked(rank, pid))
        sleep(uniform(0.0, _JOIN_S))
        known = len(programs.deaths)
        if joins and not self._await_members():
            self._raise(rank, process, "DistStoreError: the job has ended", consequence=False)
            return
        self._reach(rank, "joined")
        sleep(uniform(0.0, _JOIN_S))
        self._reach(rank, "trains")
        while self._run.now < programs.until:
            sleep(_POLL_S)
            if not programs.losses(self._number(rank), known) or programs.survives:
                continue
            sleep(uniform(0.0, _NOTICE_S))
            known = len(programs.deaths)
            if not programs.is_elastic:
                self._raise(rank, process, "RankFailedError: a rank has died", consequence=True)
                return
            for phase in ("shrunk", "trains"):
                self._reach(rank, phase)
        sleep(uniform(0.0, _JOIN_S))
        self.end(rank, process, 0)

    def _await_members(self) -> bool:
        """Return whether there is a group that a replacement can join."""
        programs = self._programs
        if programs.run.now < programs.until:
            return True
        programs.time.sleep(_UNJOINED_S)
        return False

    def _reach(self, rank: int, phase: Phase) -> None:
        reached = PhaseReached(phase, self._now())
        self._tell(lambda: self.listener.reached(rank, reached))
