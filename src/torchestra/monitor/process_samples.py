"""Readings of the processes of a job's ranks, taken from outside while they run: why is one of them slow?

The system counts a process's time on cores, its page faults and its reads from disks (proc(5)). The line of
the program is asked of the thread that answers for a rank (engine/failure/stack_reporter.py), as other ranks
do whose wait has timed out. So a job pays only while it is looked at.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from torchestra.engine import layout as at
from torchestra.engine.diagnosis.last_seen import read_site
from torchestra.engine.diagnosis.process_counts import read_process
from torchestra.engine.kernels import shared_words
from torchestra.engine.memory.foreign import ForeignArena
from torchestra.engine.memory.mapping import MemoryFile
from torchestra.engine.recorder.trace import SAMPLE
from torchestra.monitor.jobs import Group

_INTERVAL_S = 0.05

Event = dict[str, Any]


def sample(groups: Sequence[Group], seconds: float) -> list[Event]:
    """Read the processes of some groups' ranks again and again; return the readings, as events of a trace.

    A process is read for the first of the groups that it is in; ranks that are threads of one process are
    left out, for the system's numbers are the process's. So are those of processes that cannot be found.

    Args:
        groups: in the order in which they stand in the trace.
        seconds: how long to look.
    """
    ranks = [rank for number, group in enumerate(groups, start=1) for rank in _ranks(number, group)]
    ranks = list({rank.pid: rank for rank in reversed(ranks)}.values())
    events: list[Event] = []
    end = time.monotonic() + seconds
    while ranks:
        began = time.monotonic()
        for rank in ranks:
            with contextlib.suppress(OSError, ValueError, IndexError):  # the process has just ended
                events.append(rank.read())
        if began >= end:
            break
        time.sleep(max(0.0, _INTERVAL_S - (time.monotonic() - began)))
    return events


def _ranks(number: int, group: Group) -> Iterator[_SampledRank]:
    arena = group.arena
    pids = [arena.process(local_rank)[0] for local_rank in range(arena.layout.size)]
    asking = None if os.getpid() in group.pids else _writable_control_blocks(arena)
    for local_rank, pid in enumerate(pids):
        if pid in group.pids and pids.count(pid) == 1:
            yield _SampledRank(number, local_rank, pid, arena, asking)


def _writable_control_blocks(arena: ForeignArena) -> Any:
    """Map the control blocks of an arena, to ask its ranks; None if this process may not."""
    try:
        descriptor = arena.open_to_write()
    except OSError:
        return None
    try:
        # The mapping stays when the file is closed; one that stayed open would look like a rank's.
        return MemoryFile(descriptor).map(arena.layout.control, arena.layout.size * at.CONTROL_BYTES)
    finally:
        os.close(descriptor)


class _SampledRank:
    """A rank whose process is read.

    Args:
        group: its number in the trace.
        local_rank: its number in the arena.
        asking: the control blocks, mapped to be written to; None: the rank cannot be asked.
    """

    def __init__(self, group: int, local_rank: int, pid: int, arena: ForeignArena, asking: Any) -> None:
        self.pid = pid
        self._group, self._local_rank, self._arena, self._asking = group, local_rank, arena, asking
        block = arena.layout.control + local_rank * at.CONTROL_BYTES
        self._block = block
        crosses = arena.load_word(at.HEADER_GROUP_SIZE) >= arena.layout.size
        self._rank = arena.load_word(block + at.GROUP_RANK) if crosses else local_rank
        self._asked_ns = 0

    def read(self) -> Event:
        """Return the present numbers.

        Raises:
            OSError, ValueError, IndexError: the process has ended.
        """
        told = asdict(read_process(self.pid))
        del told["all_threads"], told["resident_bytes"]
        told["site"] = self._site()
        where = {"pid": self._group, "tid": self._rank, "ts": time.monotonic() * 1e6}
        return {"ph": "i", "s": "t", "name": told["site"] or "sample", "cat": SAMPLE, **where, "args": told}

    def _site(self) -> str | None:
        """Return the line of the program that the rank has last told, and ask for the present one."""
        if self._asking is None:
            return None
        address = self._asking.ctypes.data + self._local_rank * at.CONTROL_BYTES + at.ASKED
        seen, asked_before = read_site(self._arena, self._local_rank), self._asked_ns
        self._asked_ns = time.monotonic_ns()
        shared_words.increment_and_wake(address)
        return seen[0] if seen is not None and asked_before and seen[1] >= asked_before else None
