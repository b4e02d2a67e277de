"""The output of ranks that are threads of this process: whole lines, each with its rank, as for processes."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.launcher.output import OutputSink, OutputSource, colours_wanted, prefix

_NAMES = ("stdout", "stderr")


class _ByRank(io.TextIOBase):
    """Prefixes output of a rank's threads; passes all other output to the original stream."""

    def __init__(self, original: TextIO) -> None:
        self.original = original
        self._sink = OutputSink(original)
        self._sources: dict[tuple[int, int], OutputSource] = {}
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        here = current_thread_rank()
        if here is None:
            return self.original.write(text)
        with self._lock:
            source = self._sources.get((here.rank, here.size))
            if source is None:
                label = prefix(here.rank, here.size, colours_wanted(self._sink.terminal))
                source = self._sources[here.rank, here.size] = OutputSource(self._sink, label)
            self.original.flush()  # buffered output comes first: the sink writes beneath the buffer
            source.feed(text.encode(errors="replace"), time.monotonic())
        return len(text)

    def end(self) -> None:
        """Show the unfinished lines of all ranks."""
        with self._lock:
            for source in self._sources.values():
                source.show_unfinished()
            self._sink.end_line()

    def flush(self) -> None:
        self.original.flush()

    def isatty(self) -> bool:
        return self.original.isatty()

    def fileno(self) -> int:
        return self.original.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.original.encoding


_lock = threading.Lock()
_users = 0


@contextlib.contextmanager
def outputs_by_rank() -> Iterator[None]:
    """Prefix the lines that thread ranks print in the block; several threads may use it concurrently."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for name in _NAMES:
                setattr(sys, name, _ByRank(getattr(sys, name)))
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            for name in _NAMES:
                stream = getattr(sys, name)
                if isinstance(stream, _ByRank):
                    stream.end()
                    if _users == 0:
                        setattr(sys, name, stream.original)
