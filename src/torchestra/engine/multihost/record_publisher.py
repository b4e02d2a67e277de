"""Let readers outside of a job, such as ``torchestra top``, learn what ranks of other hosts do.

The leader of each host has a thread that sleeps on a word of the arena's header, RECORDS_ASKED, which a
reader counts up. It asks the other hosts (failure_detector.py), writes what they told into a new memory file,
and publishes that: first the file's descriptor, then, in RECORDS_ANSWERED, the value of RECORDS_ASKED
(release). The reader opens the file through /proc. The invariant: *a file is complete when it is published,
and never written again*; so whoever has opened one may read it at leisure. The file before it is closed by
then.

While nobody asks, none of this costs the job anything.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from torchestra.engine import layout as at
from torchestra.engine.diagnosis.facts import to_json
from torchestra.engine.failure.program_samples import ProgramSample
from torchestra.engine.kernels import shared_words
from torchestra.engine.memory.arena import Arena
from torchestra.engine.recorder.flight_record import FlightRecord
from torchestra.system.limits import start_thread
from torchestra.system.memory_files import make_memory_file

MEMORY_FILE = "records of other hosts"


@dataclass(frozen=True)
class RemoteHost:
    """What is known of the ranks of another host.

    Attributes:
        record: of these ranks, by the clock of the host that asked; without ranks, if they did not answer.
        dead: those that have died, as far as is known.
        programs: of each rank in the record; none at all if the host does not tell.
    """

    record: FlightRecord
    dead: tuple[int, ...] = ()
    programs: tuple[ProgramSample, ...] = ()


@dataclass(frozen=True)
class RemoteHosts:
    """All other hosts of a group.

    Attributes:
        request: the value of RECORDS_ASKED that this answers.
    """

    request: int
    hosts: tuple[RemoteHost, ...]


class RecordPublisher:
    """Answer readers outside of the job, from :meth:`start` until :meth:`close`.

    Args:
        arena: of this host.
        ask: asks the other hosts; may take seconds.
    """

    def __init__(self, arena: Arena, ask: Callable[[], tuple[RemoteHost, ...]]) -> None:
        self._arena, self._ask = arena, ask
        self._closed = False

    def start(self, name: str) -> None:
        """Start the thread, which gets this name."""
        start_thread(threading.Thread(target=self._run, name=name, daemon=True))

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        shared_words.increment_and_wake(self._arena.address + at.RECORDS_ASKED)

    def _run(self) -> None:
        address, answered = self._arena.address, 0
        descriptor: int | None = None
        try:
            while not self._closed:
                request = shared_words.sleep_while(address + at.RECORDS_ASKED, answered)
                if request == answered or self._closed:
                    continue
                text = to_json(RemoteHosts(request, self._ask()))
                before, descriptor = descriptor, make_memory_file(MEMORY_FILE)
                if before is not None:
                    os.close(before)
                with os.fdopen(os.dup(descriptor), "w") as file:
                    file.write(text)
                shared_words.store_ordered(address + at.RECORDS_DESCRIPTOR, descriptor)
                shared_words.store_ordered(address + at.RECORDS_ANSWERED, request)
                answered = request
        finally:
            if descriptor is not None:
                os.close(descriptor)
