"""Every rank sends every other something of its own, over several hosts: all_to_all, scatter, gather.

What the rank at place p has for another host goes over rail ``p mod rails``; a rank beyond the last rail
hands it to that rank first. On the other host the ranks hand on what has come for others, together with what
they have for each other. Who sends what to whom is compared before: the hosts tell each other how much their
ranks send to each rank, and whoever expects something else lets all ranks know.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from torchestra.engine.multihost.bridge import Pending
from torchestra.engine.multihost.hierarchy import Call, Hierarchy, bytes_of
from torchestra.engine.operations import ALL_TO_ALL

__all__ = ["exchange"]

Ranges = Sequence[tuple[int, int]]
"""By rank, an address and a number of bytes."""


_CHUNK_BYTES = 1 << 20
_ON_THE_WAY = 4


def exchange(hierarchy: Hierarchy, sends: Ranges, receives: Ranges, call: Call) -> None:
    """Send to and receive from each rank what the ranges say.

    Much of it goes in rounds, each of which exchanges a part of every range: while one is on the way between
    the hosts, others are handed around within them.
    """
    hierarchy.agree(call)
    tables, rounds = _compare(hierarchy, sends, receives, call)
    on_the_way: deque[_Exchange] = deque()
    for number in range(rounds):
        parts, expected = (_part_of(ranges, number, rounds) for ranges in (sends, receives))
        lengths = tables // rounds + (number < tables % rounds)
        on_the_way.append(_Exchange(hierarchy, parts, expected, lengths, call))
        on_the_way[-1].begin()
        if len(on_the_way) == _ON_THE_WAY:
            on_the_way.popleft().finish()
    while on_the_way:
        on_the_way.popleft().finish()


def _part_of(ranges: Ranges, number: int, rounds: int) -> list[tuple[int, int]]:
    """What of each range is exchanged in a round."""
    parts = []
    for address, length in ranges:
        least, more = divmod(length, rounds)
        parts.append((address + number * least + min(number, more), least + (number < more)))
    return parts


def _compare(hierarchy: Hierarchy, sends: Ranges, receives: Ranges, call: Call) -> tuple[torch.Tensor, int]:
    """Make sure that what is sent is what is expected.

    Returns:
        By place, what each rank here sends and expects; and in how many rounds, the same on all ranks.
    """
    hosts, size = hierarchy.hosts, len(sends)
    mine = torch.tensor([[length for _, length in sends], [length for _, length in receives]])
    tables = torch.empty((len(hierarchy.here), 2, size), dtype=torch.int64)
    hierarchy.share(list(tables), mine, call)
    verdict = torch.zeros(2, dtype=torch.int64)
    if hierarchy.place == 0:
        assert hierarchy.bridge is not None
        here, places = len(hierarchy.here), [torch.tensor(ranks) for ranks in hosts.members]
        blocks = [tables[:, 0, ranks].reshape(-1) for ranks in places]
        told = torch.cat(blocks)
        lengths = [8 * here * len(ranks) for ranks in hosts.members]
        heard = torch.empty_like(told)
        sizes = (bytes_of(heard), lengths, bytes_of(told), lengths)
        hierarchy.wait(hierarchy.bridge.exchange(*sizes, call.seconds), call)
        fits = all(
            torch.equal(block.view(len(ranks), here), tables[:, 1, ranks].t())
            for ranks, block in zip(places, heard.split([length // 8 for length in lengths]), strict=True)
        )
        leaves = told.sum() - blocks[hierarchy.host].sum()
        votes = torch.empty((len(hosts), 2), dtype=torch.int64)
        vote = torch.tensor([int(not fits), -(-int(leaves) // (_CHUNK_BYTES * hosts.rails))])
        hierarchy.wait(hierarchy.bridge.all_gather(bytes_of(votes), bytes_of(vote), call.seconds), call)
        verdict = votes.amax(0)
    hierarchy.share_from(0, verdict, call)
    differs, rounds = verdict.tolist()
    if differs:
        sent, expected = mine.tolist()
        call.lengths = f" that sends {sent} and expects {expected} bytes by rank"
        hierarchy.raise_mismatch(call)
    return tables, max(1, rounds)


class _Exchange:
    """One round, whose lengths fit."""

    def __init__(
        self, hierarchy: Hierarchy, sends: Ranges, receives: Ranges, tables: torch.Tensor, call: Call
    ) -> None:
        self._hierarchy = hierarchy
        self._hosts = hierarchy.hosts
        self._sends, self._receives = sends, receives
        self._sent: list[list[int]] = tables[:, 0].tolist()
        self._expected: list[list[int]] = tables[:, 1].tolist()
        self._call = call
        self._others = [host for host in range(len(self._hosts)) if host != hierarchy.host]

        self._incoming = _NOTHING
        self._held = _NOTHING
        self._pending: Pending | None = None

    def begin(self) -> None:
        """Let what is for other hosts go."""
        hierarchy = self._hierarchy
        self._held = self._hand_to_rails()
        if hierarchy.bridge is not None:
            every = range(len(self._hosts))
            sent = [sum(map(self._bytes_to(host), self._users(hierarchy.place))) for host in every]
            expected = [self._bytes_from(host, hierarchy.place) for host in every]
            self._incoming = torch.empty(sum(expected), dtype=torch.uint8)
            self._pending = hierarchy.bridge.exchange(
                self._incoming, expected, self._held, sent, self._call.seconds
            )

    def finish(self) -> None:
        """Hand on what comes."""
        if self._pending is not None:
            self._hierarchy.wait(self._pending, self._call)
        self._hand_on(self._incoming)

    # -- who goes over which rail

    def _users(self, rail: int) -> range:
        """The places of this host whose ranks send over a rail."""
        return range(rail, len(self._hierarchy.here), self._hosts.rails)

    def _riders(self, host: int, rail: int) -> tuple[int, ...]:
        """The ranks of another host that send over a rail."""
        return self._hosts.members[host][rail :: self._hosts.rails]

    def _bytes_to(self, host: int) -> _Count:
        return _Count(self._sent, () if host == self._hierarchy.host else self._hosts.members[host])

    def _bytes_from(self, host: int, rail: int) -> int:
        """How much comes to this host from another over a rail."""
        if host == self._hierarchy.host:
            return 0
        places = range(len(self._hierarchy.here))
        return sum(self._from(rank, place) for rank in self._riders(host, rail) for place in places)

    def _from(self, rank: int, place: int) -> int:
        """How much the rank at a place here gets from a rank elsewhere."""
        return self._expected[place][rank]

    # -- the steps

    def _hand_to_rails(self) -> torch.Tensor:
        """Bring what is for other hosts to the ranks at the rails; there, all of it, by host and sender."""
        hierarchy, rails = self._hierarchy, self._hosts.rails
        elsewhere = [rank for host in self._others for rank in self._hosts.members[host]]
        own = torch.cat([memory(self._sends[rank]) for rank in elsewhere])
        places = range(len(hierarchy.here))
        totals = [sum(self._bytes_to(host)(place) for host in self._others) for place in places]
        users = self._users(hierarchy.place) if hierarchy.place < rails else range(0)
        boxes = {place: torch.empty(totals[place], dtype=torch.uint8) for place in users}
        sends = [_NOTHING] * len(hierarchy.here)
        sends[hierarchy.place % rails] = own
        receives = [boxes.get(place, _NOTHING) for place in places]
        self._exchange_here(sends, receives)
        by_host = {
            place: box.split([self._bytes_to(host)(place) for host in self._others])
            for place, box in boxes.items()
        }
        return torch.cat(
            [_NOTHING, *(by_host[place][number] for number in range(len(self._others)) for place in users)]
        )

    def _hand_on(self, incoming: torch.Tensor) -> None:
        """Give everybody here what has come for them, and what the ranks here have for each other."""
        hierarchy = self._hierarchy
        here, places = hierarchy.here, range(len(hierarchy.here))
        for_place: list[list[torch.Tensor]] = [[memory(self._sends[here[place]])] for place in places]
        at = 0
        if hierarchy.bridge is not None:
            for rank in self._arrivals(hierarchy.place):
                for place in places:
                    length = self._from(rank, place)
                    for_place[place].append(incoming[at : at + length])
                    at += length
        expected = [
            [self._from(here[sender], hierarchy.place)]
            + [self._from(rank, hierarchy.place) for rank in self._arrivals(sender)]
            for sender in places
        ]
        arrived = [torch.empty(sum(lengths), dtype=torch.uint8) for lengths in expected]
        self._exchange_here([torch.cat(pieces) for pieces in for_place], arrived)
        for sender, lengths, box in zip(places, expected, arrived, strict=True):
            for rank, piece in zip((here[sender], *self._arrivals(sender)), box.split(lengths), strict=True):
                memory(self._receives[rank]).copy_(piece)

    def _arrivals(self, place: int) -> Iterator[int]:
        """The ranks elsewhere whose things come to the rank at a place here, in the order of their coming."""
        if place >= self._hosts.rails:
            return iter(())
        return (rank for host in self._others for rank in self._riders(host, place))

    def _exchange_here(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        call = self._call
        plan = self._hierarchy.plan(ALL_TO_ALL, call)
        self._hierarchy.local.collective(plan, sends, receives, call.seconds, call.site)


class _Count:
    """How many bytes the rank at a place sends to some ranks."""

    def __init__(self, sent: list[list[int]], ranks: Sequence[int]) -> None:
        self._sent = sent
        self._ranks = ranks

    def __call__(self, place: int) -> int:
        return sum(self._sent[place][rank] for rank in self._ranks)


_NOTHING = torch.empty(0, dtype=torch.uint8)


def memory(place: tuple[int, int]) -> torch.Tensor:
    """The bytes at an address; somebody else keeps them."""
    address, length = place
    if length == 0:
        return _NOTHING
    return torch.frombuffer((ctypes.c_uint8 * length).from_address(address), dtype=torch.uint8)
