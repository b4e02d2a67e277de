"""The memory that ranks share: weak, watched for data races, with futexes.

Atomic words keep their history. A rank may read any value that is not older than one it knows of, by an
acquire load of what another rank released (release/acquire with views: Kang et al., "A Promising Semantics
for Relaxed-Memory Concurrency", POPL 2017, without promises). Sequentially consistent accesses and fences
go through one more view that all share. Read-modify-write operations read the newest value, but for exchanges
that fail. So this allows
what C11 allows for the accesses that kernels have, load buffering aside, which needs relaxed ones.

Other words are read and written in place; an access that is not ordered with another rank's by
happens-before (vector clocks, one of them a write) is a :class:`DataRace`. A program without races cannot see
in which order its plain accesses are done, so ranks stop only at atomic ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from verification.violations import DataRace

View = tuple[int, ...]
"""By place of an atomic word (:attr:`Known.written`), the number of the newest known value."""
Clock = tuple[int, ...]
Message = tuple[int, View, Clock]
"""A value of an atomic word, with its writer's view and vector clock; released ones only carry these."""
Cell = tuple[int | None, int, int, tuple[tuple[int, int], ...]]
"""A word that is not atomic: its value, its writer, when that was, and who has read it since, and when."""

_WRAP = 1 << 64
_UNTOUCHED: Cell = (None, -1, 0, ())


@dataclass
class Known:
    """What earlier searches of a model found out about its words; a search that finds more starts anew.

    Attributes:
        weak: read by acquire loads. Of other words, which are read in the order of sequentially consistent
            accesses only, old values are dropped.
        written: atomic words that a rank writes, and their places in views. To read another is no event.
        looked_at: other words that are read by atomic loads.
        mixed: those of them that are written as words that are not atomic.
    """

    weak: set[int] = field(default_factory=set)
    looked_at: set[int] = field(default_factory=set)
    mixed: set[int] = field(default_factory=set)
    written: dict[int, int] = field(default_factory=dict)


class KnowsMore(Exception):
    """A search has found out something about a word that its first state did not take into account."""


def to_word(value: int) -> int:
    """Return a value as a signed 64-bit word."""
    value = int(value) & (_WRAP - 1)
    return value - _WRAP if value >> 63 else value


def _with(view: View, place: int, number: int) -> View:
    return (*view[:place], number, *view[place + 1 :])


class SharedMemory:
    """The state of shared memory, and of each rank's knowledge of it.

    The values of a word are numbered from the oldest that somebody may still read. So states that differ only
    in what is forgotten are equal.

    Args:
        size: how many ranks there are.
        initial: gives a word's value before anybody has written it.
        known: the known facts about the words.
        relaxed: words by which no rank learns what another has done, though C11 lets it. Fewer states; a
            protocol that is right without is right with it.
        loose: words that one rank writes in no order while others read them, and that are not watched for
            races. Whoever reads such a word may read any value that is not older than one it knows of.
    """

    __slots__ = (
        "cells", "cells_hash", "clocks", "dirty", "fenced", "gone", "history", "initial", "known", "loose",
        "ordered", "owns_cells", "places", "relaxed", "size", "streamed", "views",
    )  # fmt: skip

    def __init__(
        self,
        size: int,
        initial: Callable[[int], int],
        known: Known,
        relaxed: frozenset[int],
        loose: range = range(0),
    ) -> None:
        self.size = size
        self.initial = initial
        self.known = known
        self.places = known.written
        self.relaxed = relaxed
        self.loose = loose
        number = len(known.written)
        nothing = (0,) * number
        # By rank, what its last release fence covers: its view and its clock.
        self.fenced: list[tuple[View, Clock]] = [(nothing, (0,) * size)] * size
        self.cells: dict[int, Cell] = {}
        self.cells_hash = 0
        self.owns_cells = True  # else copies of this state use the same dictionary
        self.history: list[tuple[Message, ...]] = [()] * number  # by place; empty until the word is used
        self.ordered = nothing
        self.views: list[View] = [nothing] * size
        self.clocks = [tuple(int(i == rank) for i in range(size)) for rank in range(size)]
        self.dirty = [False] * size
        self.streamed: tuple[frozenset[int], ...] = (frozenset(),) * size
        self.gone: frozenset[int] = frozenset()

    def copy(self) -> SharedMemory:
        """Return a state that can be changed without this one."""
        new = SharedMemory.__new__(SharedMemory)
        new.size, new.initial, new.known, new.relaxed = self.size, self.initial, self.known, self.relaxed
        new.places, new.loose, new.gone, new.streamed = self.places, self.loose, self.gone, self.streamed
        new.cells, new.cells_hash = self.cells, self.cells_hash
        self.owns_cells = new.owns_cells = False
        new.history, new.ordered, new.views = self.history.copy(), self.ordered, self.views.copy()
        new.clocks, new.dirty, new.fenced = self.clocks.copy(), self.dirty.copy(), self.fenced.copy()
        return new

    def key(self) -> Any:
        """Return a key that distinguishes this state from others, as far as ranks can observe."""
        return (
            self.cells_hash,
            tuple(self.history),
            tuple(self.views),
            self.ordered,
            tuple(self.clocks),
            tuple(self.dirty),
            self.streamed,
            tuple(self.fenced),
        )

    def retire(self, rank: int) -> None:
        """Forget what a rank knows, as it has ended or crashed: it will read nothing more."""
        nothing = (0,) * len(self.places)
        self.gone |= {rank}
        self.views[rank], self.clocks[rank], self.dirty[rank] = nothing, (0,) * self.size, False
        self.fenced[rank] = (nothing, (0,) * self.size)
        if len(self.gone) < self.size:
            self._forget_all()

    # Words that are not atomic

    def read(self, rank: int, address: int) -> int:
        """Read a word in place."""
        place = self.places.get(address)
        if place is not None and self.history[place]:
            messages = self.history[place]
            if self.views[rank][place] < len(messages) - 1:
                raise DataRace(address, rank, "reads", -1, "writes as an atomic one")
            return messages[-1][0]
        if address in self.loose:  # its writer does
            return self._value(address)
        cell = self.cells.get(address, _UNTOUCHED)
        value, writer, time, readers = cell
        clock = self.clocks[rank]
        if writer not in (-1, rank) and (time > clock[writer] or address in self.streamed[writer]):
            raise DataRace(address, rank, "reads", writer, "has written")
        entry = (rank, clock[rank])
        if entry not in readers:
            later = tuple(sorted([*(each for each in readers if each[0] != rank), entry]))
            self._set_cell(address, cell, (value, writer, time, later))
        self.dirty[rank] = True
        return self.initial(address) if value is None else value

    def read_atomically(self, rank: int, address: int) -> int:
        """Read a word by an atomic load, where no rank writes it by an atomic store."""
        if address in self.known.mixed:
            return self.read(rank, address)
        self.known.looked_at.add(address)
        if address in self.cells:
            self.known.mixed.add(address)
            raise KnowsMore
        return self.initial(address)

    def write(self, rank: int, address: int, value: int, *, streams: bool = False) -> None:
        """Write a word in place; if it ``streams``, it is visible only after the rank's next stream fence."""
        if address in self.loose:
            self.store(rank, address, value, ordered=False, releases=False)
            return
        if address in self.known.looked_at and address not in self.known.mixed:
            self.known.mixed.add(address)
            raise KnowsMore
        cell = self.cells.get(address, _UNTOUCHED)
        _, writer, time, readers = cell
        clock = self.clocks[rank]
        if writer not in (-1, rank) and (time > clock[writer] or address in self.streamed[writer]):
            raise DataRace(address, rank, "writes", writer, "has written")
        for other, time in readers:
            if other != rank and time > clock[other]:
                raise DataRace(address, rank, "writes", other, "may still read")
        self._set_cell(address, cell, (to_word(value), rank, clock[rank], ()))
        self.dirty[rank] = True
        mine = self.streamed[rank]
        if streams or address in mine:
            changed = mine | {address} if streams else mine - {address}
            self.streamed = (*self.streamed[:rank], changed, *self.streamed[rank + 1 :])

    def _set_cell(self, address: int, before: Cell, after: Cell) -> None:
        if not self.owns_cells:
            self.cells, self.owns_cells = self.cells.copy(), True
        self.cells[address] = after
        self.cells_hash ^= hash((address, before)) ^ hash((address, after))

    def release_fence(self, rank: int) -> None:
        """Let whoever reads what the rank writes from now on know all that it knows now."""
        self.fenced[rank] = (self.views[rank], self.clocks[rank])

    def stream_fence(self, rank: int) -> None:
        """Let the rank's later releases cover its streamed writes."""
        self.streamed = (*self.streamed[:rank], frozenset(), *self.streamed[rank + 1 :])

    def _value(self, address: int) -> int:
        value = self.cells.get(address, _UNTOUCHED)[0]
        return self.initial(address) if value is None else value

    # Atomic words

    def choices(self, rank: int, kind: str, address: int) -> range:
        """Return the numbers of the values that a load may return."""
        place = self.places.get(address)
        if kind != "load_ordered" and address not in self.known.weak:
            self.known.weak.add(address)
            raise KnowsMore
        if place is None:
            return range(1)
        low = self.views[rank][place]
        if kind == "load_ordered":
            low = max(low, self.ordered[place])
        return range(low, len(self._messages(address)))

    def futex_choices(self, rank: int, address: int, expected: int) -> list[int]:
        """Return the numbers of values that a futex may compare with the expected one, after a full fence.

        One value that is equal and one that is not, if there are such, stand for all.
        """
        messages = self._messages(address)
        place = self.places.get(address)
        low = 0 if place is None else max(self.views[rank][place], self.ordered[place])
        found = {}
        for number in range(low, len(messages)):
            found[messages[number][0] & 0xFFFF_FFFF == expected & 0xFFFF_FFFF] = number
        return list(found.values())

    def differing_choices(self, rank: int, address: int, expected: int) -> list[int]:
        """Return the numbers of older values that an exchange may read which does not find the expected one.

        It is a sequentially consistent load then.
        """
        place = self.places.get(address)
        if place is None:
            return []
        messages = self._messages(address)
        low = max(self.views[rank][place], self.ordered[place])
        return [number for number in range(low, len(messages) - 1) if messages[number][0] != expected]

    def value(self, address: int, number: int) -> int:
        """Return the value of that number."""
        return self._messages(address)[number][0]

    def newest(self, address: int) -> int:
        """Return the newest value of a word."""
        return self._messages(address)[-1][0]

    def load(self, rank: int, address: int, number: int, *, learns: bool = True) -> int:
        """Read the value of that number, and learn all that its writer knew."""
        message = self._messages(address)[number]
        if learns:
            self._learn(rank, message)
        place = self.places.get(address)
        if place is not None:
            if self.views[rank][place] < number:
                self.views[rank] = _with(self.views[rank], place, number)
            self._forget(address, place)
        return message[0]

    def store(self, rank: int, address: int, value: int, *, ordered: bool, releases: bool = True) -> None:
        """Write a value, and release it, so that a rank that acquires it learns what this rank knows."""
        place = self._append(rank, address, value, releases)
        if ordered:
            self.ordered = _with(self.ordered, place, self.views[rank][place])
        self._forget(address, place)

    def modify(self, rank: int, address: int, change: Callable[[int], int | None]) -> int:
        """Atomically read the newest value and write ``change`` of it, unless None; return the old one.

        The new value passes on the view that was read (a release sequence), as this rank has learned it.
        """
        messages = self._messages(address)
        newest = messages[-1]
        self._learn(rank, newest)
        place = self.places.get(address)
        if place is not None:
            self.views[rank] = _with(self.views[rank], place, len(messages) - 1)
        value = change(newest[0])
        if value is not None:
            place = self._append(rank, address, value)
        if place is not None:
            self.ordered = _with(self.ordered, place, self.views[rank][place])
            self._forget(address, place)
        return newest[0]

    def fence(self, rank: int) -> None:
        """Order this rank with all fences and sequentially consistent accesses before."""
        self.views[rank] = self.ordered = tuple(map(max, self.ordered, self.views[rank]))
        self._forget_all()

    def _messages(self, address: int) -> tuple[Message, ...]:
        place = self.places.get(address)
        found = () if place is None else self.history[place]
        if not found:
            found = ((self._value(address), (0,) * len(self.places), (0,) * self.size),)
            if place is not None:
                self.history[place] = found
        return found

    def _learn(self, rank: int, message: Message) -> None:
        self.views[rank] = tuple(map(max, self.views[rank], message[1]))
        self.clocks[rank] = tuple(map(max, self.clocks[rank], message[2]))

    def _append(self, rank: int, address: int, value: int, releases: bool = True) -> int:
        """Append a value; return the word's place."""
        place = self.places.get(address)
        if place is None:
            self.places[address] = len(self.places)
            raise KnowsMore
        messages = self._messages(address)
        view = self.views[rank] = _with(self.views[rank], place, len(messages))
        if address in self.relaxed or not releases:
            self.history[place] = (*messages, (to_word(value), *self.fenced[rank]))
            return place
        self.history[place] = (*messages, (to_word(value), view, self.clocks[rank]))
        if self.dirty[rank]:
            # Its plain accesses from now on are not covered by this release.
            own = self.clocks[rank]
            self.clocks[rank] = _with(own, rank, own[rank] + 1)
            self.dirty[rank] = False
        return place

    def _forget_all(self) -> None:
        for address, place in self.places.items():
            if self.history[place]:
                self._forget(address, place)

    def _forget(self, address: int, place: int) -> None:
        """Drop values of a word that no rank can read any more, and number the others anew."""
        if len(self.history[place]) == 1:
            return
        if self.gone:
            low = min([view[place] for rank, view in enumerate(self.views) if rank not in self.gone])
        else:
            low = min([view[place] for view in self.views])
        if address not in self.known.weak:
            low = max(low, self.ordered[place])
        if low == 0:
            return

        def renumber(view: View) -> View:
            number = view[place]
            return _with(view, place, max(number - low, 0)) if number else view

        self.history[place] = self.history[place][low:]
        self.ordered = renumber(self.ordered)
        self.views = [renumber(view) for view in self.views]
        self.fenced = [(renumber(view), clock) for view, clock in self.fenced]
        for each, messages in enumerate(self.history):
            if any(message[1][place] for message in messages):
                self.history[each] = tuple(
                    [(value, renumber(view), clock) for value, view, clock in messages]
                )
