"""Facts about a rank, from which a diagnosis is made: plain values, which go from process to process as JSON.

Times are seconds up to the moment at which the facts were collected, so that those of hosts whose clocks
differ fit together. None, or an empty value, means that a fact is not known.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Presence = Literal["present", "left", "absent", "dead", "silent"]


@dataclass(frozen=True)
class UserFrame:
    """A line of the program (not of torchestra, torch or the standard library) on a thread's stack.

    Attributes:
        file, line, function: as in a traceback.
        first_line: of the function, which tells functions of one name apart.
        loops: the loops of the function that the line is in, as their first and last lines, innermost first.
    """

    file: str
    line: int
    function: str
    first_line: int = 0
    loops: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class LockWait:
    """A thread waits for a lock of the threading module, or for the end of a thread that waits for one.

    Attributes:
        lock: the expression by which the program calls it; nothing if the thread waits for another's end.
        site: where the thread waits.
        holder: the name of the thread that holds it, or whose end is awaited.
        holder_site: where that thread is.
        closed: the holder waits, directly or not, for what the waiting thread holds: it will never end.
        holder_inside: the function of torchestra that the holder is in.
        holder_lock: the lock that the holder waits for.
    """

    lock: str
    site: str
    holder: str = ""
    holder_site: str = ""
    closed: bool = False
    holder_inside: str = ""
    holder_lock: str = ""


@dataclass(frozen=True)
class GroupWait:
    """A rank's program is in an operation of another group as well.

    Attributes:
        group: its name.
        call: the operation.
        missing: the processes (as in :attr:`RankFacts.process`) that have not come to it.
    """

    group: str
    call: str
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """What the program of a rank does, as its own process sees it.

    Attributes:
        location: ``is at file:line in function``, or that there is no line any more.
        frames: its lines, innermost first; none if it has ended.
        inside: the function of torchestra that it is in, as called by the innermost line.
        lock: the lock that it waits for.
        exception: the exception that it handles at the moment, and where that was raised.
        groups: other groups in which it waits.
    """

    location: str
    frames: tuple[UserFrame, ...] = ()
    inside: str = ""
    lock: LockWait | None = None
    exception: str = ""
    groups: tuple[GroupWait, ...] = ()


@dataclass(frozen=True)
class Process:
    """What the system tells of the thread that runs a rank's program, over some tenths of a second.

    Attributes:
        seconds: for how long it was looked at.
        stopped: it is stopped, by a signal or a debugger.
        disk: the share of looks at which it waited for a disk (state D), of those at which it was not ready
            to run.
        ready: the share of looks at which it ran, or could have run if a core had been free.
        cpu: processor time of its process, in cores.
        major_faults: pages per second that had to be read from disk before the program could go on.
        read_bytes: bytes per second that its process read from disk.
        swapped_bytes: how much of its process lies in swap.
        throttled: the share of time for which the processor limit of its control group stopped it.
        loader_disk: the same as ``disk``, of that child process of which it is greatest.
        thread_disk: the same of the other threads of its process.
        in_futex: it slept, and that in a futex, as threads do that wait for a lock.
        reporter_sleeps: the thread that answers for the rank slept at most looks, though it was asked.
    """

    seconds: float
    stopped: bool = False
    disk: float = 0.0
    ready: float = 0.0
    cpu: float = 0.0
    major_faults: float = 0.0
    read_bytes: float = 0.0
    swapped_bytes: int = 0
    throttled: float = 0.0
    loader_disk: float = 0.0
    thread_disk: float = 0.0
    in_futex: bool = False
    reporter_sleeps: bool = False


@dataclass(frozen=True)
class Call:
    """The last collective of a rank in the group.

    Attributes:
        number: its sequence number in the group.
        text: as in error messages.
        state: ``"running"``, ``"done"`` or ``"failed"``.
        seconds: since it began, or if it is over, since it ended.
        before: the texts of the rank's calls before it, of the last ones that the record has.
        waits_for: the rank that it waits for just now, where that is on the same host.
    """

    number: int
    text: str
    state: str
    seconds: float
    before: tuple[str, ...] = ()
    waits_for: int | None = None


@dataclass(frozen=True)
class PendingMessage:
    """A send or receive that a rank waits for.

    Attributes:
        kind: ``"send"`` or ``"recv"``.
        peer: the other rank; None: any.
        text: as in error messages.
        seconds: since it began.
    """

    kind: str
    peer: int | None
    tag: int
    text: str
    seconds: float


@dataclass(frozen=True)
class PastMessage:
    """A send or receive that a rank has begun, and that has not failed.

    Attributes:
        kind, peer, tag, text: as of :class:`PendingMessage`.
        began, ended: how many seconds ago; ``ended`` is None if it has not.
    """

    kind: str
    peer: int | None
    tag: int
    text: str
    began: float
    ended: float | None


@dataclass(frozen=True)
class RankFacts:
    """All that is known of one rank.

    Attributes:
        rank: in the group's numbering.
        host: as the group calls it; empty where there is only one.
        global_rank: its number in the whole job, if that is another; -1: it is not.
        process: tells the rank's program apart from all others, in whatever group: see :func:`identity`.
        presence: ``"silent"``: its host does not answer.
        end_reason: how it died.
        doing: what it does or did last, in words.
        call, message: what it is in, or was in last.
        failed_message: the text of its last message, if that failed.
        messages: its last ones, oldest first.
        program: None: it did not say.
        stack: the lines of its program, read from outside because it did not say.
        other_stacks: the innermost lines of its other threads, read so, too.
        last_seen: where its program was when it was last looked at, and how long ago.
        system: what the system tells of it.
    """

    rank: int
    host: str = ""
    global_rank: int = -1
    process: str = ""
    presence: Presence = "present"
    end_reason: str = ""
    doing: str = ""
    call: Call | None = None
    message: PendingMessage | None = None
    failed_message: str = ""
    messages: tuple[PastMessage, ...] = ()
    program: Program | None = None
    stack: tuple[UserFrame, ...] = ()
    other_stacks: tuple[UserFrame, ...] = ()
    last_seen: str = ""
    system: Process | None = None

    @property
    def running(self) -> Call | None:
        """Return the collective that it is in."""
        return self.call if self.call is not None and self.call.state == "running" else None

    @property
    def began(self) -> int:
        """Return the number of the last collective that it has begun."""
        return self.call.number if self.call is not None else 0

    @property
    def frames(self) -> tuple[UserFrame, ...]:
        """Return the lines of its program, innermost first, as far as they are known."""
        return self.program.frames if self.program is not None and self.program.frames else self.stack

    @property
    def site(self) -> str:
        """Return where its program is, for a diagnosis."""
        if self.frames:
            return f"at {self.frames[0]}"
        if self.program is not None:
            return self.program.location.removeprefix("is ")
        return f"last seen {self.last_seen}" if self.last_seen else "at an unknown line"

    @property
    def whereabouts(self) -> str:
        """Return the same with a verb: ``is at …``, ``has ended``."""
        if not self.frames and self.program is not None:
            return self.program.location
        return f"is {self.site}"

    def __str__(self) -> str:
        return self.name + (f" on host {self.host}" if self.host else "")

    @property
    def name(self) -> str:
        """Return its number, and its global number if that is another."""
        return f"rank {self.rank}" + (f" (global rank {self.global_rank})" if self.global_rank >= 0 else "")


def identity(space: int, pid: int, thread: int) -> str:
    """Return what tells a program on this host apart: its PID namespace, process and thread."""
    return f"{space:x}.{pid}.{thread}"


def to_json(value: object) -> str:
    """Write a dataclass of plain values, such as facts, for :func:`from_json`."""
    return json.dumps(asdict(value), ensure_ascii=False)  # type: ignore[call-overload]


_Facts = TypeVar("_Facts")


def from_json(kind: type[_Facts], text: str | bytes) -> _Facts:
    """Read a dataclass that :func:`to_json` has written.

    Raises:
        ValueError, TypeError: it is something else.
    """
    return _read(kind, json.loads(text))  # type: ignore[no-any-return]


def read_facts(value: object) -> RankFacts:
    """Return the facts that came within JSON; errors as of :func:`from_json`."""
    return _read(RankFacts, value)  # type: ignore[no-any-return]


_hints = lru_cache(get_type_hints)


def _read(kind: Any, value: Any) -> Any:
    """Return a value of JSON as one of a type that facts have."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return (
            None
            if value is None
            else _read(next(each for each in arguments if each is not type(None)), value)
        )
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{value!r:.100} is not one of {arguments}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{value!r:.100} is no list")
        types = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_read(each, one) for each, one in zip(types, value, strict=True))
    if hasattr(kind, "__dataclass_fields__"):
        if not isinstance(value, dict):
            raise TypeError(f"{value!r:.100} is no {kind.__name__}")
        hints, known = _hints(kind), {each.name for each in fields(kind)}
        return kind(**{name: _read(hints[name], one) for name, one in value.items() if name in known})
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r:.100} is no {kind.__name__}")
    return value
