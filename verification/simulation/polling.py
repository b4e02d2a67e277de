"""The seams of polling: ``select`` and ``selectors``."""

from __future__ import annotations

import select
import selectors
from typing import Any

from verification.simulation.network import Source, Watch
from verification.simulation.scheduler import active
from verification.simulation.sockets import Machine


def _source(given: Any) -> Source:
    """Return what a descriptor, or an object with one, stands for."""
    return given if isinstance(given, Source) else Machine.descriptors[given]


class SimulatedPoll:
    """A ``select.poll``: it watches its sources while it is asked only, for nobody closes it."""

    def __init__(self) -> None:
        self._given: dict[Source, tuple[Any, int]] = {}

    def register(self, source: Any, events: int) -> None:
        self._given[_source(source)] = source, events

    modify = register

    def unregister(self, source: Any) -> None:
        del self._given[_source(source)]

    def poll(self, milliseconds: float | None = None) -> list[tuple[Any, int]]:
        epoll = SimulatedEpoll()
        try:
            for source, events in self._given.values():
                epoll.register(source, events)
            return epoll.poll(milliseconds)
        finally:
            epoll.close()


class SimulatedEpoll:
    """A ``select.epoll``, whose descriptor can be polled itself."""

    def __init__(self) -> None:
        self._given: dict[Source, Any] = {}
        self._watch = Watch()
        self._number = -1

    def fileno(self) -> int:
        if self._number < 0:
            self._number = Machine.open(self._watch)
        return self._number

    def register(self, source: Any, events: int) -> None:
        polled = _source(source)
        self._given[polled] = source
        self._watch.add(polled, reads=bool(events & select.POLLIN), writes=bool(events & select.POLLOUT))

    def modify(self, source: Any, events: int) -> None:
        self.register(source, events)
        run = active()
        if run is not None and not run.is_ending:
            self._watch.changed(run)

    def unregister(self, source: Any) -> None:
        del self._given[_source(source)]
        self._watch.remove(_source(source))

    def poll(self, milliseconds: float | None = None) -> list[tuple[Any, int]]:
        run = active()
        if run is None:
            return []
        seconds = None if milliseconds is None or milliseconds < 0 else milliseconds / 1000
        return [
            (self._given[source], select.POLLIN * reads + select.POLLOUT * writes)
            for source, reads, writes in self._watch.wait(run, seconds)
        ]

    def close(self) -> None:
        for source in self._given:
            self._watch.remove(source)
        self._given.clear()


class SimulatedSelect:
    """The module ``select``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(select, name)

    def poll(self) -> Any:
        return select.poll() if active() is None else SimulatedPoll()

    def epoll(self) -> Any:
        return select.epoll() if active() is None else SimulatedEpoll()


class SimulatedSelector:
    """A ``selectors.DefaultSelector``, of sockets and descriptors."""

    def __init__(self) -> None:
        self._keys: dict[Source, selectors.SelectorKey] = {}
        self._watch = Watch()

    def register(self, source: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        polled, number = _source(source), source if isinstance(source, int) else source.fileno()
        key = self._keys[polled] = selectors.SelectorKey(source, number, events, data)
        reads, writes = bool(events & selectors.EVENT_READ), bool(events & selectors.EVENT_WRITE)
        self._watch.add(polled, reads=reads, writes=writes)
        return key

    modify = register

    def unregister(self, source: Any) -> selectors.SelectorKey:
        key = self._keys.pop(_source(source))
        self._watch.remove(_source(source))
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        run = active()
        if run is None:
            return []
        return [
            (self._keys[source], selectors.EVENT_READ * reads + selectors.EVENT_WRITE * writes)
            for source, reads, writes in self._watch.wait(run, timeout)
        ]

    def close(self) -> None:
        for source in self._keys:
            self._watch.remove(source)
        self._keys.clear()


class SimulatedSelectors:
    """The module ``selectors``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(selectors, name)

    def DefaultSelector(self) -> Any:
        return selectors.DefaultSelector() if active() is None else SimulatedSelector()
