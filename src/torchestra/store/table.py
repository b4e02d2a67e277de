"""The contents of a store, and the pending waits for them.

A :class:`Table` holds the values, the queues and the pending waits of a store. It knows no threads, sockets
or files; its owner (HashStore under a lock, the TCP server in its one thread, FileStore while it holds the
file) never calls it concurrently.

A pending wait is indexed by each key it still misses, so a ``set`` touches only the waits it concerns:
64 ranks that wait for different keys do not wake each other.

Invariants: a :class:`PendingWait` is in the index under exactly its ``missing`` keys; ``ready`` is called
once, when none is missing, from inside the operation that set the last one, and never after
:meth:`Table.cancel`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torchestra.store.base import INTERNAL_PREFIX, parse_number


class PendingWait:
    """A wait for several keys, not all of which exist yet."""

    __slots__ = ("keys", "missing", "ready")

    def __init__(self, keys: Sequence[str], ready: Callable[[], object]) -> None:
        self.keys = keys
        self.missing: set[str] = set()
        self.ready = ready


class PendingPop:
    """A wait for the next value of a queue; ``take`` is called with it, and tells whether it accepted it."""

    __slots__ = ("key", "take")

    def __init__(self, key: str, take: Callable[[bytes], bool]) -> None:
        self.key = key
        self.take = take


class Table:
    """Values and queues by key, with the semantics of torch.distributed's stores."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._waits: dict[str, dict[PendingWait, None]] = {}
        self._pops: dict[str, deque[PendingPop]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._values or key in self._queues

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return those of ``keys`` that are neither a value nor a queue with something in it."""
        return [key for key in keys if key not in self]

    def missing_values(self, keys: Sequence[str]) -> list[str]:
        """Return those of ``keys`` that hold no value."""
        return [key for key in keys if key not in self._values]

    def listed(self) -> list[str]:
        """Return the keys with a value, without internal ones."""
        return [key for key in self._values if not key.startswith(INTERNAL_PREFIX)]

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._arrived(key)

    def sum(self, key: str, amount: int) -> int:
        """Return the number under ``key``, 0 if there is none, plus ``amount``."""
        old = self._values.get(key)
        return (0 if old is None else parse_number(key, old)) + amount

    def add(self, key: str, amount: int) -> int:
        total = self.sum(key, amount)
        self.set(key, str(total).encode())
        return total

    def append(self, key: str, tail: bytes) -> None:
        self.set(key, self._values.get(key, b"") + tail)

    def compared(self, key: str, expected: bytes) -> bool:
        """Return whether a compare_set that expects ``expected`` succeeds."""
        return self._values.get(key, b"") == expected

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        if self.compared(key, expected):
            self.set(key, desired)
            return desired
        return self._values.get(key, expected)

    def delete(self, key: str) -> bool:
        held_value = self._values.pop(key, None) is not None
        held_queue = self._queues.pop(key, None) is not None
        return held_value or held_queue

    def push(self, key: str, value: bytes, *, front: bool = False) -> None:
        """Give ``value`` to the pop that has waited longest, or put it in the queue.

        ``front`` puts it before the others, for a value that was taken but could not be delivered.
        """
        while pops := self._pops.get(key):
            pop = pops.popleft()
            if not pops:
                del self._pops[key]
            if pop.take(value):
                return
        queue = self._queues.setdefault(key, deque())
        if front:
            queue.appendleft(value)
        else:
            queue.append(value)
        self._arrived(key)

    def pop(self, key: str) -> bytes | None:
        queue = self._queues.get(key)
        if queue is None:
            return None
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        return value

    def first(self, key: str) -> bytes | None:
        """Return the value that :meth:`pop` would return."""
        queue = self._queues.get(key)
        return None if queue is None else queue[0]

    def queue_len(self, key: str) -> int:
        return len(self._queues.get(key, ()))

    def dump(self) -> tuple[Mapping[str, bytes], Mapping[str, Sequence[bytes]]]:
        """Return the values and the queues, by key; views, which change with the table."""
        return self._values, self._queues

    def load(self, values: Mapping[str, bytes], queues: Mapping[str, Sequence[bytes]]) -> None:
        """Hold these values and queues and no others. There must be no pending wait."""
        assert not self._waits
        assert not self._pops
        self._values = dict(values)
        self._queues = {key: deque(queue) for key, queue in queues.items()}

    def add_wait(self, keys: Sequence[str], ready: Callable[[], object], *, values_only: bool) -> PendingWait:
        """Have ``ready`` called when all ``keys`` exist; at least one must be missing now.

        Args:
            keys: the keys to wait for.
            ready: called from inside the operation that sets the last key; must not raise.
            values_only: a queue under the key does not count (for ``get``).
        """
        waiting = _PendingGet(keys, ready) if values_only else PendingWait(keys, ready)
        self._index(waiting)
        return waiting

    def add_pop(self, key: str, take: Callable[[bytes], bool]) -> PendingPop:
        """Have ``take`` called with the next value pushed to the queue ``key``, which must be empty now.

        ``take`` returns whether it accepted the value; if not, because the waiting client has gone, the next
        wait gets the value. Either way this wait is over.
        """
        pop = PendingPop(key, take)
        self._pops.setdefault(key, deque()).append(pop)
        return pop

    def cancel(self, wait: PendingWait | PendingPop) -> None:
        """Forget a pending wait. One that is already over is left alone."""
        if isinstance(wait, PendingPop):
            pops = self._pops.get(wait.key)
            if pops and wait in pops:
                pops.remove(wait)
                if not pops:
                    del self._pops[wait.key]
            return
        for key in wait.missing:
            waits = self._waits[key]
            del waits[wait]
            if not waits:
                del self._waits[key]
        wait.missing = set()

    def _still_missing(self, waiting: PendingWait) -> list[str]:
        if isinstance(waiting, _PendingGet):
            return self.missing_values(waiting.keys)
        return self.missing(waiting.keys)

    def _index(self, waiting: PendingWait) -> None:
        waiting.missing = set(self._still_missing(waiting))
        for key in waiting.missing:
            self._waits.setdefault(key, {})[waiting] = None

    def _arrived(self, key: str) -> None:
        for waiting in self._waits.pop(key, ()):
            waiting.missing.discard(key)
            if waiting.missing:
                continue
            # A key that was set before may have been deleted since, so all keys are checked again.
            self._index(waiting)
            if not waiting.missing:
                waiting.ready()


class _PendingGet(PendingWait):
    __slots__ = ()
