"""A group of ranks: who is in it, under which name, and the communicator that its operations run on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torchestra.communicator import Communicator
from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError
from torchestra.store import Store
from torchestra.types import Timeout, timeout_seconds

__all__ = ["NonMember", "ProcessGroup"]


class ProcessGroup:
    """Some ranks of the world that run collectives together, in an order that all of them share.

    Made by :func:`torchestra.init_process_group` and :func:`torchestra.new_group`, never directly. Ranks are
    numbered anew in every group; where a function of this package takes a *global* rank, it is the number in
    the default group.
    """

    def __init__(
        self,
        communicator: Communicator,
        ranks: Sequence[int],
        *,
        backend: str,
        store: Store,
        description: str,
    ) -> None:
        self.communicator = communicator
        # A range tells where a rank is without being searched, and takes no room.
        self.ranks: Sequence[int] = ranks if isinstance(ranks, range) else tuple(ranks)
        self.backend = backend
        self.store = store
        self.group_desc = description
        self._group_rank = (
            {} if isinstance(ranks, range) else {rank: index for index, rank in enumerate(self.ranks)}
        )

    def rank(self) -> int:
        """This rank's number in the group."""
        return self.communicator.rank

    def size(self) -> int:
        """How many ranks the group has."""
        return self.communicator.size

    def name(self) -> str:
        """The backend's name (torch's word for it)."""
        return self.backend

    @property
    def group_name(self) -> str:
        """The group's name, the same on all its ranks and unlike that of any other group."""
        return self.communicator.name

    @property
    def timeout(self) -> timedelta:
        """How long an operation may wait for the other ranks."""
        return timedelta(seconds=self.communicator.seconds)

    def set_timeout(self, timeout: Timeout) -> None:
        """Change how long later operations may wait. Concerns this rank only."""
        self.communicator.seconds = timeout_seconds(timeout)

    def to_group_rank(self, global_rank: int, parameter: str = "global_rank") -> int:
        """The number in this group of a global rank.

        Raises:
            InvalidArgumentError: it is not in this group.
        """
        try:
            if isinstance(self.ranks, range):
                rank = self.ranks.index(global_rank) if global_rank in self.ranks else None
            else:
                rank = self._group_rank.get(global_rank)
        except TypeError:
            rank = None
        if rank is None:
            if not isinstance(global_rank, int):
                raise InvalidArgumentTypeError(f"`{parameter}` must be an int, got {global_rank!r}")
            raise InvalidArgumentError(
                f"`{parameter}`: global rank {global_rank!r} is not part of group {self.group_name!r},"
                f" which has global ranks {list(self.ranks)}"
            )
        return rank

    def to_global_rank(self, group_rank: int) -> int:
        """The global number of a rank of this group.

        Raises:
            InvalidArgumentError: the group has no such rank.
        """
        if not 0 <= group_rank < len(self.ranks):
            raise InvalidArgumentError(
                f"group rank {group_rank!r} is not part of group {self.group_name!r}, which has"
                f" {self.size()} ranks"
            )
        return self.ranks[group_rank]

    def destroy(self) -> None:
        """Leave the group. Peers that wait for this rank, now or later, get an error."""
        self.communicator.close()

    def __repr__(self) -> str:
        place = f"rank {self.rank()} of {self.size()}"
        return f"<ProcessGroup {self.group_name!r}: {place}, backend {self.backend!r}>"


class NonMember:
    """What :func:`torchestra.new_group` returns on a rank that is not in the new group.

    Operations on it do nothing but warn; its rank and size are -1.
    """

    def __init__(self, ranks: Sequence[int], name: str) -> None:
        self.ranks = tuple(ranks)
        self.group_name = name

    def rank(self) -> int:
        """-1."""
        return -1

    def size(self) -> int:
        """-1."""
        return -1

    def __repr__(self) -> str:
        return f"<no member of group {self.group_name!r}, which has global ranks {list(self.ranks)}>"
