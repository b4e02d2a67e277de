"""What a host tells of the programs of a group's ranks on it: for readers on this host, and on others."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from torchestra.engine import layout as at
from torchestra.engine.diagnosis.last_seen import read_last_seen
from torchestra.engine.diagnosis.process_counts import ProcessCounts, read_process
from torchestra.engine.failure.liveness import process_start
from torchestra.engine.recorder.flight_record import Readable


@dataclass(frozen=True)
class ProgramSample:
    """The program of one rank.

    Attributes:
        line: where it was lately, and how long ago; or nothing.
        process: what the system has counted of its process; None if this has ended, cannot be found (it is in
            another PID namespace), or has several ranks.
    """

    line: str = ""
    process: ProcessCounts | None = None


def sample_programs(arena: Readable) -> tuple[ProgramSample, ...]:
    """Return what is known of the programs of the ranks of an arena of this host."""
    blocks = [arena.layout.control + rank * at.CONTROL_BYTES for rank in range(arena.layout.size)]
    processes = [
        (arena.load_word(block + at.PROCESS), arena.load_word(block + at.STARTED)) for block in blocks
    ]
    return tuple(
        ProgramSample(
            read_last_seen(arena, local_rank), _counts(*process) if processes.count(process) == 1 else None
        )
        for local_rank, process in enumerate(processes)
    )


def _counts(pid: int, started: int) -> ProcessCounts | None:
    with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended
        if pid and process_start(pid) == started:
            return read_process(pid)
    return None
