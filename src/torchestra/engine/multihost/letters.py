"""What ranks on different hosts write to each other, and the box in the group's store that they come by.

A letter has a head of fixed length and, after it, bytes. Each rank has a box in the store, which one thread
of the rank (the postman) reads; it is started when the rank first has to do with messages to or from other
hosts. A box is a queue of the store, which takes one request to write and one to read; in a store without
queues letters are numbered in the order in which they were put there, and are read and removed in that
order::

    box/R        the letters for rank R
    count/R      how many have been put into the box, where there are no queues
    box/R/N      the N-th of these

Whoever reaches the store can put something into a box; torch's own store, which torchrun serves, asks nobody.
So what is in a box bears a proof (HMAC-SHA256) that it was written by a rank of this group, for this box. The
key is drawn when the group is made, and told over the bridges, never by the store. What has no proof, or
cannot be a letter, is dropped.

Most letters do not come by the box, but by a line (correspondence.py), which has its own proof of who is at
its other end. What they say is the affair of point_to_point.py.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import hmac
import logging
import os
import struct
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from torchestra.errors import DistError, StoreTimeoutError
from torchestra.store import Store
from torchestra.store.authenticated_values import UnauthenticatedValueError
from torchestra.store.rate_limited import RateLimitedWarnings

__all__ = [
    "ENCLOSED_BYTES",
    "KEY_BYTES",
    "LONGEST_LETTER",
    "Envelope",
    "Letter",
    "Postman",
    "What",
    "pack",
    "unpack",
    "warnings",
]

ENCLOSED_BYTES = 128 << 10
"""How many bytes go along with a letter at most."""

_HEAD = struct.Struct("<BxxxiQQQqqiII")
LONGEST_LETTER = _HEAD.size + ENCLOSED_BYTES
KEY_BYTES = 32
"""How long the key of a group is."""

_PROOF_BYTES = hashlib.sha256().digest_size
warnings = RateLimitedWarnings(logging.getLogger(__name__))


class What(IntEnum):
    """What a letter says.

    Of a message: that there is one (``offer``), a part of it (``part``), that it shall come (``ask``), is
    thrown away (``refuse``), has come (``got``), could not come (``lost``), and that its sender has taken it
    back (``withdraw``). Between two ranks: that there shall be a line (``line``), nothing but what every
    letter confirms (``confirm``), and that no more letters will come (``bye``).
    """

    offer = 1
    part = 2
    ask = 3
    refuse = 4
    got = 5
    lost = 6
    withdraw = 7
    line = 8
    confirm = 9
    bye = 10


class Letter(NamedTuple):
    """What one rank writes to another.

    Attributes:
        what: it says.
        message: of which one; by the number that its sender knows it by.
        tag, kind, length: of a message that is offered; the length in bytes.
        part: how many of these come in a letter of their own.
        enclosed: bytes that go along.
    """

    what: int
    message: int = 0
    tag: int = 0
    kind: int = 0
    length: int = 0
    part: int = 0
    enclosed: bytes = b""


class Envelope(NamedTuple):
    """What is on a letter.

    Attributes:
        sender: the rank that wrote it.
        number: of the letter, among those from this sender to this receiver; counted from 1.
        confirmed: how many letters the sender has got from the receiver, with none missing before.
    """

    sender: int
    number: int
    confirmed: int


def pack(envelope: Envelope, letter: Letter) -> bytearray:
    """A letter as bytes."""
    size = len(letter.enclosed)
    raw = bytearray(_HEAD.size + size)
    what, message, tag, kind, length, part, _ = letter
    _HEAD.pack_into(raw, 0, what, *envelope, message, tag, length, kind, part, size)
    if size:
        raw[_HEAD.size :] = letter.enclosed
    return raw


def unpack(raw: bytes | memoryview) -> tuple[Envelope, Letter]:
    """What :func:`pack` has packed; there may be more bytes after it.

    Raises:
        ValueError: it is something else.
    """
    if len(raw) < _HEAD.size:
        raise ValueError(f"{len(raw)} bytes are no letter")
    what, sender, number, confirmed, message, tag, length, kind, part, size = _HEAD.unpack_from(raw)
    if size > min(ENCLOSED_BYTES, len(raw) - _HEAD.size):
        raise ValueError(f"a letter of {len(raw)} bytes cannot enclose {size}")
    enclosed = bytes(raw[_HEAD.size : _HEAD.size + size])
    return Envelope(sender, number, confirmed), Letter(What(what), message, tag, kind, length, part, enclosed)


class Postman:
    """The letters that come to one rank by its box.

    Args:
        store: one that only the ranks of this group, and only for this purpose, use.
        rank: this one.
        key: of the group, :data:`KEY_BYTES` that only its ranks know.
        name: of the thread.
        take: called with each letter, on the thread.
        look: called on the thread every so often, and after a letter; how many seconds until the next time
            (at most).
        failed: called if the store cannot be reached any more.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        key: bytes,
        name: str,
        take: Callable[[bytes], None],
        look: Callable[[], float],
        failed: Callable[[Exception], None],
    ) -> None:
        self._store = store
        self._reading = store.clone()  # has a time-out of its own
        self._queues: bool | None = None
        self._rank = rank
        self._key = key
        self._take, self._look, self._failed = take, look, failed
        self._lock = threading.Lock()
        self._marks: dict[bytes, threading.Event] = {}
        self._closed = False
        # In the context of the rank that makes it, so that callbacks know which rank they are of.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._serve,), name=name, daemon=True)
        self._started = False

    def start(self) -> None:
        """Begin to read, if that has not begun."""
        if self._started:
            return
        with self._lock:
            if not (self._started or self._closed):
                self._started = True
                self._thread.start()

    def put(self, rank: int, raw: bytes | bytearray) -> None:
        """Put a letter into the box of a rank.

        Raises:
            DistStoreError, DistNetworkError: the store cannot be reached.
        """
        letter = self._proof(rank, raw) + raw
        if self._has_queues():
            self._store.queue_push(f"box/{rank}", letter)
        else:
            number = self._store.add(f"count/{rank}", 1)
            self._store.set(f"box/{rank}/{number}", letter)

    def _proof(self, rank: int, raw: bytes | bytearray) -> bytes:
        return hmac.new(self._key, b"letter to %d " % rank + raw, hashlib.sha256).digest()

    def _opened(self, letter: bytes) -> bytes | None:
        """What is in the box, without its proof; None if that is not right."""
        proof, raw = letter[:_PROOF_BYTES], letter[_PROOF_BYTES:]
        if hmac.compare_digest(proof, self._proof(self._rank, raw)):
            return raw
        warnings.warn(
            "rank %d dropped %d bytes in the store that were put there for it by nobody of its group",
            self._rank,
            len(letter),
        )
        return None

    def mark(self) -> threading.Event:
        """An event that is set when all letters that are in this rank's box by now have been read.

        Raises:
            DistStoreError, DistNetworkError: the store cannot be reached.
        """
        sign, mark = b"mark " + os.urandom(8), threading.Event()
        self._marks[sign] = mark
        self.put(self._rank, sign)
        return mark

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._started:
            with contextlib.suppress(DistError, OSError):
                self.put(self._rank, _WAKE_UP)

    def _serve(self) -> None:
        number, pause = 1, 0.0
        while not self._closed:
            try:
                raw = self._next(number, max(0.001, pause))
            except StoreTimeoutError:
                pause = self._look()
                continue
            except (DistError, OSError) as error:
                if not self._closed:
                    self._failed(error)
                return
            number += 1
            if raw is None:
                continue
            if (mark := self._marks.pop(raw, None)) is not None:
                mark.set()
            elif raw != _WAKE_UP:
                self._take(raw)
                pause = self._look()

    def _next(self, number: int, seconds: float) -> bytes | None:
        """The next letter, which has this number; None if it is to be dropped.

        Raises:
            StoreTimeoutError: none came in time.
        """
        box = f"box/{self._rank}"
        if self._has_queues():
            self._reading.set_timeout(seconds)
            return self._opened(self._reading.queue_pop(box))
        key = f"{box}/{number}"
        self._reading.wait([key], seconds)
        try:
            letter = self._reading.get(key)
        except UnauthenticatedValueError:
            letter = b""
        with contextlib.suppress(NotImplementedError):
            self._reading.delete_key(key)
        return self._opened(letter)

    def _has_queues(self) -> bool:
        if self._queues is None:
            try:
                self._queues = self._store.queue_len(f"box/{self._rank}") >= 0
            except NotImplementedError:
                self._queues = False
        return self._queues


_WAKE_UP = b"wake up"
