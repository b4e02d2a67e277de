"""Every rank sends every other something of its own, over several hosts: all_to_all, scatter, gather.

What local rank r has for another host goes over rail ``r mod rails``; a rank beyond the last rail
hands it to that rank first. On the other host the ranks hand on what has come for others, together with what
they have for each other. Before that the ranks compare lengths: the hosts tell each other how much their
ranks send to each rank, and a rank that expects something else lets all ranks know.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from torchestra.engine.multihost.bridge import Pending
from torchestra.engine.multihost.hierarchy import Call, Hierarchy, bytes_of
from torchestra.engine.operations import ALL_TO_ALL

Ranges = Sequence[tuple[int, int]]
"""By rank, an address and a number of bytes."""


_CHUNK_BYTES = 1 << 20
_IN_FLIGHT = 4


def exchange(hierarchy: Hierarchy, sends: Ranges, receives: Ranges, call: Call) -> None:
    """Send to and receive from each rank what the ranges say.

    Much of it goes in rounds, each of which exchanges a part of every range: while one is on the way between
    the hosts, others are handed around within them.
    """
    hierarchy.agree(call)
    tables, rounds = _compare(hierarchy, sends, receives, call)
    in_flight: deque[_Exchange] = deque()
    for round_index in range(rounds):
        parts, expected = (_part_of(ranges, round_index, rounds) for ranges in (sends, receives))
        lengths = tables // rounds + (round_index < tables % rounds)
        in_flight.append(_Exchange(hierarchy, parts, expected, lengths, call))
        in_flight[-1].begin()
        if len(in_flight) == _IN_FLIGHT:
            in_flight.popleft().finish()
    while in_flight:
        in_flight.popleft().finish()


def _part_of(ranges: Ranges, round_index: int, rounds: int) -> list[tuple[int, int]]:
    """Return the part of each range that a round exchanges."""
    parts = []
    for address, length in ranges:
        least, more = divmod(length, rounds)
        parts.append((address + round_index * least + min(round_index, more), least + (round_index < more)))
    return parts


def _compare(hierarchy: Hierarchy, sends: Ranges, receives: Ranges, call: Call) -> tuple[torch.Tensor, int]:
    """Make sure that each rank sends what its peers expect.

    Returns:
        By local rank, what each rank here sends and expects; and in how many rounds, the same on all ranks.
    """
    hosts, size = hierarchy.hosts, len(sends)
    mine = torch.tensor([[length for _, length in sends], [length for _, length in receives]])
    tables = torch.empty((len(hierarchy.here), 2, size), dtype=torch.int64)
    hierarchy.share(list(tables), mine, call)
    verdict = torch.zeros(2, dtype=torch.int64)
    if hierarchy.local_rank == 0:
        assert hierarchy.bridge is not None
        here, ranks_by_host = len(hierarchy.here), [torch.tensor(ranks) for ranks in hosts.members]
        blocks = [tables[:, 0, ranks].reshape(-1) for ranks in ranks_by_host]
        outgoing = torch.cat(blocks)
        lengths = [8 * here * len(ranks) for ranks in hosts.members]
        incoming = torch.empty_like(outgoing)
        sizes = (bytes_of(incoming), lengths, bytes_of(outgoing), lengths)
        hierarchy.wait(hierarchy.bridge.exchange(*sizes, call.timeout_s), call)
        fits = all(
            torch.equal(block.view(len(ranks), here), tables[:, 1, ranks].t())
            for ranks, block in zip(
                ranks_by_host, incoming.split([length // 8 for length in lengths]), strict=True
            )
        )
        leaves = outgoing.sum() - blocks[hierarchy.host].sum()
        votes = torch.empty((len(hosts), 2), dtype=torch.int64)
        vote = torch.tensor([int(not fits), -(-int(leaves) // (_CHUNK_BYTES * hosts.rails))])
        hierarchy.wait(hierarchy.bridge.all_gather(bytes_of(votes), bytes_of(vote), call.timeout_s), call)
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
        """Send what is for other hosts."""
        hierarchy = self._hierarchy
        self._held = self._send_to_rails()
        if hierarchy.bridge is not None:
            every = range(len(self._hosts))
            sent = [sum(map(self._bytes_to(host), self._users(hierarchy.local_rank))) for host in every]
            expected = [self._bytes_from(host, hierarchy.local_rank) for host in every]
            self._incoming = torch.empty(sum(expected), dtype=torch.uint8)
            self._pending = hierarchy.bridge.exchange(
                self._incoming, expected, self._held, sent, self._call.timeout_s
            )

    def finish(self) -> None:
        """Distribute what has arrived."""
        if self._pending is not None:
            self._hierarchy.wait(self._pending, self._call)
        self._deliver(self._incoming)

    # -- which rank uses which rail

    def _users(self, rail: int) -> range:
        """Return the local ranks of this host that send over a rail."""
        return range(rail, len(self._hierarchy.here), self._hosts.rails)

    def _senders(self, host: int, rail: int) -> tuple[int, ...]:
        """Return the ranks of another host that send over a rail."""
        return self._hosts.members[host][rail :: self._hosts.rails]

    def _bytes_to(self, host: int) -> _Count:
        return _Count(self._sent, () if host == self._hierarchy.host else self._hosts.members[host])

    def _bytes_from(self, host: int, rail: int) -> int:
        """Return how much comes to this host from another over a rail."""
        if host == self._hierarchy.host:
            return 0
        local_ranks = range(len(self._hierarchy.here))
        return sum(self._from(rank, each) for rank in self._senders(host, rail) for each in local_ranks)

    def _from(self, rank: int, local_rank: int) -> int:
        """Return how much a local rank here gets from a rank on another host."""
        return self._expected[local_rank][rank]

    # -- the steps

    def _send_to_rails(self) -> torch.Tensor:
        """Bring what is for other hosts to the ranks at the rails; return it there, by host and sender."""
        hierarchy, rails = self._hierarchy, self._hosts.rails
        elsewhere = [rank for host in self._others for rank in self._hosts.members[host]]
        own = torch.cat([memory(self._sends[rank]) for rank in elsewhere])
        local_ranks = range(len(hierarchy.here))
        totals = [sum(self._bytes_to(host)(each) for host in self._others) for each in local_ranks]
        users = self._users(hierarchy.local_rank) if hierarchy.local_rank < rails else range(0)
        boxes = {local_rank: torch.empty(totals[local_rank], dtype=torch.uint8) for local_rank in users}
        sends = [_NOTHING] * len(hierarchy.here)
        sends[hierarchy.local_rank % rails] = own
        receives = [boxes.get(local_rank, _NOTHING) for local_rank in local_ranks]
        self._exchange_here(sends, receives)
        by_host = {
            local_rank: box.split([self._bytes_to(host)(local_rank) for host in self._others])
            for local_rank, box in boxes.items()
        }
        return torch.cat(
            [_NOTHING, *(by_host[user][host] for host in range(len(self._others)) for user in users)]
        )

    def _deliver(self, incoming: torch.Tensor) -> None:
        """Give each rank here what has arrived for it, and what the ranks here have for each other."""
        hierarchy = self._hierarchy
        here, local_ranks = hierarchy.here, range(len(hierarchy.here))
        for_rank: list[list[torch.Tensor]] = [[memory(self._sends[rank])] for rank in here]
        at = 0
        if hierarchy.bridge is not None:
            for rank in self._arrivals(hierarchy.local_rank):
                for local_rank in local_ranks:
                    length = self._from(rank, local_rank)
                    for_rank[local_rank].append(incoming[at : at + length])
                    at += length
        expected = [
            [self._from(here[sender], hierarchy.local_rank)]
            + [self._from(rank, hierarchy.local_rank) for rank in self._arrivals(sender)]
            for sender in local_ranks
        ]
        arrived = [torch.empty(sum(lengths), dtype=torch.uint8) for lengths in expected]
        self._exchange_here([torch.cat(pieces) for pieces in for_rank], arrived)
        for sender, lengths, box in zip(local_ranks, expected, arrived, strict=True):
            for rank, piece in zip((here[sender], *self._arrivals(sender)), box.split(lengths), strict=True):
                memory(self._receives[rank]).copy_(piece)

    def _arrivals(self, local_rank: int) -> Iterator[int]:
        """Return the ranks on other hosts that send to a local rank here, in order of arrival."""
        if local_rank >= self._hosts.rails:
            return iter(())
        return (rank for host in self._others for rank in self._senders(host, local_rank))

    def _exchange_here(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        call = self._call
        plan = self._hierarchy.plan(ALL_TO_ALL, call)
        self._hierarchy.local.collective(plan, sends, receives, call.timeout_s, call.site)


class _Count:
    """The number of bytes that a local rank sends to some ranks."""

    def __init__(self, sent: list[list[int]], ranks: Sequence[int]) -> None:
        self._sent = sent
        self._ranks = ranks

    def __call__(self, local_rank: int) -> int:
        return sum(self._sent[local_rank][rank] for rank in self._ranks)


_NOTHING = torch.empty(0, dtype=torch.uint8)


def memory(address_and_length: tuple[int, int], keep: object = None) -> torch.Tensor:
    """Return the bytes at an address as a tensor, which keeps ``keep`` alive, and not the memory itself."""
    address, length = address_and_length
    if length == 0:
        return _NOTHING
    buffer = (ctypes.c_uint8 * length).from_address(address)
    setattr(buffer, "keep", keep)  # noqa: B010
    return torch.frombuffer(buffer, dtype=torch.uint8)
