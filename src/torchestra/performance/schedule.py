"""Schedules: what the ranks of a job do, event by event, as the simulation and the exporters take it.

A rank has *streams*: threads of its own whose events happen one after the other, ``"program"`` and perhaps
``"communication"``. The streams of one rank are ordered by signals, the ranks of a host by flags
(kernels/waiting.py), and ranks on different hosts by messages. Recorders write schedules
(:mod:`torchestra.performance.recording`).

Not every host of a large job needs streams of its own. Where hosts do the same, one *stands for* all others
that have no streams: these send what it sends, at the same times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class _OnMemory:
    """What goes through a rank's memory.

    Attributes:
        nbytes: how much.
        working_set_bytes: all own memory that the operation goes through: tensors and buffers. 0 where the
            operation has touched these bytes before.
        operation_bytes: what each rank puts into the operation.
    """

    nbytes: int
    working_set_bytes: int
    operation_bytes: int = 0


class Copy(_OnMemory):
    """Copy bytes of the rank's own memory into other memory of its own."""

    __slots__ = ()


class LocalCopy(_OnMemory):
    """Copy bytes of the rank's tensors into others of its own, which no other rank reads or writes."""

    __slots__ = ()


class Fetch(_OnMemory):
    """Copy bytes out of buffers that other ranks have written into the rank's tensors."""

    __slots__ = ()


class PeerRead(_OnMemory):
    """Copy bytes of another rank's tensor, where they lie, into the rank's own (process_vm_readv).

    What the call takes besides is an :class:`Overhead` of that name.
    """

    __slots__ = ()


class Reduce(_OnMemory):
    """Read bytes of two sources together, and write their reduction; or what takes as long."""

    __slots__ = ()


class WriteMiss(_OnMemory):
    """Write bytes of a copy to memory that is not in the near caches (a write miss).

    It is what the copy takes longer for that; the copy itself is an event besides.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Compute:
    """Keep a core for ``seconds``: the program's own work."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Overhead:
    """Spend what the calibration has under ``name`` in ``HostCalibration.per_op_s``.

    Of ``call.NAME``, a public call of operation NAME, the calibration may only have what any call takes.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin an operation: what follows takes longer by what is known of such operations as a whole."""

    name: str
    operation_bytes: int


@dataclass(frozen=True, slots=True)
class SetFlag:
    """Set the rank's flag, which only grows, to ``value``."""

    value: int


@dataclass(frozen=True, slots=True)
class AwaitFlag:
    """Wait until the flag of a local rank of the same host is at least ``value``."""

    local_rank: int
    value: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Let another stream of the same rank go on that waits for signal ``number``."""

    number: int


@dataclass(frozen=True, slots=True)
class AwaitSignal:
    """Wait for signal ``number`` of another stream of the same rank."""

    number: int


@dataclass(frozen=True, slots=True)
class Send:
    """Begin to send ``nbytes`` to the same local rank of each of some hosts, in this order."""

    hosts: Sequence[int]
    nbytes: int
    tag: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the messages with ``tag``, of ``nbytes`` each, from the same local rank of some hosts."""

    hosts: Sequence[int]
    nbytes: int
    tag: int


Event = (
    Copy
    | LocalCopy
    | Fetch
    | PeerRead
    | WriteMiss
    | Reduce
    | Compute
    | Overhead
    | Begin
    | SetFlag
    | AwaitFlag
    | Signal
    | AwaitSignal
    | Send
    | Receive
)


@dataclass
class EventStream:
    """One thread of a rank.

    Attributes:
        host, local_rank: whose it is.
        name: ``"program"`` or ``"communication"``.
        events: what it does.
    """

    host: int
    local_rank: int
    name: str = "program"
    events: list[Event] = field(default_factory=list)


@dataclass
class Schedule:
    """What the ranks of a job do.

    Attributes:
        hosts, ranks_per_host: of the job.
        streams: those of the hosts that have been recorded.
        stands_for_others: the host whose streams are those of all hosts that have none; None if every host
            has some.
    """

    hosts: int
    ranks_per_host: int
    streams: list[EventStream]
    stands_for_others: int | None = None

    @property
    def recorded_hosts(self) -> list[int]:
        """Return the hosts that have streams, in ascending order."""
        return sorted({stream.host for stream in self.streams})


def shifted(events: Iterable[Event], flags: int, tags: int) -> list[Event]:
    """Return the events with higher flags and tags, as those of an operation that comes after others."""
    moved: list[Event] = []
    for event in events:
        if isinstance(event, SetFlag | AwaitFlag):
            event = replace(event, value=event.value + flags)
        elif isinstance(event, Send | Receive):
            event = replace(event, tag=event.tag + tags)
        moved.append(event)
    return moved
