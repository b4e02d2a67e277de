"""How ranks on different hosts write to each other: numbered letters in the group's store.

A letter is a line of JSON and, after it, bytes. Each rank has a box; letters in it are numbered in the order
in which they were put there, and are read and removed in that order by one thread of the rank (the postman),
which is started when the rank first has to do with messages to or from other hosts::

    count/R      how many letters have been put into the box of rank R
    box/R/N      the N-th

What the letters say is the affair of messages.py.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torchestra.errors import DistError, StoreTimeoutError
from torchestra.store import Store

__all__ = ["Letter", "Postman"]


class Letter(NamedTuple):
    """What one rank writes to another.

    Attributes:
        words: what it says; ``"from"`` is the rank that wrote it.
        enclosed: bytes that go along.
    """

    words: dict[str, Any]
    enclosed: bytes = b""


class Postman:
    """The letters of one rank.

    Args:
        store: one that only the ranks of this group, and only for this purpose, use.
        rank: this one.
        name: of the thread.
        deliver: called with each letter, on the thread.
        look: called on the thread every so often, and after a letter; how many seconds until the next time
            (at most).
        failed: called if the store cannot be reached any more.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        name: str,
        deliver: Callable[[Letter], None],
        look: Callable[[], float],
        failed: Callable[[Exception], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._deliver, self._look, self._failed = deliver, look, failed
        self._lock = threading.Lock()
        self._closed = False
        # In the context of the rank that makes it, so that callbacks know which rank they are of.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._serve,), name=name, daemon=True)
        self._started = False

    def start(self) -> None:
        """Begin to read, if that has not begun."""
        with self._lock:
            if not (self._started or self._closed):
                self._started = True
                self._thread.start()

    def write(self, rank: int, letter: Letter) -> None:
        """Put a letter into the box of a rank.

        Raises:
            DistStoreError, DistNetworkError: the store cannot be reached.
        """
        number = self._store.add(f"count/{rank}", 1)
        text = json.dumps({**letter.words, "from": self._rank}).encode()
        self._store.set(f"box/{rank}/{number}", text + b"\n" + letter.enclosed)

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._started:
            with contextlib.suppress(DistError, OSError):
                self.write(self._rank, Letter({"what": "wake up"}))

    def _serve(self) -> None:
        number, pause = 1, 0.0
        while not self._closed:
            key = f"box/{self._rank}/{number}"
            try:
                self._store.wait([key], max(0.001, pause))
                raw = self._store.get(key)
                self._remove(key)
            except StoreTimeoutError:
                pause = self._look()
                continue
            except (DistError, OSError) as error:
                if not self._closed:
                    self._failed(error)
                return
            number += 1
            line, _, enclosed = raw.partition(b"\n")
            if not self._closed:
                self._deliver(Letter(json.loads(line), enclosed))
                pause = self._look()

    def _remove(self, key: str) -> None:
        with contextlib.suppress(NotImplementedError):
            self._store.delete_key(key)
