"""Write schedules in GOAL, the language of LogGOPSim and ATLAHS.

The grammar is that of LogGOPSim's txt2bin (Hoefler, Schneider, Lumsdaine 2010): ``num_ranks N``, then by rank
``calc NANOSECONDS``, ``send BYTESb to RANK tag T`` and ``recv BYTESb from RANK tag T``, each with a label and
the ``cpu`` that it keeps, and ``LABEL requires LABEL``.

Ranks here are ranks there. A stream is a cpu. GOAL knows no shared memory: a flag that one rank of a host
sets and another awaits becomes a message of a byte, which costs what messages cost in that simulator.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from torchestra.engine.recorder.trace import replacing
from torchestra.errors import InvalidArgumentError
from torchestra.performance.costs import Costs, StreamCosts
from torchestra.performance.machine import Machine
from torchestra.performance.schedule import (
    AwaitFlag,
    AwaitSignal,
    Begin,
    Event,
    EventStream,
    Receive,
    Schedule,
    Send,
    SetFlag,
    Signal,
)

_Flag = tuple[int, int, int]
"""The rank that sets it, the rank that awaits it, and which of the setter's flags it is."""


def write_goal(path: Path, schedule: Schedule, machine: Machine) -> int:
    """Write a schedule to a file; return the number of ranks.

    Raises:
        InvalidArgumentError: not every host has been recorded.
    """
    if schedule.stands_for_others is not None:
        raise InvalidArgumentError(
            f"GOAL has a schedule for every rank, and of {machine.ranks} ranks not every one is recorded;"
            " take fewer hosts"
        )
    writer = _Writer(schedule, machine)
    with replacing(path) as file:
        file.write(f"num_ranks {machine.ranks}\n")
        for rank in range(machine.ranks):
            writer.write_rank(file, rank)
    return machine.ranks


class _Writer:
    def __init__(self, schedule: Schedule, machine: Machine) -> None:
        self._per_host = machine.ranks_per_host
        self._costs = Costs(machine)
        self._streams: defaultdict[int, list[EventStream]] = defaultdict(list)
        self._flags: defaultdict[int, list[int]] = defaultdict(list)
        for stream in schedule.streams:
            rank = stream.host * self._per_host + stream.local_rank
            self._streams[rank].append(stream)
            self._flags[rank] += [event.value for event in stream.events if isinstance(event, SetFlag)]
        self._tags: dict[_Flag, int] = {}
        self._awaited: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for rank, streams in self._streams.items():
            for stream in streams:
                for event in stream.events:
                    if isinstance(event, AwaitFlag):
                        self._note(rank, stream, event)

    def _note(self, rank: int, stream: EventStream, event: AwaitFlag) -> None:
        """Give a tag to the message that stands for a flag, once for each rank that awaits it."""
        setter = stream.host * self._per_host + event.local_rank
        index = bisect_left(self._flags[setter], event.value)
        if (setter, rank, index) not in self._tags:
            self._tags[setter, rank, index] = 2 * len(self._tags) + 1
            self._awaited[setter, index].append(rank)

    def write_rank(self, file: IO[str], rank: int) -> None:
        """Write what one rank does."""
        file.write(f"\nrank {rank} {{\n")
        labels = 0
        signals: dict[int, str] = {}
        needs: list[tuple[str, int]] = []
        for cpu, stream in enumerate(self._streams[rank]):
            before = ""
            for event, text in self._lines(rank, stream):
                labels += 1
                label = f"l{labels}"
                file.write(f"{label}: {text} cpu {cpu}\n")
                if before:
                    file.write(f"{label} requires {before}\n")
                if isinstance(event, Signal):
                    signals[event.number] = label
                elif isinstance(event, AwaitSignal):
                    needs.append((label, event.number))
                before = label
        for label, number in needs:
            file.write(f"{label} requires {signals[number]}\n")
        file.write("}\n")

    def _lines(self, rank: int, stream: EventStream) -> Iterator[tuple[Event, str]]:
        """Yield the events of a stream with their lines, but for label and cpu."""
        flags, costs = 0, StreamCosts(self._costs, rank)
        received: set[_Flag] = set()
        for event in stream.events:
            if isinstance(event, SetFlag):
                for other in self._awaited[rank, flags]:
                    yield event, f"send 1b to {other} tag {self._tags[rank, other, flags]}"
                flags += 1
            elif isinstance(event, AwaitFlag):
                setter = stream.host * self._per_host + event.local_rank
                flag = setter, rank, bisect_left(self._flags[setter], event.value)
                if flag not in received:
                    received.add(flag)
                    yield event, f"recv 1b from {setter} tag {self._tags[flag]}"
            elif isinstance(event, Send | Receive):
                way, preposition = ("send", "to") if isinstance(event, Send) else ("recv", "from")
                for other in self._ranks(event.hosts, stream):
                    yield event, f"{way} {event.nbytes}b {preposition} {other} tag {2 * event.tag}"
            elif isinstance(event, Signal | AwaitSignal):
                yield event, "calc 0"
            elif isinstance(event, Begin):
                costs.begin(event)
            else:
                yield event, f"calc {round(costs.seconds_of(event) * 1e9)}"

    def _ranks(self, hosts: Sequence[int], stream: EventStream) -> list[int]:
        return [host * self._per_host + stream.local_rank for host in hosts]
