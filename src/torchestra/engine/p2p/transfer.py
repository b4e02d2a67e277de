"""A send or a receive on its way, who decides how long it waits, and what the kernels know of it."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchestra.system.deadline import Deadline

RankName = Callable[[int], str]
"""What messages call a rank of the mailbox: its number in the group may be another."""


class ReceiveCancelled(Exception):
    """In place of an error, of a receive that was taken back."""


class Waiter(Protocol):
    """Decides how long a transfer may wait; the engine above provides it.

    Attributes:
        timeout_s: after which :meth:`check` raises.
    """

    timeout_s: float

    def check(self, doing: str, blocked: int | None, deadline: Deadline, suspect: int | None) -> int | None:
        """Raise if waiting any longer is in vain; otherwise what to hand in the next time as ``suspect``.

        Args:
            doing: what waits, for messages.
            blocked: the rank waited for, None for any.
            deadline: of the transfer.
            suspect: what the last call for the same transfer returned, None at first.
        """

    def abort(self, reason: str) -> None:
        """Make the group unusable for all ranks: a message was left halfway."""


class Record:
    """Words of private memory by which the kernels know a transfer (words.py)."""

    __slots__ = ("address", "words")

    def __init__(self, words: npt.NDArray[np.int64]) -> None:
        self.words = words
        self.address: int = words.ctypes.data

    def load_word(self, offset: int) -> int:
        return int(self.words[offset // 8])

    def store_word(self, offset: int, value: int) -> None:
        self.words[offset // 8] = value


class Transfer:
    """A send or a receive that is, or was, under way.

    Attributes:
        finished: it has ended, one way or the other; the memory belongs to the caller again.
        error: why it failed, or None.
        source: of a receive that has ended well, the rank that sent.
    """

    __slots__ = (
        "_latch",
        "address",
        "deadline",
        "done",
        "error",
        "finished",
        "kind",
        "length",
        "peer",
        "record",
        "recorded",
        "retracting",
        "sending",
        "source",
        "suspect",
        "tag",
        "waiter",
        "watched",
        "withdrawn",
    )

    def __init__(
        self,
        sending: bool,
        address: int,
        length: int,
        kind: int,
        peer: int,
        tag: int,
        waiter: Waiter,
        done: Callable[[Transfer], None] | None = None,
    ) -> None:
        self.sending = sending
        self.address = address
        self.length = length
        self.kind = kind
        self.peer = peer  # -1: any source
        self.tag = tag
        self.waiter = waiter
        self.done = done
        self.deadline = Deadline(waiter.timeout_s)
        self.suspect: int | None = None  # the waiter's
        self.record: Record | None = None
        self.recorded = True  # in the rank's flight record
        self.watched = False  # somebody waits for it, and lets the waiter check
        self.withdrawn: BaseException | None = None  # what made its caller give it up
        self.retracting = False  # its caller wants it back, if nothing has come for it
        self.finished = False
        self.error: BaseException | None = None
        self.source = -1
        self._latch = threading.Lock()
        self._latch.acquire()

    def describe(self, rank_name: RankName) -> str:
        """Return what it is, for messages."""
        peer = "any rank" if self.peer < 0 else rank_name(self.peer)
        what = f"send of {self.length} bytes to" if self.sending else f"recv of {self.length} bytes from"
        return f"{what} {peer} (tag {self.tag})"

    def check(self, rank_name: RankName) -> None:
        """Let the waiter decide whether to wait on."""
        blocked = None if self.peer < 0 else self.peer
        self.suspect = self.waiter.check(self.describe(rank_name), blocked, self.deadline, self.suspect)

    def finish(self, error: BaseException | None = None) -> None:
        """Wake whoever waits for it. Once is enough, twice does no harm."""
        if self.finished:
            return
        if error is not None:
            self.error = error
        self.finished = True
        self._latch.release()

    def sleep(self, seconds: float) -> None:
        """Wait until it is finished, or for so long."""
        if self._latch.acquire(timeout=seconds):
            self._latch.release()

    def tell(self) -> None:
        """Call ``done``, the first time. What it raises is printed: it concerns nobody here."""
        done, self.done = self.done, None
        if done is not None:
            try:
                done(self)
            except Exception:
                traceback.print_exc()
