"""What one rank did: a list of events, written while its operations are recorded."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from torchestra.performance.schedule import AwaitFlag, Copy, Event, Fetch, Overhead, Reduce, SetFlag
from torchestra.performance.turns import wait_for

__all__ = ["RankLog", "ThreadObserver", "current_log", "set_current_log"]

_mine = threading.local()
_PAGE = 4096  # as fine as it is noted which memory was touched


class RankLog:
    """The events of one rank in one operation.

    Copies and reductions between two other events are added up: their order makes no difference in time.
    Memory of the rank's tensors that is touched for the first time comes from the cache that the tensors fit
    into; after that, and in buffers, it is in a near one.

    Args:
        unit: bytes of an element of what is reduced.
        tensors: the memory of the rank's tensors: addresses, and bytes.

    Attributes:
        events: what has been written.
    """

    def __init__(self, unit: int, tensors: Mapping[int, int]) -> None:
        self.events: list[Event] = []
        self._unit = unit
        self._tensors = sorted(tensors.items())
        self._starts = [start for start, _ in self._tensors]
        self._touched = [np.zeros(nbytes // _PAGE + 2, dtype=bool) for _, nbytes in self._tensors]
        self._working_set_bytes = sum(tensors.values())
        self._sums: dict[tuple[type[Copy | Fetch | Reduce], int], int] = {}

    def add(self, event: Event) -> None:
        """Write an event, after the copies and reductions before it."""
        self.flush()
        self.events.append(event)

    def flush(self) -> None:
        """Write the copies and reductions since the last event."""
        for (kind, working_set_bytes), nbytes in self._sums.items():
            self.events.append(kind(nbytes, working_set_bytes))
        self._sums.clear()

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Note a copy."""
        if self._holds(target) and not self._holds(source):
            self._note(Fetch, nbytes, self._touch(target, nbytes))
        else:
            new = self._touch(source, nbytes)
            self._touch(target, nbytes)
            self._note(Copy, nbytes, new)

    def copy_elsewhere(self, nbytes: int) -> None:
        """Note a copy of memory that the operation has just written, wherever it is."""
        self._note(Copy, nbytes, 0)

    def reduce(self, target: int, sources: Sequence[int], count: int) -> None:
        """Note a reduction of ``count`` elements at each of some addresses."""
        nbytes = count * self._unit
        # A reduction was calibrated with one tensor that is not in the caches, and a buffer that is.
        new = 2 * sum(self._touch(source, nbytes) for source in sources)
        self._note(Reduce, len(sources) * nbytes, min(len(sources) * nbytes, new))
        if written := self._touch(target, nbytes):
            self._note(Fetch, written, written)

    def _note(self, kind: type[Copy | Fetch | Reduce], nbytes: int, new: int) -> None:
        """Add up; of the bytes, so many belong to memory that was not touched before."""
        for part, working_set_bytes in ((new, self._working_set_bytes), (nbytes - new, 0)):
            if part > 0:
                key = kind, working_set_bytes
                self._sums[key] = self._sums.get(key, 0) + part

    def _holds(self, address: int) -> bool:
        return self._tensor_of(address) >= 0

    def _tensor_of(self, address: int) -> int:
        index = bisect_right(self._starts, address) - 1
        return index if index >= 0 and address < self._starts[index] + self._tensors[index][1] else -1

    def _touch(self, address: int, nbytes: int) -> int:
        """Note that memory is used; return how many bytes of it had not been, to a page."""
        index = self._tensor_of(address)
        if index < 0 or nbytes == 0:
            return 0
        offset = address - self._starts[index]
        pages = self._touched[index][offset // _PAGE : (offset + nbytes - 1) // _PAGE + 1]
        new = len(pages) - int(np.count_nonzero(pages))
        pages[:] = True
        return nbytes * new // max(1, len(pages))

    def overhead(self, name: str) -> None:
        """Note a cost that the calibration knows by name."""
        self.add(Overhead(name))


def current_log() -> RankLog:
    """Return the log of the rank that this thread is."""
    log: RankLog = _mine.log
    return log


def set_current_log(log: RankLog) -> None:
    """Let this thread write into a log from now on."""
    _mine.log = log


class ThreadObserver:
    """Writes what kernels do into the log of the calling thread (recorded_kernels.py:Observer)."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        current_log().copy(target, source, nbytes)

    def reduce(self, target: int, sources: Sequence[int], count: int) -> None:
        current_log().reduce(target, sources, count)

    def set_flag(self, value: int) -> None:
        current_log().add(SetFlag(value))

    def await_flag(self, local_rank: int, value: int, has_come: Callable[[], bool]) -> None:
        current_log().add(AwaitFlag(local_rank, value))
        wait_for(has_come)
