"""What one rank did: a list of events, written while its operations are recorded."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from torchestra.performance.schedule import (
    AwaitFlag,
    Copy,
    Event,
    Fetch,
    LocalCopy,
    Overhead,
    PeerRead,
    Reduce,
    SetFlag,
    WriteMiss,
)
from torchestra.performance.turns import wait_for

_mine = threading.local()
READ_CALL = "process_vm_readv"
"""What such a call takes besides its bytes, among the calibration's other costs."""

_PAGE = 4096  # as fine as it is noted which memory was touched
_Kind = type[Copy] | type[LocalCopy] | type[Fetch] | type[PeerRead] | type[WriteMiss] | type[Reduce]
_Kinds = Copy | LocalCopy | Fetch | PeerRead | WriteMiss | Reduce


class RankLog:
    """The events of one rank in one operation.

    Copies and reductions between two other events are added up: their order makes no difference in time.
    The rank's own memory, tensors and buffers, that is touched for the first time comes from the cache that
    all of it fits into; after that it is in a near one.

    Args:
        unit: bytes of an element of what is reduced.
        tensors: the memory of the rank's tensors: addresses, and bytes.
        operation_bytes: what each rank puts into the operation.

    Attributes:
        events: what has been written.
    """

    def __init__(self, unit: int, tensors: Mapping[int, int], operation_bytes: int) -> None:
        self.events: list[Event] = []
        self._operation_bytes = operation_bytes
        self._unit = unit
        self._tensors = sorted(tensors.items())
        self._starts = [start for start, _ in self._tensors]
        self._touched = [np.zeros(nbytes // _PAGE + 2, dtype=bool) for _, nbytes in self._tensors]
        self._buffer_pages: set[int] = set()
        self._sums: dict[tuple[_Kind, bool], int] = {}

    def add(self, event: Event) -> None:
        """Write an event, after the copies and reductions before it."""
        self.flush()
        self.events.append(event)

    def flush(self) -> None:
        """Write the copies and reductions since the last event."""
        for (kind, is_new), nbytes in self._sums.items():
            self.events.append(kind(nbytes, int(is_new), self._operation_bytes))
        self._sums.clear()

    def end(self) -> None:
        """End the operation: now it is known how much memory it goes through."""
        self.flush()
        working_set_bytes = sum(nbytes for _, nbytes in self._tensors) + _PAGE * len(self._buffer_pages)
        self.events = [
            replace(event, working_set_bytes=working_set_bytes)
            if isinstance(event, _Kinds) and event.working_set_bytes
            else event
            for event in self.events
        ]

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Note a copy."""
        if self._holds(target) and not self._holds(source):
            self._note(Fetch, nbytes, self._touch(target, nbytes))
        else:
            kind = LocalCopy if self._holds(target) else Copy
            self._note(kind, nbytes, self._touch(source, nbytes))
            self._note(WriteMiss, written := self._touch_any(target, nbytes), written)

    def read_peer(self, target: int, nbytes: int) -> None:
        """Note a call of the system that reads another rank's tensor."""
        self.overhead(READ_CALL)
        self._note(PeerRead, nbytes, self._touch(target, nbytes))

    def copy_elsewhere(self, nbytes: int) -> None:
        """Note a copy of memory that the operation has just written, wherever it is."""
        self._note(Copy, nbytes, 0)

    def reduce(self, target: int, sources: Sequence[int], count: int) -> None:
        """Note a reduction of ``count`` elements at each of some addresses."""
        nbytes = count * self._unit
        if len(sources) == 1 and sources[0] != target:
            self.copy(target, sources[0], nbytes)
            return
        # A reduction was calibrated with one tensor that is not in the caches, and a buffer that is.
        new = 2 * sum(self._touch(source, nbytes) for source in sources)
        # ... and with two sources: other numbers take as long as they read and write more, or less.
        moved = 2 * (len(sources) + 1) * nbytes // 3
        self._note(Reduce, moved, min(moved, new))
        if written := self._touch(target, nbytes):
            self._note(WriteMiss, written, written)

    def _note(self, kind: _Kind, nbytes: int, new: int) -> None:
        """Add up; of the bytes, so many belong to memory that was not touched before."""
        for part, is_new in ((new, True), (nbytes - new, False)):
            if part > 0:
                self._sums[kind, is_new] = self._sums.get((kind, is_new), 0) + part

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

    def _touch_any(self, address: int, nbytes: int) -> int:
        """:meth:`_touch`, also of the rank's buffers."""
        if nbytes < _PAGE or self._holds(address):
            return self._touch(address, nbytes)
        before = len(self._buffer_pages)
        self._buffer_pages.update(range(address // _PAGE, (address + nbytes - 1) // _PAGE + 1))
        return min(nbytes, _PAGE * (len(self._buffer_pages) - before))

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

    def read_peer(self, target: int, nbytes: int) -> None:
        current_log().read_peer(target, nbytes)

    def reduce(self, target: int, sources: Sequence[int], count: int) -> None:
        current_log().reduce(target, sources, count)

    def set_flag(self, value: int) -> None:
        current_log().add(SetFlag(value))

    def await_flag(self, local_rank: int, value: int, has_come: Callable[[], bool]) -> None:
        current_log().add(AwaitFlag(local_rank, value))
        wait_for(has_come)
