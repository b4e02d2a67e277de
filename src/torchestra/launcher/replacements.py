"""An elastic job: ranks that die are replaced, and the job goes on meanwhile (``torchestra run --elastic``).

A rank is a *member* of the job from the start, or as a replacement from when it reports that it has joined
(system/phases.py). A replacement has the dead rank's number, and finds TORCHESTRA_JOIN=1 in its
environment. It is started at once; where the ranks have no core to spare, when the others train again, for
whom it would take one, or after a moment (:data:`_SETTLING_S`). The job ends by a failure

- before any rank was in a group: the others wait for the one that is gone, and none could join them;
- that leaves fewer members than the least number, those that have ended well included;
- when the restarts are used up;
- of the third replacement in a row of one rank that dies before it has done a step: the next would, too.

Once a rank has ended well the job is at its end, and nobody is replaced any more; a replacement that has not
joined when the last member has ended well is killed, which is no failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torchestra.launcher.cores import usable_cores
from torchestra.launcher.failure_policy import FailurePolicy
from torchestra.launcher.failure_report import ranks_phrase
from torchestra.launcher.job import Job
from torchestra.launcher.membership_file import MembershipFile
from torchestra.launcher.root_cause import FailedRank, describe_exit, root_cause
from torchestra.launcher.spec import PhaseReached, StoreServed
from torchestra.system.phases import Phase

PRELOADED = ("torch._dynamo",)
"""Modules that replacements would wait for: torch's optimizers import this when the first is made, for a
second."""

_MAX_FAILED_IN_A_ROW = 3
_USEFUL_AFTER_S = 10.0
"""A replacement that has been a member for so long was of use, though it reports no steps."""
_LINGER_S = 2.0
"""The time for a rank that has reported its exception to end; its peers wait for it."""
_SETTLING_S = 0.25
"""The time for the others to go on after a death, before a replacement takes one of their cores."""


class ElasticLimits(NamedTuple):
    """The limits of an elastic job.

    Attributes:
        least, most: how many members it may have.
        restarts: how many replacements may be started; None for any number.
    """

    least: int
    most: int
    restarts: int | None = None


class _Member:
    """A rank through all its processes.

    Attributes:
        state: "starts", "joins" (as a replacement), "trains" (it is in the group), "dead", or "done" (it has
            ended well).
        since: when that began.
        trained: whether its present process has done a step.
        failures: those that no replacement has made good by joining.
        restarts: how many replacements it has had.
        failures_in_a_row: how many of the last of them, in a row, died before they were of use.
        died: when its process before the present one was gone, if that was here.
    """

    def __init__(self, joins: bool) -> None:
        self.state = "joins" if joins else "starts"
        self.since = time.monotonic()
        self.trained = False
        self.failures: list[FailedRank] = []
        self.restarts = 0
        self.failures_in_a_row = 0
        self.died: float | None = None

    def enter(self, state: str, now: float) -> None:
        self.state, self.since = state, now

    @property
    def alive(self) -> bool:
        """Return whether it has a process that is a member."""
        return self.state in ("starts", "trains")


class _Recovery:
    """What the members that were alive at a death have to do after it.

    Attributes:
        rank: who died.
        phases: the reports that say that a member has done it.
        waiting: who has not.
        line: what to say when all have.
    """

    def __init__(
        self, rank: int, died: float, phases: tuple[Phase, ...], survivors: Sequence[int], line: str
    ) -> None:
        self.rank, self.died, self.phases, self.waiting, self.line = rank, died, phases, set(survivors), line

    def note(self, rank: int, reached: PhaseReached) -> bool:
        """Note a report; return whether it was the last that was missing."""
        if rank not in self.waiting or reached.phase not in self.phases or reached.time < self.died:
            return False
        self.waiting.discard(rank)
        return not self.waiting


class Replacements(FailurePolicy):
    """The failure policy of an elastic job: replaces ranks that die, and prints how long each phase took.

    Args:
        job: the job, not yet begun.
        limits: how many members it may have, and how many restarts.
        say: prints a line of the launcher's own.

    Attributes:
        when_changed: called with how many ranks here are members or have ended well, when that may have
            changed.
    """

    def __init__(self, job: Job, limits: ElasticLimits, say: Callable[[str], None]) -> None:
        super().__init__(survived=0)
        self._job, self._limits, self._say = job, limits, say
        ranks = job.spec.nproc
        self._elsewhere = (job.spec.world_size or ranks) - ranks
        self._at_end = False
        self._members: list[_Member] = []
        self._recoveries: list[_Recovery] = []
        self._restarts = 0
        self._to_start: set[int] = set()
        self._met = job.spec.joins
        self.when_changed: Callable[[int], object] = lambda members: None
        self._fatal = False
        self._crash_looping: FailedRank | None = None
        self._file = MembershipFile()
        self._store: Mapping[int, int] = {}

    def close(self) -> None:
        """Close what ``torchestra top`` reads."""
        self._file.close()

    def cause(self, failed: Sequence[FailedRank]) -> FailedRank | None:
        if not self._fatal or self._crash_looping is not None:
            return self._crash_looping
        open_failures = {each: None for member in self._members for each in member.failures}
        return root_cause([*open_failures, *(each for each in failed if each not in open_failures)])

    def summary(self) -> str:
        return f", after {self._restarts} restart{'' if self._restarts == 1 else 's'}"

    # Events

    def begun(self) -> None:
        self._members = [_Member(self._job.spec.joins) for _ in range(self._job.spec.nproc)]
        self._show()

    def forked(self, rank: int) -> None:
        member = self._members[rank]
        if member.restarts:
            most = "" if self._limits.restarts is None else f" of {self._limits.restarts}"
            which = f"(pid {self._job.ranks[rank].pid}; restart {self._restarts}{most})"
            self._report(rank, f"its replacement has started {which}")
        self._show()

    def store_served(self, served: StoreServed) -> None:
        self._store = served.pids
        if served.restarted is not None:
            pid = served.pids[served.restarted]
            self._say(
                f"torchestra: replica {served.restarted} of the job's store was killed, and has been started"
                f" again (pid {pid})\n"
            )
        self._show()

    def reached(self, rank: int, reached: PhaseReached) -> None:
        member = self._members[rank]
        if reached.phase == "joined":
            self._met = True
            if member.state == "joins":
                self._report(rank, "its replacement has joined", reached.time)
            member.failures.clear()
            member.enter("trains", reached.time)
        elif reached.phase == "trains":
            if (member.restarts or self._job.spec.joins) and not member.trained:
                self._report(rank, "its replacement trains", reached.time)
            member.trained = True
        for recovery in self._recoveries:
            if recovery.note(rank, reached):
                self._report(recovery.rank, recovery.line, reached.time)
        self._recoveries = [recovery for recovery in self._recoveries if recovery.waiting]
        if not self._recoveries:
            self._start_replacements()
        self._show()

    def failing(self, rank: int) -> None:
        process = self._job.ranks[rank]

        def end() -> None:
            if self._job.ranks[rank] is process and process.ended is None:
                self._job.kill(rank)

        self._job.loop.call_at(time.monotonic() + _LINGER_S, end)

    def ended_well(self, rank: int) -> None:
        if not self._job.ranks[rank].dismissed:
            self._members[rank].enter("done", time.monotonic())
            if not any(member.alive for member in self._members):
                self._dismiss()
        self._show()

    def failed(self, failed: FailedRank) -> None:
        member = self._members[failed.rank]
        was_member = member.alive
        useful = member.trained or (member.state == "trains" and failed.time - member.since > _USEFUL_AFTER_S)
        member.failures_in_a_row = member.failures_in_a_row + 1 if member.restarts and not useful else 0
        member.failures.append(failed)
        ended = self._job.ranks[failed.rank].ended
        member.died = failed.time if ended is None else ended.time
        member.enter("dead", member.died)
        for recovery in self._recoveries:
            recovery.waiting.discard(failed.rank)
        if was_member:
            self._expect_recovery(failed.rank, member.died)
        if not self._fatal:
            self._decide(failed)
        self._show()

    def survived(self, failed: FailedRank) -> None:
        if self._ending():
            return
        self._restarts += 1
        self._to_start.add(failed.rank)
        if self._recoveries and usable_cores() < len(self._members):
            self._job.loop.call_at(time.monotonic() + _SETTLING_S, self._start_replacements)
        else:
            self._start_replacements()

    def _start_replacements(self) -> None:
        """Start those that wait until the others have gone on, unless the job is at its end by now."""
        to_start, self._to_start = self._to_start, set()
        for rank in to_start if not (self._ending() or self._fatal or self._job.stopping) else ():
            member = self._members[rank]
            member.restarts += 1
            member.trained = False
            member.enter("joins", time.monotonic())
            self._job.replace(rank)
        if to_start:
            self._show()

    # Decisions

    def end(self) -> None:
        """Note that ranks on other hosts have ended well: the job is at its end."""
        self._at_end = True
        if not any(member.alive for member in self._members):
            self._dismiss()

    def _ending(self) -> bool:
        return self._at_end or any(member.state == "done" for member in self._members)

    def _decide(self, failed: FailedRank) -> None:
        """Decide whether this failure ends the job, and say why."""
        left = self._count()
        member = self._members[failed.rank]
        if not self._met:
            self._end("a rank failed before any was in a group")
        elif left + self._elsewhere < self._limits.least:
            left += self._elsewhere
            self._end(f"of its members {left} are left, and --elastic needs {self._limits.least}")
        elif self._ending():
            return
        elif member.failures_in_a_row >= _MAX_FAILED_IN_A_ROW:
            self._crash_looping = failed
            self._end(
                f"{_MAX_FAILED_IN_A_ROW} replacements of one rank in a row died before they had done a step"
            )
        elif self._restarts == self._limits.restarts:
            self._end(f"its {self._restarts} restarts are used up")

    def _count(self) -> int:
        return sum(member.alive or member.state == "done" for member in self._members)

    def _end(self, why: str) -> None:
        self._fatal = True
        if not self._job.stopping:
            self._say(f"torchestra: the job ends: {why}\n")

    def _dismiss(self) -> None:
        for rank, member in enumerate(self._members):
            if member.state == "joins":
                self._job.ranks[rank].dismissed = True
                self._job.kill(rank)

    # Reports

    def _report(self, rank: int, what: str, when: float | None = None) -> None:
        member, now = self._members[rank], time.monotonic() if when is None else when
        after = f", {now - member.died:.3f} s after the death" if member.died is not None else ""
        self._say(f"torchestra: rank {self._job.first_rank + rank}: {what}{after}\n")

    def _expect_recovery(self, rank: int, died: float) -> None:
        """Wait for the members that are left to shrink their group without a dead rank, and to go on."""
        left = [other for other, member in enumerate(self._members) if member.alive]
        who = ranks_phrase([self._job.first_rank + other for other in left])
        shrunk, train = ("has", "trains") if len(left) == 1 else ("have", "train")
        self._recoveries += [
            _Recovery(rank, died, ("shrunk", "grown"), left, f"{who} {shrunk} shrunk the group"),
            _Recovery(rank, died, ("trains",), left, f"{who} {train}"),
        ]

    def _show(self) -> None:
        self.when_changed(self._count())
        members = [
            {
                "rank": self._job.first_rank + rank,
                "pid": self._job.ranks[rank].pid,
                "state": member.state,
                "since": member.since,
                "restarts": member.restarts,
                "last_failure": describe_exit(member.failures[-1].exit_code) if member.failures else None,
            }
            for rank, member in enumerate(self._members)
        ]
        addresses = self._job.spec.environment.get("TORCHESTRA_STORE", "").split(",")
        served = sorted(self._store.items()) if len(addresses) > 1 and self._elsewhere == 0 else []
        store = [{"pid": pid, "address": addresses[replica]} for replica, pid in served]
        told = {**self._limits._asdict(), "restarted": self._restarts, "members": members, "store": store}
        self._file.write(told)
