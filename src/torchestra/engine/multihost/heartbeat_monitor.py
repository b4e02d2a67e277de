"""The failure detector of a host's leader: it pings, and tells outside readers about other hosts."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from torchestra.engine import layout as at
from torchestra.engine.failure.program_samples import ProgramSample
from torchestra.engine.multihost.failure_detector import FailureDetector
from torchestra.engine.multihost.heartbeat_tree import pinged_by, rows_of
from torchestra.engine.multihost.record_publisher import RecordPublisher, RemoteHost
from torchestra.engine.multihost.remote_records import on_this_clock
from torchestra.engine.recorder.flight_entries import HostRecord
from torchestra.engine.recorder.flight_record import read_flight_record
from torchestra.system.limits import start_thread
from torchestra.transport.message import Message

_ENTRIES = 16  # of each rank, for readers outside of the job


class HeartbeatMonitor(FailureDetector):
    """The detector of a host's leader, with the thread that pings; arguments as :class:`FailureDetector`."""

    _publisher: RecordPublisher | None = None

    def start(self) -> None:
        """Begin to ping, and to answer readers outside of the job, once the detector is attached."""
        name = f"{self._context.name}-{self.host}"
        start_thread(threading.Thread(target=self._run, name=f"torchestra-heartbeat-{name}", daemon=True))
        self._publisher = RecordPublisher(self._context.arena, self._remote_hosts)
        self._publisher.start(f"torchestra-records-{name}")

    def leave(self) -> None:
        super().leave()
        if self._publisher is not None:
            self._publisher.close()

    def _arrived(self, message: Message) -> None:
        """Take a message, and note for readers outside of the job that its host lives."""
        host = self.hosts.host_of[message.source]
        if host < at.HEARTBEAT_HOSTS:
            arena, entry = self._context.arena, at.HEARTBEATS_AT + host * at.HEARTBEAT_BYTES
            arena.store_word(entry + at.HEARTBEAT_NANOSECONDS, time.monotonic_ns())
            arena.store_word(entry + at.HEARTBEAT_COUNT, arena.load_word(entry + at.HEARTBEAT_COUNT) + 1)
        super()._arrived(message)

    def _remote_hosts(self) -> tuple[RemoteHost, ...]:
        """Return what the ranks of the other hosts do; takes some seconds if one does not answer."""
        self._note_line()
        answers = self.ask_what_they_did(_ENTRIES)
        own = read_flight_record(self._context.arena, 0)
        found = []
        for host in self._others:
            ranks, name = self.hosts.on(host), self.hosts.names[host]
            programs: tuple[ProgramSample, ...] = ()
            if (answer := answers.get(host)) is not None:
                record = on_this_clock(answer, name, ranks)
                told = zip(answer.record.ranks, answer.programs, strict=False)  # of no rank, perhaps
                programs = tuple(program for rank, program in told if rank.rank in ranks)
            else:
                record = replace(own, ranks=(), hosts=(HostRecord(name, tuple(ranks), answered=False),))
            found.append(RemoteHost(record, tuple(sorted(self.dead.intersection(ranks))), programs))
        return tuple(found)

    def _run(self) -> None:
        while not self._closed.is_set():
            self.check()
            self._closed.wait(self.interval)

    def check(self) -> None:
        """Ping the hosts that this one watches, and give up those that have been silent for too long."""
        watched = self._watched()
        for host in watched:
            self.ping(host)
        self._give_up(self._suspect(watched))

    def _watched(self) -> list[int]:
        """Return the hosts that this one pings."""
        return pinged_by(self.host, rows_of(len(self.hosts)), self._has_leader)

    def _has_leader(self, host: int) -> bool:
        leader = self.hosts.on(host)[0]
        return leader not in self.dead and leader not in self.left
