"""The parts of a flight record: an operation or a message, a rank, a host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["running", "done", "failed"]
Presence = Literal["absent", "present", "left", "unknown"]


@dataclass(frozen=True)
class FlightEntry:
    """One collective, or one message, of one rank. Ranks are in the group's numbering.

    Attributes:
        number: of a collective, its sequence number in the group, the same on all ranks (1 is the barrier in
            which the group met, if it is on one host); of a message, its number among this rank's, from 1.
        kind: ``"all_reduce"``, …, ``"send"`` or ``"recv"``.
        op: how a reduction reduces, else None.
        dtype: as ``"float32"``; None where there is none.
        root: of a collective that has one.
        count: elements, where all ranks come with the same number; else None.
        nbytes: what the rank gave or got, whichever is more.
        peer: of a message, the other rank; None for a receive from any rank whose message has not come.
        tag: of a message.
        blocking: the call that began it waits for it (always true of collectives: whether the program
            does is not recorded).
        started, ended: by ``time.monotonic()``; ``ended`` is None while it runs.
        state: ``"running"``, ``"done"`` or ``"failed"``.
        waited: seconds. Of a collective, what was spent waiting for other ranks (waits that end within some
            microseconds are not counted); of a receive, until its message came.
        waited_for: the rank that a collective waited for longest, or None.
    """

    number: int
    kind: str
    op: str | None
    dtype: str | None
    root: int | None
    count: int | None
    nbytes: int
    peer: int | None
    tag: int | None
    blocking: bool
    started: float
    ended: float | None
    state: State
    waited: float
    waited_for: int | None

    def __str__(self) -> str:
        """Return it as in error messages: ``all_reduce(SUM, float32, 1024 elements)``."""
        words = [self.op, self.dtype]
        if self.kind in ("send", "recv") and self.tag is not None:
            way = "to" if self.kind == "send" else "from"
            words += [f"{way} {'any rank' if self.peer is None else f'rank {self.peer}'}"]
            words += [f"{self.nbytes} bytes", f"tag {self.tag}" if self.tag else None]
        elif self.count is not None and self.dtype is not None:
            words.append(f"{self.count} element{'' if self.count == 1 else 's'}")
        elif self.dtype is not None:
            words.append("uneven sizes")
        if self.root is not None:
            words.append(f"root {self.root}")
        return f"{self.kind}({', '.join(word for word in words if word)})"


SpanKind = Literal["forward", "backward", "bucket", "wait"]
SPAN_KINDS: tuple[SpanKind, ...] = ("forward", "backward", "bucket", "wait")
"""In an arena, their places here."""


@dataclass(frozen=True)
class Span:
    """A part of a training step of one rank, as DistributedDataParallel records it.

    Attributes:
        kind: ``"forward"``; ``"backward"``, until all gradients are averaged; ``"bucket"``, from when the
            gradients of a bucket are ready until they are averaged; ``"wait"``, for averages, when backward
            has nothing else to do.
        step: the number of the step, from 1.
        index: of a bucket, its number in the step's order; else None.
        nbytes: of its gradients, or 0.
        started, ended: by ``time.monotonic()``.
    """

    kind: SpanKind
    step: int
    index: int | None
    nbytes: int
    started: float
    ended: float


SpanTimes = tuple[SpanKind, int, int, int, int]
"""A span to be recorded: kind, beginning and end by ``time.perf_counter_ns()``, index or -1, bytes."""


@dataclass(frozen=True)
class Tally:
    """What operations of one kind and size class took one rank, of those that have ended well.

    Attributes:
        kind: as of an entry. Messages to and from other hosts count apart from those within the host.
        most_bytes: the class: operations that moved at most so many bytes, and more than the class below;
            None for the class of the largest.
        calls, nbytes: how many, and what they moved.
        seconds: from the beginning to the end of each, in all.
        waited: seconds of these.
        remote: they are messages to or from other hosts.
    """

    kind: str
    most_bytes: int | None
    calls: int
    nbytes: int
    seconds: float
    waited: float
    remote: bool = False


@dataclass(frozen=True)
class ExecutedCalls:
    """The calls by RPC of one function that one worker has made and this one has executed.

    Attributes:
        caller: its rank; -1 where callers and functions beyond the first 63 are counted together.
        function: its name.
        calls: that have returned.
        seconds: that they took here, in all.
    """

    caller: int
    function: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class RankRecord:
    """The last entries of one rank, oldest first, and its totals.

    Attributes:
        rank: in the group's numbering.
        pid: its process, 0 if it has not come.
        presence: ``"present"`` (which it stays when it dies), ``"left"`` the group, or ``"absent"``;
            ``"unknown"``, and nothing else is known, where its host did not answer.
        operations: its last collectives, at most 256.
        messages: its last sends and receives, at most 256.
        operations_begun, messages_begun: how many there were in all.
        operation_bytes, message_bytes: of all that have ended.
        operations_waited, messages_waited: seconds, in collectives and in blocking receives.
        waited_for: by rank, seconds of both. Of several ranks waited for at the same point, the last to come
            has all the time. For ranks on other hosts it is not recorded, and 0.
        waiting_for: the rank that it waits for in a collective at this moment, or None; None also
            while it waits for other hosts.
        waiting_since: when that wait began, by ``time.monotonic()``, or None.
        tallies: of all that has ended well, by kind and size; those with no operation are left out, and of
            messages those of which more than 256 were under way at once.
        spans: the last parts of training steps, at most 256.
        calls: of an RPC worker, what it has executed until some 50 ms ago.
        queued: operations that it has called and that are not begun.
        calls_in_flight: of an RPC worker, calls whose answer it waited for some 50 ms ago.
        references_owned, references_used: of the same moment, remote references whose value it had, and those
            that it had to values of others.
        calls_made: of an RPC worker, until then, those of its own references included.
        calls_sent_bytes: what it had sent to other workers, in calls and answers.
    """

    rank: int
    pid: int
    presence: Presence
    operations: tuple[FlightEntry, ...]
    messages: tuple[FlightEntry, ...]
    operations_begun: int
    messages_begun: int
    operation_bytes: int
    message_bytes: int
    operations_waited: float
    messages_waited: float
    waited_for: tuple[float, ...]
    waiting_for: int | None
    waiting_since: float | None
    tallies: tuple[Tally, ...] = ()
    spans: tuple[Span, ...] = ()
    calls: tuple[ExecutedCalls, ...] = ()
    queued: int = 0
    calls_in_flight: int = 0
    references_owned: int = 0
    references_used: int = 0
    calls_made: int = 0
    calls_sent_bytes: int = 0

    @property
    def last_operation(self) -> FlightEntry | None:
        """Return the collective that it is in, or was in last."""
        return self.operations[-1] if self.operations else None

    @property
    def is_rpc_worker(self) -> bool:
        """Return whether it has made or executed calls, or has references."""
        return bool(self.calls or self.calls_made or self.references_owned)

    @property
    def running_message(self) -> FlightEntry | None:
        """Return the last send or receive that it blocks in, or None."""
        running = [entry for entry in self.messages if entry.state == "running" and entry.blocking]
        return running[-1] if running else None


@dataclass(frozen=True)
class HostRecord:
    """One host of a group that has several.

    Attributes:
        name: as error messages call it.
        ranks: the group's ranks on it.
        answered: whether it told what its ranks did.
        clock_offset: seconds that were added to its times, to have them by the clock of the host that asked.
        clock_error: by how much that may be wrong, at most.
    """

    name: str
    ranks: tuple[int, ...]
    answered: bool = True
    clock_offset: float = 0.0
    clock_error: float = 0.0
