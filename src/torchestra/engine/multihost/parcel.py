"""A message to or from another host that is under way, and what is known of one before it is received."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchestra.engine.channels import Transfer

__all__ = ["Offer", "Parcel"]


class Offer(NamedTuple):
    """What another rank has for this one.

    Attributes:
        source: the rank.
        number: by which it knows the message.
        tag, kind: as they were sent.
        length: in bytes.
        enclosed: the message itself, if it is small.
    """

    source: int
    number: int
    tag: int
    kind: int
    length: int
    enclosed: bytes


class Parcel:
    """A send or a receive; to whoever waits for it in the background it is what a Transfer is.

    Args:
        what: it is, and whose.
        number: by which this rank knows it.
        tensor: sent or filled.
        peer: the other rank; None for any.
        tag: of the message.
        seconds: how long it may wait.
        done: called once at its end, on whichever thread ends it. It must not raise.

    Attributes:
        finished: it has ended, well or not.
        error: why it failed, or None.
        source: of a receive that has ended well, the rank that sent.
        here: the part of a receive from any source that waits in the mailbox.
    """

    def __init__(
        self,
        what: str,
        number: int,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        seconds: float,
        done: Callable[[Transfer], None] | None,
    ) -> None:
        self.receives = what.endswith("recv")
        other = "any rank" if peer is None else f"rank {peer}"
        way = "from" if self.receives else "to"
        self._text = f"{what} of {tensor.nbytes} bytes {way} {other} (tag {tag})"
        self.number = number
        self.tensor = tensor
        self.peer = peer
        self.tag = tag
        self.seconds = seconds
        self.done: Any = done
        self.finished = False
        self.error: BaseException | None = None
        self.source = -1
        self.here: Transfer | None = None
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._lock = threading.Lock()

    @property
    def what(self) -> str:
        """What it is, without whose."""
        return self._text.rpartition(": ")[2]

    def __str__(self) -> str:
        return self._text

    def takes(self, offer: Offer) -> bool:
        """Whether a receive waits for this message, whatever its length and kind."""
        return offer.tag == self.tag and self.peer in (None, offer.source)

    def remaining(self) -> float:
        """For how many seconds it may still wait."""
        return self.seconds - (time.monotonic() - self._started)

    def wait(self, seconds: float) -> bool:
        """Wait for its end, at most so long; whether it has ended."""
        return self._ended.wait(seconds)

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """End it, and say so to whoever waits. Later calls are without effect."""
        with self._lock:
            if self.finished:
                return
            self.error = error
            self.source = source
            self.finished = True
        self._ended.set()
        if self.done is not None:
            try:
                self.done(self)
            except Exception:
                traceback.print_exc()
