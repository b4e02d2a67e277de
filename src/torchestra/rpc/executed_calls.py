"""The calls that a worker has executed, in its flight record: who called which function, and how often.

They are counted in Python and written into the record from time to time, which costs a call some 0.5 µs.
"""

from __future__ import annotations

import threading

from torchestra.engine import layout as at
from torchestra.engine.kernels import shared_words
from torchestra.engine.membership.rank_context import RankContext
from torchestra.rpc.calls import name_of

_OTHERS = -1, "other functions"


class CallCounts:
    """The calls that a worker has executed and that have returned, by their caller and function.

    Args:
        context: of the worker, whose record the counts are written into.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._counts: dict[tuple[int, str], list[int]] = {}
        self._written = 0
        self._noted = 0
        self._lock = threading.Lock()

    def note(self, caller: int, function: object, nanoseconds: int) -> None:
        key = caller, getattr(function, "__qualname__", None) or name_of(function)
        with self._lock:
            counts = self._counts.get(key) or self._new(key)
            counts[0] += 1
            counts[1] += nanoseconds
            self._noted += 1

    def _new(self, key: tuple[int, str]) -> list[int]:
        """Return the counts of a function that was not called before; the last entry is for all others."""
        if len(self._counts) >= at.CALL_ENTRIES - 1:
            key = _OTHERS
        return self._counts.setdefault(key, [0, 0])

    def write(self) -> None:
        """Write the counts into the record, if there are new ones. Any thread may call this."""
        if self._noted == self._written:
            return
        arena = self._context.arena
        table = arena.record(self._context.rank) + at.CALLS_AT
        with self._lock:
            self._written = self._noted
            for index, ((caller, name), (count, nanoseconds)) in enumerate(self._counts.items()):
                entry = table + index * at.CALL_BYTES
                arena.store_word(entry + at.CALL_CALLER, caller)
                arena.store_word(entry + at.CALL_NANOSECONDS, nanoseconds)
                length = arena.set_text(entry + at.CALL_NAME, at.CALL_NAME_BYTES, name)
                arena.store_word(entry + at.CALL_NAME_LENGTH, length)
                # The last, and not 0: whoever reads it sees the rest.
                shared_words.store_ordered(arena.address + entry + at.CALL_COUNT, count)
