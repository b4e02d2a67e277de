"""Messages to or from other hosts that are under way, and those that no receive has asked for yet."""

from __future__ import annotations

import ctypes
import math
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.multihost.hierarchy import bytes_of
from torchestra.engine.multihost.message_recorder import RecordedMessage
from torchestra.engine.operations import DTYPE_NAMES
from torchestra.engine.p2p.transfer import Transfer
from torchestra.system.deadline import Deadline, RunningClock
from torchestra.transport.message import Message

EAGER_BYTES = 1 << 20  # of one message
_AHEAD_BYTES = 4 << 20  # of all messages to one rank
_LONGEST_INTERVAL_S = 2.0
"""Who looks after messages does so every second at least."""


class UnexpectedMessage(NamedTuple):
    """A message of another rank that no receive has asked for yet.

    Attributes:
        source: the rank.
        request_id: by which it knows the message; 0 if all of it is here and the sender need not be told.
        tag, dtype: as they were sent.
        length: in bytes.
        payload: the first bytes, which have come.
    """

    source: int
    request_id: int
    tag: int
    dtype: int
    length: int
    payload: bytes | torch.UntypedStorage

    def is_possible(self, small: int) -> bool:
        """Return whether a rank can have sent it: one of up to ``small`` bytes carries all of them."""
        room = self.length if self.length <= small else min(self.length, EAGER_BYTES)
        least = room if self.length <= small else 0
        is_known = self.request_id > 0 or self.length <= small
        return is_known and 0 <= self.dtype < len(DTYPE_NAMES) and least <= len(self.payload) <= room

    def misfit(self, tensor: torch.Tensor) -> str:
        """Return why a tensor cannot take it, for an error; "" if it can."""
        expected = DTYPE_CODE[tensor.dtype], tensor.nbytes
        if (self.dtype, self.length) == expected:
            return ""
        return (
            f"rank {self.source} sent {self.length} bytes of {DTYPE_NAMES[self.dtype]} with tag {self.tag},"
            f" but recv expected {expected[1]} bytes of {DTYPE_NAMES[expected[0]]}. The message was thrown"
            " away; size and dtype must be the same on both sides"
        )


class P2PRequest:
    """A send or a receive; background waits treat it like a Transfer.

    Args:
        what: the kind of message, and whose it is.
        request_id: by which this rank knows it.
        tensor: sent or filled.
        peer: the other rank; None for any.
        done: called once at its end, on the thread that ends it. It must not raise.

    Attributes:
        finished: it has ended, well or not.
        error: why it failed, or None.
        source: of a receive that has ended well, the rank that sent.
        entry: in the flight record, once it has begun.
        here: the part of a receive from any source that waits in the mailbox.
        partner: the other rank, once that is known to take part: the message is on its way.
        offered: of a receive on its way, the number by which the sender knows the message.
        eager: how many bytes of a message that is sent go ahead of the others.
        broken: the way to the other rank has failed, when and why.
        gone_since: since when the other rank is known to be gone, while its data may be on its way.
    """

    def __init__(
        self,
        what: str,
        request_id: int,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        timeout_s: float,
        done: Callable[[Transfer], None] | None,
    ) -> None:
        self.receives = what.endswith("recv")
        self._whose = what
        self.request_id = request_id
        self.tensor = tensor
        self.peer = peer
        self.tag = tag
        self.timeout_s = timeout_s
        self.done: Any = done
        self.finished = False
        self.error: BaseException | None = None
        self.source = -1
        self.entry: RecordedMessage | None = None
        self.here: Transfer | None = None
        self.partner: int | None = None
        self.eager = 0
        self.broken: tuple[float, str] | None = None
        self.gone_since: RunningClock | None = None
        self.offered = 0
        self.deadline = Deadline(timeout_s, _LONGEST_INTERVAL_S)
        self._latch = threading.Lock()
        self._latch.acquire()
        self._lock = threading.Lock()

    @property
    def description(self) -> str:
        """Return a description of the message, without its rank."""
        return str(self).rpartition(": ")[2]

    def __str__(self) -> str:
        other = "any rank" if self.peer is None else f"rank {self.peer}"
        way = "from" if self.receives else "to"
        return f"{self._whose} of {self.tensor.nbytes} bytes {way} {other} (tag {self.tag})"

    def note_broken_connection(self, why: str) -> None:
        """Note that the way to the other rank has failed."""
        self.broken = self.broken or (self.deadline.elapsed(), why)

    @property
    def rest(self) -> torch.Tensor:
        """Return the bytes beyond those that go ahead."""
        return bytes_of(self.tensor)[self.eager :]

    def take_rest(self, message: Message) -> str:
        """Put the rest of a message into its place; return why it cannot be, or ""."""
        rest = self.rest
        came = sum(storage.nbytes() for storage in message.storages)
        if message.lost is not None or came != rest.numel():
            return str(message.lost or f"{came} bytes came, not {rest.numel()}")
        ctypes.memmove(rest.data_ptr(), message.storages[0].data_ptr(), came)
        return ""

    def matches(self, message: UnexpectedMessage) -> bool:
        """Return whether a receive waits for this message, whatever its length and kind."""
        return message.tag == self.tag and self.peer in (None, message.source)

    def is_awaited_here(self, small: int) -> bool:
        """Return whether it is a short message from a known rank that the calling thread waits for itself.

        Receives in the background are not: they go on when the thread that waits for them is interrupted.
        """
        is_known = self.receives and self.peer is not None and self.partner is None
        return is_known and self.done is None and not self.finished and self.tensor.nbytes <= small

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, at most ``timeout_s`` seconds; return whether it has ended."""
        if self._latch.acquire(timeout=timeout_s):
            self._latch.release()
        return self.finished

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """End it, and wake the waiting threads. Later calls have no effect."""
        with self._lock:
            if self.finished:
                return
            self.error = error
            self.source = source
            if self.entry is not None:  # first, so that a thread that has waited finds the record right
                self.entry.end(well=error is None, source=source)
            self.finished = True
        self._latch.release()
        if self.done is not None:
            try:
                self.done(self)
            except Exception:
                traceback.print_exc()


class EagerCredits:
    """Bound how much of large messages is sent before the receiver asks for it."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[int, int]] = {}  # by message: to which rank, and how many bytes

    def take(self, request_id: int, rank: int, length: int) -> int:
        """Return how many bytes of a message to a rank may go ahead; they count until :meth:`release`."""
        ahead = sum(part for receiver, part in self._parts.values() if receiver == rank)
        part = max(0, min(length, EAGER_BYTES, _AHEAD_BYTES - ahead))
        if part:
            self._parts[request_id] = rank, part
        return part

    def release(self, request_id: int) -> None:
        """Release the credits of a message that is complete."""
        self._parts.pop(request_id, None)


class SenderWaiter:
    """Wait in the mailbox for a message that may also come from another host (see Waiter)."""

    timeout_s = math.inf

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def check(self, doing: str, blocked: int | None, deadline: Deadline, suspect: int | None) -> int | None:
        if self._context.is_aborted:
            raise self._context.aborted()
        return None

    def abort(self, reason: str) -> None:
        self._context.abort(reason)
