"""The memory that ranks share: weak, watched for data races, with futexes.

Atomic words keep their history. A rank may read any value that is not older than one it knows of, by an
acquire load of what another rank released (release/acquire with views: Kang et al., "A Promising Semantics
for Relaxed-Memory Concurrency", POPL 2017, without promises). Sequentially consistent accesses and fences
go through one more view that all share. Read-modify-write operations read the newest value. So this allows
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

View = dict[int, int]
"""By address of a word, the number of the newest known value."""
Message = tuple[int, tuple[tuple[int, int], ...], tuple[int, ...]]
"""A value of an atomic word, with its writer's view and vector clock; released ones only carry these."""

_WRAP = 1 << 64


@dataclass
class Known:
    """What earlier searches of a model found out about its words; a search that finds more starts anew.

    Attributes:
        weak: read by acquire loads. Of other words, which are read in the order of sequentially consistent
            accesses only, old values are dropped.
        written: atomic words that a rank writes. To read another is no event.
    """

    weak: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)


class KnowsMore(Exception):
    """A search has found out something about a word that its first state did not take into account."""


def to_word(value: int) -> int:
    """Return a value as a signed 64-bit word."""
    value = int(value) & (_WRAP - 1)
    return value - _WRAP if value >> 63 else value


class SharedMemory:
    """The state of shared memory, and of each rank's knowledge of it.

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
        "clocks", "dirty", "fenced", "history", "initial", "known", "loose", "oldest", "ordered", "plain",
        "plain_hash", "readers", "relaxed", "size", "streamed", "views", "writers",
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
        self.relaxed = relaxed
        self.loose = loose
        # By rank, what its last release fence covers: its view and its clock.
        self.fenced: list[tuple[tuple[tuple[int, int], ...], tuple[int, ...]]] = [((), (0,) * size)] * size
        self.plain: dict[int, int] = {}
        self.plain_hash = 0
        self.writers: dict[int, tuple[int, int]] = {}
        self.readers: dict[int, tuple[tuple[int, int], ...]] = {}
        self.history: dict[int, tuple[Message, ...]] = {}
        self.oldest: dict[int, int] = {}
        self.ordered: View = {}
        self.views: list[View] = [{} for _ in range(size)]
        self.clocks = [tuple(int(i == rank) for i in range(size)) for rank in range(size)]
        self.dirty = [False] * size
        self.streamed: tuple[frozenset[int], ...] = (frozenset(),) * size

    def copy(self) -> SharedMemory:
        """Return a state that can be changed without this one."""
        new = SharedMemory.__new__(SharedMemory)
        new.size, new.initial, new.known, new.relaxed = self.size, self.initial, self.known, self.relaxed
        new.plain, new.plain_hash = self.plain.copy(), self.plain_hash
        new.writers, new.readers = self.writers.copy(), self.readers.copy()
        new.history, new.oldest = self.history.copy(), self.oldest.copy()
        new.ordered, new.views = self.ordered.copy(), [view.copy() for view in self.views]
        new.clocks, new.dirty, new.streamed = self.clocks.copy(), self.dirty.copy(), self.streamed
        new.loose, new.fenced = self.loose, self.fenced.copy()
        return new

    def key(self) -> Any:
        """Return a key that distinguishes this state from others, as far as ranks can observe."""
        oldest = self.oldest
        words = []
        for address in sorted(self.history):
            messages = self.history[address]
            words.append(
                (address, tuple([(value, self._news(view), clock) for value, view, clock in messages]))
            )
        return (
            self.plain_hash,
            tuple(words),
            tuple([self._news(tuple(sorted(view.items()))) for view in self.views]),
            tuple(
                sorted([(a, n - oldest.get(a, 0)) for a, n in self.ordered.items() if n > oldest.get(a, 0)])
            ),
            tuple(self.clocks),
            tuple(self.dirty),
            self.streamed,
            tuple([(self._news(view), clock) for view, clock in self.fenced]),
        )

    def _news(self, view: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        oldest = self.oldest
        return tuple([(a, n - oldest.get(a, 0)) for a, n in view if n > oldest.get(a, 0)])

    # Words that are not atomic

    def read(self, rank: int, address: int) -> int:
        """Read a word in place."""
        if address in self.loose:  # its writer does
            return self.newest(address) if address in self.history else self._value(address)
        if address in self.history:  # an atomic word, which only its own writer may read so
            return self.history[address][-1][0]
        self._order_after_writer(rank, address, "reads")
        known = self.readers.get(address, ())
        entry = (rank, self.clocks[rank][rank])
        if entry not in known:
            later = tuple(sorted([*(each for each in known if each[0] != rank), entry]))
            self.plain_hash ^= hash((1, address, known)) ^ hash((1, address, later))
            self.readers[address] = later
        self.dirty[rank] = True
        return self._value(address)

    def write(self, rank: int, address: int, value: int, *, streams: bool = False) -> None:
        """Write a word in place; if it ``streams``, it is visible only after the rank's next stream fence."""
        if address in self.loose:
            self.store(rank, address, value, ordered=False, releases=False)
            return
        self._order_after_writer(rank, address, "writes")
        clock = self.clocks[rank]
        for other, time in self.readers.get(address, ()):
            if other != rank and time > clock[other]:
                raise DataRace(address, rank, "writes", other, "may still read")
        before = (self.plain.get(address), self.writers.get(address), self.readers.pop(address, ()))
        self.plain[address], self.writers[address] = to_word(value), (rank, clock[rank])
        after = (self.plain[address], self.writers[address], ())
        self.plain_hash ^= hash((0, address, before[:2])) ^ hash((1, address, before[2]))
        self.plain_hash ^= hash((0, address, after[:2])) ^ hash((1, address, ()))
        self.dirty[rank] = True
        mine = self.streamed[rank]
        if streams or address in mine:
            changed = mine | {address} if streams else mine - {address}
            self.streamed = (*self.streamed[:rank], changed, *self.streamed[rank + 1 :])

    def release_fence(self, rank: int) -> None:
        """Let whoever reads what the rank writes from now on know all that it knows now."""
        self.fenced[rank] = (tuple(sorted(self.views[rank].items())), self.clocks[rank])

    def stream_fence(self, rank: int) -> None:
        """Let the rank's later releases cover its streamed writes."""
        self.streamed = (*self.streamed[:rank], frozenset(), *self.streamed[rank + 1 :])

    def _order_after_writer(self, rank: int, address: int, verb: str) -> None:
        writer, time = self.writers.get(address, (rank, 0))
        if writer != rank and (time > self.clocks[rank][writer] or address in self.streamed[writer]):
            raise DataRace(address, rank, verb, writer, "has written")

    def _value(self, address: int) -> int:
        value = self.plain.get(address)
        return self.initial(address) if value is None else value

    # Atomic words

    def choices(self, rank: int, kind: str, address: int) -> range:
        """Return the numbers of the values that a load may return."""
        messages = self._messages(address)
        first = self.oldest.get(address, 0)
        low = max(self.views[rank].get(address, 0), first)
        if kind == "load_ordered":
            low = max(low, self.ordered.get(address, 0))
        elif address not in self.known.weak:
            self.known.weak.add(address)
            raise KnowsMore
        return range(low, first + len(messages))

    def futex_choices(self, rank: int, address: int, expected: int) -> list[int]:
        """Return the numbers of values that a futex may compare with the expected one, after a full fence.

        One value that is equal and one that is not, if there are such, stand for all.
        """
        first, messages = self.oldest.get(address, 0), self._messages(address)
        low = max(self.views[rank].get(address, 0), self.ordered.get(address, 0), first)
        found = {}
        for number in range(low, first + len(messages)):
            found[messages[number - first][0] & 0xFFFF_FFFF == expected & 0xFFFF_FFFF] = number
        return list(found.values())

    def value(self, address: int, number: int) -> int:
        """Return the value of that number."""
        return self._messages(address)[number - self.oldest.get(address, 0)][0]

    def newest(self, address: int) -> int:
        """Return the newest value of a word."""
        return self._messages(address)[-1][0]

    def load(self, rank: int, address: int, number: int, *, learns: bool = True) -> int:
        """Read the value of that number, and learn all that its writer knew."""
        message = self._messages(address)[number - self.oldest.get(address, 0)]
        self.views[rank][address] = number
        if learns:
            self._learn(rank, message)
        self._forget(address)
        return message[0]

    def store(self, rank: int, address: int, value: int, *, ordered: bool, releases: bool = True) -> None:
        """Write a value, and release it, so that a rank that acquires it learns what this rank knows."""
        self._append(rank, address, value, None, releases)
        if ordered:
            self.ordered[address] = self.views[rank][address]
        self._forget(address)

    def modify(self, rank: int, address: int, change: Callable[[int], int | None]) -> int:
        """Atomically read the newest value and write ``change`` of it, unless None; return the old one."""
        messages = self._messages(address)
        newest = messages[-1]
        self.views[rank][address] = self.oldest.get(address, 0) + len(messages) - 1
        self._learn(rank, newest)
        value = change(newest[0])
        if value is not None:
            self._append(rank, address, value, newest)
        self.ordered[address] = self.views[rank][address]
        self._forget(address)
        return newest[0]

    def fence(self, rank: int) -> None:
        """Order this rank with all fences and sequentially consistent accesses before."""
        for address, number in self.ordered.items():
            if self.views[rank].get(address, 0) < number:
                self.views[rank][address] = number
        for address, number in self.views[rank].items():
            if self.ordered.get(address, 0) < number:
                self.ordered[address] = number
        for address in list(self.history):
            self._forget(address)

    def _messages(self, address: int) -> tuple[Message, ...]:
        found = self.history.get(address)
        if found is None:
            found = self.history[address] = ((self._value(address), (), (0,) * self.size),)
        return found

    def _learn(self, rank: int, message: Message) -> None:
        view = self.views[rank]
        for address, number in message[1]:
            if view.get(address, 0) < number:
                view[address] = number
        self.clocks[rank] = tuple(map(max, self.clocks[rank], message[2]))

    def _append(
        self, rank: int, address: int, value: int, read: Message | None, releases: bool = True
    ) -> None:
        """Append a value; a read-modify-write passes on the view that it read (a release sequence)."""
        if address not in self.known.written:
            self.known.written.add(address)
            raise KnowsMore
        messages = self._messages(address)
        self.views[rank][address] = self.oldest.get(address, 0) + len(messages)
        if address in self.relaxed or not releases:
            self.history[address] = (*messages, (to_word(value), *self.fenced[rank]))
            return
        view, clock = self.views[rank], self.clocks[rank]
        if read is not None:
            view = view.copy()
            for other, number in read[1]:
                view[other] = max(view.get(other, 0), number)
            clock = tuple(map(max, clock, read[2]))
        self.history[address] = (*messages, (to_word(value), tuple(sorted(view.items())), clock))
        if self.dirty[rank]:
            # Its plain accesses from now on are not covered by this release.
            own = self.clocks[rank]
            self.clocks[rank] = (*own[:rank], own[rank] + 1, *own[rank + 1 :])
            self.dirty[rank] = False

    def _forget(self, address: int) -> None:
        """Drop values that no rank can read any more."""
        low = min(view.get(address, 0) for view in self.views)
        if address not in self.known.weak:
            low = max(low, self.ordered.get(address, 0))
        first = self.oldest.get(address, 0)
        if low > first:
            self.history[address] = self._messages(address)[low - first :]
            self.oldest[address] = low
