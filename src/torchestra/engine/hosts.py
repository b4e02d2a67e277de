"""The table of a group's ranks and hosts."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from torchestra.store.unreadable import unpacked

_MAX_BYTES = 1 << 28  # that it can have before it is packed


class Hosts:
    """The hosts of a group, in the order of their lowest ranks.

    Properties are computed when first used, for a group may have thousands of ranks, most of which only need
    to know the ranks on their own host.

    Args:
        members: by host, the ranks on it.
        names: by host, its name; hosts with the same name get numbers.

    Attributes:
        members: by host, the ranks on it, in ascending order.
        host_of: by rank, the index of its host.
        local_rank_of: by rank, its number among the ranks of its host.
        rails: how many ranks the smallest host has. Rail ``r`` joins local rank ``r`` of every host (NCCL's
            word); a larger host's remaining ranks move nothing between hosts.
    """

    def __init__(self, members: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        order = sorted(range(len(members)), key=lambda host: min(members[host]))
        called = [names[host] for host in order]
        times = Counter(called)
        self.names = tuple(name if times[name] == 1 else f"{name}:{host}" for host, name in enumerate(called))
        self._table: npt.NDArray[np.uint32] = np.zeros(sum(map(len, members)), dtype=np.uint32)
        for host, index in enumerate(order):
            self._table[list(members[index])] = host
        self._count_rails()

    def _count_rails(self) -> None:
        self.size = len(self._table)
        self.rails = int(np.bincount(self._table).min())

    @cached_property
    def host_of(self) -> list[int]:
        hosts: list[int] = self._table.tolist()
        return hosts

    @cached_property
    def local_rank_of(self) -> list[int]:
        local_ranks = [0] * self.size
        for ranks in self.members:
            for local_rank, rank in enumerate(ranks):
                local_ranks[rank] = local_rank
        return local_ranks

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(self.on, range(len(self))))

    @cached_property
    def _by_host(self) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64]]:
        """The ranks, those of each host together, and by host where they end; None: in ascending order."""
        in_order = bool((self._table[:-1] <= self._table[1:]).all())
        ranks = None if in_order else np.argsort(self._table, kind="stable")
        return ranks, np.cumsum(np.bincount(self._table))

    def host_at(self, rank: int) -> int:
        """Return the same as ``host_of[rank]``, for callers that need it of one rank only."""
        return int(self._table[rank])

    def on(self, host: int) -> tuple[int, ...]:
        """Return the ranks on a host, in ascending order."""
        ranks, ends = self._by_host
        begin, end = int(ends[host - 1]) if host else 0, int(ends[host])
        return tuple(range(begin, end) if ranks is None else ranks[begin:end].tolist())

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Hosts)
            and self.names == other.names
            and bool(np.array_equal(self._table, other._table))
        )

    def __hash__(self) -> int:
        return hash((self._table.tobytes(), self.names))

    def among(self, ranks: Sequence[int]) -> Hosts:
        """Return the hosts of a subgroup that has these ranks of this group, numbered in this order."""
        members: dict[int, list[int]] = {}
        for index, rank in enumerate(ranks):
            members.setdefault(self.host_of[rank], []).append(index)
        return Hosts(list(members.values()), [self.names[host] for host in members])

    def describe(self, rank: int) -> str:
        """Return a rank and its host, for messages."""
        return f"rank {rank} on host {self.names[self.host_of[rank]]}"

    def encode(self) -> bytes:
        """Pack the table, for :meth:`decode`."""
        return zlib.compress("\0".join(self.names).encode() + b"\0\0" + self._table.tobytes())

    @classmethod
    def decode(cls, packed: bytes) -> Hosts:
        """Read the output of :meth:`encode`.

        Raises:
            ValueError, zlib.error: it is something else.
        """
        names, _, table = unpacked(packed, _MAX_BYTES).partition(b"\0\0")
        made = cls.__new__(cls)
        made.names = tuple(names.decode().split("\0"))
        made._table = np.frombuffer(table, dtype=np.uint32)
        hosts = len(made.names)
        ranks = made._table
        # Not np.unique, which imports numpy.ma at its first call: 50 ms, for which a whole job waits.
        if not len(ranks) or ranks.max() >= hosts or not np.bincount(ranks, minlength=hosts).all():
            raise ValueError("a host without ranks, or ranks without a host")
        made._count_rails()
        return made
