"""The seams of polling: ``select`` and ``selectors``."""

from __future__ import annotations

import select
import selectors
from collections.abc import Iterable
from typing import Any

from verification.simulation.network import Source, wait_for
from verification.simulation.scheduler import active
from verification.simulation.sockets import Machine


class SimulatedPoll:
    """A ``select.poll``, or a ``select.epoll``, whose descriptor can be polled itself."""

    class _Set(Source):
        def __init__(self, poll: SimulatedPoll) -> None:
            super().__init__()
            self.poll = poll

        def is_readable(self) -> bool:
            return any(
                (reads and each.is_readable()) or (writes and each.is_writable())
                for each, reads, writes in self.poll.sources()
            )

        def parts(self) -> Iterable[Source]:
            return (self, *(part for each, _, _ in self.poll.sources() for part in each.parts()))

    def __init__(self) -> None:
        self._registered: dict[Any, int] = {}
        self._set = SimulatedPoll._Set(self)
        self._number = Machine.open(self._set)

    def fileno(self) -> int:
        return self._number

    def register(self, source: Any, events: int) -> None:
        self._registered[source] = events

    def modify(self, source: Any, events: int) -> None:
        self._registered[source] = events
        run = active()
        if run is not None and not run.is_ending:
            self._set.changed(run)

    def unregister(self, source: Any) -> None:
        del self._registered[source]

    def sources(self) -> list[tuple[Source, bool, bool]]:
        """Return what is registered, and whether to wait for reading and writing."""
        found = []
        for each, events in self._registered.items():
            if events:
                source = each if isinstance(each, Source) else Machine.descriptors[each]
                found.append((source, bool(events & select.POLLIN), bool(events & select.POLLOUT)))
        return found

    def poll(self, milliseconds: float | None = None) -> list[tuple[Any, int]]:
        run = active()
        if run is None:
            return []
        seconds = None if milliseconds is None or milliseconds < 0 else milliseconds / 1000
        ready = wait_for(run, self.sources, seconds)
        by_source = {
            each if isinstance(each, Source) else Machine.descriptors[each]: each for each in self._registered
        }
        return [
            (by_source[source], select.POLLIN * reads + select.POLLOUT * writes)
            for source, reads, writes in ready
            if source in by_source
        ]

    def close(self) -> None:
        self._registered.clear()


class SimulatedSelect:
    """The module ``select``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(select, name)

    def poll(self) -> Any:
        return select.poll() if active() is None else SimulatedPoll()

    def epoll(self) -> Any:
        return select.epoll() if active() is None else SimulatedPoll()


class SimulatedSelector:
    """A ``selectors.DefaultSelector``, of sockets and descriptors."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, source: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = source if isinstance(source, int) else source.fileno()
        polled = Machine.descriptors[source] if isinstance(source, int) else source
        key = self._keys[polled] = selectors.SelectorKey(source, number, events, data)
        return key

    modify = register

    def unregister(self, source: Any) -> selectors.SelectorKey:
        return self._keys.pop(Machine.descriptors[source] if isinstance(source, int) else source)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys

    def _sources(self) -> list[tuple[Source, bool, bool]]:
        return [
            (source, bool(key.events & selectors.EVENT_READ), bool(key.events & selectors.EVENT_WRITE))
            for source, key in self._keys.items()
        ]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        run = active()
        if run is None:
            return []
        return [
            (self._keys[source], selectors.EVENT_READ * reads + selectors.EVENT_WRITE * writes)
            for source, reads, writes in wait_for(run, self._sources, timeout)
        ]

    def close(self) -> None:
        self._keys.clear()


class SimulatedSelectors:
    """The module ``selectors``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(selectors, name)

    def DefaultSelector(self) -> Any:
        return selectors.DefaultSelector() if active() is None else SimulatedSelector()
