"""Which ranks of a group are on which host."""

from __future__ import annotations

import json
from collections.abc import Sequence

__all__ = ["Hosts"]


class Hosts:
    """The hosts of a group, in the order of their lowest ranks.

    Args:
        members: by host, the ranks on it, in ascending order.
        names: by host, what to call it; several that have one name get numbers.

    Attributes:
        members, names: those.
        host_of: by rank, the index of its host.
        place_of: by rank, its number among the ranks of its host.
        rails: how many ranks the smallest host has. Rail ``r`` joins rank ``r`` of every host; the ranks
            that a larger host has beyond move nothing between hosts.
    """

    def __init__(self, members: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        order = sorted(range(len(members)), key=lambda host: min(members[host]))
        self.members = tuple(tuple(sorted(members[host])) for host in order)
        called = [names[host] for host in order]
        self.names = tuple(
            name if called.count(name) == 1 else f"{name}:{host}" for host, name in enumerate(called)
        )
        size = sum(map(len, self.members))
        self.host_of = [0] * size
        self.place_of = [0] * size
        for host, ranks in enumerate(self.members):
            for place, rank in enumerate(ranks):
                self.host_of[rank] = host
                self.place_of[rank] = place
        self.rails = min(map(len, self.members))

    def __len__(self) -> int:
        return len(self.members)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hosts) and (self.members, self.names) == (other.members, other.names)

    def __hash__(self) -> int:
        return hash((self.members, self.names))

    def among(self, ranks: Sequence[int]) -> Hosts:
        """The hosts of a subgroup that has these ranks of this group, numbered in this order."""
        found: dict[int, list[int]] = {}
        for number, rank in enumerate(ranks):
            found.setdefault(self.host_of[rank], []).append(number)
        return Hosts(list(found.values()), [self.names[host] for host in found])

    def describe(self, rank: int) -> str:
        """A rank and its host, for messages."""
        return f"rank {rank} on host {self.names[self.host_of[rank]]}"

    def encode(self) -> bytes:
        """As text, for :meth:`decode`."""
        return json.dumps([self.members, self.names]).encode()

    @classmethod
    def decode(cls, text: bytes) -> Hosts:
        """What :meth:`encode` has written."""
        return cls(*json.loads(text))
