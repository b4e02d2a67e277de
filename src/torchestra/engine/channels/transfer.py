"""A send or a receive on its way, who decides how long it waits, and what it can fail with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchestra.engine.channels import words as w

__all__ = ["Record", "Transfer", "Waiter"]


class Waiter(Protocol):
    """Decides how long a transfer may wait; the engine above provides it."""

    def check(self, doing: str, blocked: int | None, started: float) -> None:
        """Raise if waiting any longer is in vain.

        Args:
            doing: what waits, for messages.
            blocked: the rank waited for, None for any.
            started: ``time.monotonic()`` of when the waiting began.
        """

    def abort(self, reason: str) -> None:
        """Make the group unusable for all ranks: a message was left halfway."""


class Record:
    """Words of private memory by which the kernels know a transfer (words.py)."""

    __slots__ = ("address", "words")

    def __init__(self, words: npt.NDArray[np.int64]) -> None:
        self.words = words
        self.address: int = words.ctypes.data
        self.words[w.STAGE // 8] = w.FINISHED

    def word(self, offset: int) -> int:
        return int(self.words[offset // 8])


class Transfer:
    """A send or a receive that is, or was, under way.

    Attributes:
        finished: it has ended, one way or the other; the memory belongs to the caller again.
        error: why it failed, or None.
        source: of a receive that has ended well, the rank that sent.
    """

    __slots__ = (
        "address",
        "done",
        "ended",
        "error",
        "finished",
        "kind",
        "length",
        "peer",
        "record",
        "sending",
        "source",
        "started",
        "tag",
        "waiter",
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
        self.ended: threading.Event | None = None  # of a blocking call, whose caller looks after it
        self.started = time.monotonic()
        self.record: Record | None = None
        self.withdrawn: BaseException | None = None
        self.finished = False
        self.error: BaseException | None = None
        self.source = -1

    def describe(self) -> str:
        """What it is, for messages."""
        if self.sending:
            return f"send of {self.length} bytes to rank {self.peer} (tag {self.tag})"
        sender = "any rank" if self.peer < 0 else f"rank {self.peer}"
        return f"recv of {self.length} bytes from {sender} (tag {self.tag})"

    def check(self) -> None:
        """Let the waiter decide whether to wait on."""
        self.waiter.check(self.describe(), None if self.peer < 0 else self.peer, self.started)

    def finish(self, error: BaseException | None = None) -> None:
        """Tell whoever waits for it that it has ended."""
        if error is not None:
            self.error = error
        self.finished = True
        if self.ended is not None:
            self.ended.set()
        if self.done is not None:
            self.done(self)
