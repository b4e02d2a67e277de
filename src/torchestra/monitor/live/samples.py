"""Samples of a job, taken from outside: plain values, which are drawn, printed, recorded and replayed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchestra.engine.diagnosis.process_counts import ProcessCounts
from torchestra.engine.failure.program_samples import ProgramSample, sample_programs
from torchestra.engine.recorder.flight_entries import RankRecord
from torchestra.engine.recorder.flight_record import FlightRecord, read_flight_record
from torchestra.monitor.jobs import Group, Job, find_jobs
from torchestra.monitor.live.other_hosts import OtherHosts
from torchestra.monitor.rates import RankRates, rates

_ENTRIES = 16  # a rank's last entries: enough to find the message that it hangs in


@dataclass(frozen=True)
class GroupSample:
    """The ranks that a group has on one host.

    Attributes:
        key: tells the group, and the host, apart from all others of the job.
        record: of these ranks. It has no ranks if the host does not answer.
        alive: of each, whether its process runs.
        lines: of each, the line where its program was lately, or nothing.
        processes: of each, what the system has counted of its process. Known only of ranks that are
            processes.
    """

    key: str
    record: FlightRecord
    alive: tuple[bool, ...]
    lines: tuple[str, ...]
    processes: tuple[ProcessCounts | None, ...]

    @property
    def host(self) -> str:
        """Return the name of the host, or nothing for a group that has only one."""
        return self.record.hosts[0].name if self.record.hosts else ""

    @property
    def answered(self) -> bool:
        """Return whether the host has told what its ranks do."""
        return all(host.answered for host in self.record.hosts)


@dataclass(frozen=True)
class JobSample:
    """A job at one moment.

    Attributes:
        pid, command: of the process that names the job.
        taken: when, by ``time.monotonic()``.
        taken_at: the same moment by ``time.time()``.
        membership: what an elastic job's launcher tells of its members, as JSON; ``"null"`` of other jobs.
        groups: by group; after those of this host, those of other hosts.
    """

    pid: int
    command: str
    taken: float
    taken_at: float
    membership: str
    groups: tuple[GroupSample, ...]


class JobSampler:
    """Take samples of a job, again and again."""

    def __init__(self, job: Job) -> None:
        self._pids = job.pids
        self._other_hosts: dict[str, OtherHosts] = {}

    def sample(self) -> JobSample | None:
        """Return the job as it is now, for groups come and go and ranks die; None if it has ended."""
        jobs, _ = find_jobs(self._pids)  # quicker than to look at all processes
        if not jobs:
            return None
        job = jobs[0]
        self._pids = job.pids
        here = [_sample_here(group) for group in job.groups]
        there = [
            other
            for group, sample in zip(job.groups, here, strict=True)
            if sample.record.hosts
            for other in self._elsewhere(group, sample)
        ]
        return JobSample(
            pid=job.pid,
            command=job.command,
            taken=time.monotonic(),
            taken_at=time.time(),
            membership=json.dumps(job.membership),
            groups=(*here, *there),
        )

    def _elsewhere(self, group: Group, own: GroupSample) -> Iterator[GroupSample]:
        """Return the ranks of the group on other hosts, as they were when these were last asked."""
        asked = self._other_hosts.setdefault(own.key, OtherHosts(group))
        for host in asked.look():
            name = host.record.hosts[0].name
            alive = tuple(rank.rank not in host.dead for rank in host.record.ranks)
            programs = host.programs or (ProgramSample(),) * len(host.record.ranks)
            yield _sample(f"{own.key} {name}", host.record, alive, programs)


def _sample_here(group: Group) -> GroupSample:
    record = read_flight_record(group.arena, _ENTRIES)
    alive = tuple(map(group.is_alive, range(group.arena.layout.size)))
    return _sample(str(group.arena.made), record, alive, sample_programs(group.arena))


def _sample(
    key: str, record: FlightRecord, alive: tuple[bool, ...], programs: tuple[ProgramSample, ...]
) -> GroupSample:
    lines = tuple(program.line for program in programs)
    return GroupSample(key, record, alive, lines, tuple(program.process for program in programs))


@dataclass(frozen=True)
class Change:
    """A sample of a group, and what has happened since the sample before it.

    Attributes:
        before: None if this is the first.
        rates: of each rank.
    """

    before: GroupSample | None
    after: GroupSample
    rates: tuple[RankRates, ...]


def changes(before: JobSample | None, after: JobSample) -> list[Change]:
    """Return the groups of a sample, each beside what it was in the sample before."""
    earlier = {} if before is None else {group.key: group for group in before.groups}
    found = []
    for group in after.groups:
        early = earlier.get(group.key)
        shape = len(group.record.ranks), group.record.size
        if early is not None and (len(early.record.ranks), early.record.size) != shape:
            early = None  # its host answers again, or no more
        compared = rates((early or group).record, group.record)
        found.append(Change(early, group, tuple(compared)))
    return found


def current_entry(rank: RankRecord) -> Any:
    """Return the message that a rank blocks in, or else the collective that it is in, or was in last."""
    return rank.running_message or rank.last_operation
