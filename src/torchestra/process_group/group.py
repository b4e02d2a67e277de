"""A group of ranks: its members, its name, and the communicator that its operations run on."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from datetime import timedelta
from typing import Any, ClassVar

import torch

from torchestra.arguments.annotations import check_integer, checked
from torchestra.arguments.options import GroupOptions
from torchestra.communicator.communicator import Communicator
from torchestra.engine.membership.arena_transfer import leave_store
from torchestra.errors import InvalidArgumentError, shown
from torchestra.process_group.existing import remember
from torchestra.process_group.growing import GroupAdmission
from torchestra.process_group.membership_methods import MembershipMethods
from torchestra.process_group.message_methods import MessageMethods
from torchestra.process_group.methods import CollectiveMethods
from torchestra.process_group.reconfiguring import ReconfigureMethods
from torchestra.process_group.shrinking import NewMembership
from torchestra.process_group.splitting import NewGroup, SplitMethods
from torchestra.process_group.starting import choose_backend, start_unregistered
from torchestra.process_group.torch_names import BackendNames
from torchestra.store import Store
from torchestra.types import Timeout, timeout_seconds

_LARGEST_RANK = (1 << 31) - 1

GroupMaker = Callable[[Store, Sequence[int], int, str, float], "ProcessGroup"]
"""Makes a group; takes a store, the global ranks, this rank's number among them, a name and a time-out."""


class ProcessGroup(
    CollectiveMethods, BackendNames, MessageMethods, SplitMethods, ReconfigureMethods, MembershipMethods
):
    """A set of ranks that run collectives together, in the same order on all of them.

    Made by :func:`torchestra.init_process_group` and :func:`torchestra.new_group`; or directly, with or
    without a default group, by every rank of the group: the constructor returns when all have come. A group
    that was made directly is left by :meth:`destroy`, or when nothing refers to it any more.

    Ranks are numbered anew in every group; a *global* rank, which some functions of this package take, is
    the number in the default group. The methods in torch's C++ form (``allreduce`` and so on) take the
    group's numbers.

    Args:
        store: a store that all ranks of the group share. Several groups may be made over one store, in
            the same order on all ranks.
        rank, size: this rank's number, and how many ranks there are.
        options: :class:`GroupOptions`, or just a time-out.
        timeout: for the group's operations and for meeting the others, instead of ``options.timeout``.
        name: of the group, instead of ``options.group_name``.
        ranks: the global ranks, in the order of their numbers here; default: 0 to ``size - 1``.
        description: of the group, for people.
        communicator: the communicator, if the ranks have met already; else they meet now.

    Raises:
        InvalidArgumentError: an argument is wrong.
        CollectiveTimeoutError: not all ranks came in time; names those that did not.

    Attributes:
        same_numbers: how many ranks, if each has the same number in the group as in the world; else 0.
        previous_ranks: in a group made by :meth:`shrink`, each rank's number in the group before.
        lost_ranks: the ranks that were lost, by their numbers in the group before.
        generation: how often it has been shrunk or grown.
        joined_ranks: in a group made by :meth:`grow`, the ranks that were let in.
        successor: the group by which :meth:`shrink` or :meth:`grow` has replaced this one; None before.
        known_as: the program's name for the backend.
        when_shrunk: called with this group and its successor; set by the registry.
        admission: this rank's view of those that wait to be let in; None if nobody can be.
        maker: the function that made this group and makes its subgroups, if it is not torchestra's own.
        bound_device_id: the CUDA device that the group was given as ``device_id``.
    """

    Options: ClassVar[type[GroupOptions]] = GroupOptions
    communicator: Communicator
    maker: GroupMaker | None = None
    bound_device_id: torch.device | None = None

    @checked
    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        options: GroupOptions | Timeout | None = None,
        *,
        timeout: Timeout | None = None,
        name: str | None = None,
        ranks: Sequence[int] | None = None,
        description: str = "undefined",
        communicator: Any = None,
    ) -> None:
        if not 0 <= rank < size:
            raise InvalidArgumentError(
                f"ProcessGroup: rank {shown(rank)} is not one of 0 to {shown(size - 1)}"
            )
        if isinstance(options, GroupOptions):
            chosen = options
        else:
            chosen = GroupOptions() if options is None else GroupOptions(options)
        seconds = timeout_seconds(chosen.timeout if timeout is None else timeout, "ProcessGroup")
        numbers = range(size) if ranks is None else ranks
        self.ranks = numbers if isinstance(numbers, range) else tuple(numbers)
        if len(self.ranks) != size or (communicator is None and not _are_ranks(self.ranks)):
            raise InvalidArgumentError(
                f"ProcessGroup: `ranks` must be {size} different ranks, from 0, got {shown(ranks)}"
            )
        self.backend = self.known_as = choose_backend(chosen.backend)
        self.store = store
        self.group_desc = description
        # A range finds a rank's number without a search, and takes no memory.
        self._group_rank = (
            {} if isinstance(self.ranks, range) else {rank: index for index, rank in enumerate(self.ranks)}
        )
        self._threads, self._devices = chosen.threads, tuple(chosen.devices)
        self.previous_ranks: Sequence[int] = range(size)
        self.lost_ranks: tuple[int, ...] = ()
        self.generation = 0
        self._times_made = Counter()
        self._member_ids: tuple[int, ...] | None = None
        self.joined_ranks: tuple[int, ...] = ()
        self.admission: GroupAdmission | None = None
        self.successor: ProcessGroup | None = None
        self.when_shrunk: Callable[[ProcessGroup, ProcessGroup], None] | None = None
        if communicator is not None:
            self.communicator = communicator
        else:
            named = name or chosen.group_name
            self.communicator = start_unregistered(store, rank, size, named, seconds, chosen.backend)
            self._leave_at_last()
        self.name_ranks()
        remember(self)

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks, by number."""
        return self._ranks

    @ranks.setter
    def ranks(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self.same_numbers = len(ranks) if ranks == range(len(ranks)) else 0

    def rank(self) -> int:
        """This rank's number in the group."""
        return self.communicator.rank

    def size(self) -> int:
        """Return how many ranks the group has."""
        return self.communicator.size

    def name(self) -> str:
        """The backend's name (torch's word for it)."""
        return self.known_as

    @property
    def member_ids(self) -> tuple[int, ...]:
        """Return by number the member id, which a rank keeps while the group is shrunk and grown."""
        # While it never has been, they are the numbers: 4 MB for 100,000 ranks, which few callers want.
        return tuple(range(len(self.ranks))) if self._member_ids is None else self._member_ids

    @member_ids.setter
    def member_ids(self, ids: tuple[int, ...]) -> None:
        self._member_ids = ids

    @property
    def group_name(self) -> str:
        """The group's name, the same on all its ranks and unlike that of any other group."""
        return self.communicator.name

    @property
    def timeout(self) -> timedelta:
        """Return how long an operation may wait for the other ranks."""
        return timedelta(seconds=self.communicator.timeout_s)

    @checked
    def set_timeout(self, timeout: Timeout) -> None:
        """Change how long later operations may wait. Concerns this rank only."""
        self.communicator.timeout_s = timeout_seconds(timeout)

    @property
    def options(self) -> GroupOptions:
        """Return a copy of the options that the group was made with, and its present time-out."""
        return GroupOptions(self.timeout, self._threads, self._devices, self.backend, self.group_name)

    def get_group_store(self) -> Store:
        """The store that the group was made over."""
        return self.store

    def get_sequence_number_for_group(self) -> int:
        """Return how many operations of the whole group this rank has called, those still queued included.

        If all ranks have called the same operations, it is the same on all. Messages are not counted.
        """
        return self.communicator.queue.sequence_number()

    def _get_sequence_number_for_group(self) -> int:
        return self.get_sequence_number_for_group()

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the ranks' sequence numbers have agreed since the group was made."""

    def _set_default_timeout(self, timeout: Timeout) -> None:
        self.set_timeout(timeout)

    def to_group_rank(
        self, global_rank: int, parameter: str = "global_rank", name: str = "to_group_rank"
    ) -> int:
        """Return the number in this group of a global rank.

        Args:
            global_rank: the rank.
            parameter, name: the argument and the function, for messages.

        Raises:
            InvalidArgumentError: it is not in this group.
        """
        if global_rank.__class__ is not int:
            global_rank = check_integer(global_rank, parameter, name)
        ranks = self.ranks
        if isinstance(ranks, range):
            rank = ranks.index(global_rank) if global_rank in ranks else None
        else:
            rank = self._group_rank.get(global_rank)
        if rank is None:
            raise InvalidArgumentError(
                f"{name}: `{parameter}`: global rank {shown(global_rank)} is not part of group"
                f" {self.group_name!r}, which has global ranks {list(ranks)}"
            )
        return rank

    def to_global_rank(
        self, group_rank: int, parameter: str = "group_rank", name: str = "to_global_rank"
    ) -> int:
        """Return the global number of a rank of this group.

        Raises:
            InvalidArgumentError: the group has no such rank.
        """
        if group_rank.__class__ is not int:
            group_rank = check_integer(group_rank, parameter, name)
        if not 0 <= group_rank < len(self.ranks):
            raise InvalidArgumentError(
                f"{name}: `{parameter}`: group rank {shown(group_rank)} is not part of group"
                f" {self.group_name!r}, which has"
                f" {self.size()} ranks"
            )
        return self.ranks[group_rank]

    def renumber(self, global_ranks: Mapping[int, int]) -> tuple[int, ...]:
        """Take over new global numbers, mapped from the old ones; -1 for a rank that the world has lost.

        Returns:
            The numbers in this group of the lost ranks.
        """
        ranks = [global_ranks.get(rank, -1) for rank in self.ranks]
        self.ranks = range(len(ranks)) if ranks == list(range(len(ranks))) else tuple(ranks)
        self._group_rank = {rank: index for index, rank in enumerate(ranks) if rank >= 0}
        self.name_ranks()
        return tuple(index for index, rank in enumerate(ranks) if rank < 0)

    def name_ranks(self) -> None:
        """Have errors name the global ranks as well, where these are others; once the members have met."""
        if self.communicator.has_met:
            self.communicator.engine.name_ranks(() if self.same_numbers else self.ranks)

    def become(self, store: Store, ranks: Sequence[int], name: str, backend: str, seconds: float) -> None:
        """Take over the world's store, ranks and names for a group that a ``GroupMaker`` has made."""
        self.store, self.ranks = store, ranks
        self._group_rank = {rank: index for index, rank in enumerate(ranks)}
        self.backend = self.known_as = backend
        self.name_ranks()
        self.communicator.name, self.communicator.timeout_s = name, seconds

    def _successor(self, made: NewMembership) -> ProcessGroup:
        ranks = [-1 if rank < 0 else self.ranks[rank] for rank in made.survivors]
        new = group_of(made, type(self), self.options, self.group_desc, self._next_name(), ranks)
        new.generation = self.generation + 1
        if made.offer is None:
            new.member_ids = tuple(self.member_ids[rank] for rank in made.survivors)
            new.lost_ranks = tuple(sorted(set(range(self.size())).difference(made.survivors)))
        if self.reconfiguration is not None:
            self.reconfiguration.keep(made.survivors)
            new.reconfiguration, new.when_reconfigured = self.reconfiguration, self.when_reconfigured
        if self.admission is not None:
            let_in = () if made.offer is None else made.offer.joiners
            new.admission = self.admission.of_successor(new.communicator, let_in)
        return new

    def _make_group(
        self, membership: NewGroup, options: GroupOptions, timeout: Timeout | None, description: str
    ) -> ProcessGroup:
        if self.maker is not None:
            raise InvalidArgumentError(
                f"group {self.group_name!r} of backend {self.backend!r} can be neither split nor merged here"
            )
        store, rank, ranks, name = membership
        if options.backend is None:
            options = copy(options)
            options.backend = self.backend
        return ProcessGroup(
            store, rank, len(ranks), options, timeout=timeout, name=name, ranks=ranks, description=description
        )

    def _leave_at_last(self) -> None:
        """Have the group left when nothing refers to this object any more."""
        # At exit the memory is freed anyway, and peers that wait are told that the rank has ended.
        weakref.finalize(self, _leave, self.communicator, os.getpid()).atexit = False

    def destroy(self) -> None:
        """Leave the group. Peers that wait for this rank, now or later, get an error.

        The rank that serves the store of a group made by :meth:`shrink` waits up to 3 s for the others to
        leave theirs.
        """
        self.communicator.close()
        if self.admission is not None:
            self.admission.leave()
        if self.generation:
            leave_store(self.store)
        if self.reconfiguration is not None:
            self.reconfiguration.close()

    def abort(self) -> None:
        """Have all operations of the group, under way on any rank or called later, fail at once.

        Any single rank may call it. The others get a GroupAbortedError.
        """
        self.communicator.abort(f"rank {self.communicator.rank} has called abort_process_group()")

    def shutdown(self) -> None:
        """See :meth:`destroy`; torch's name for it."""
        self.destroy()

    def __repr__(self) -> str:
        rank = f"rank {self.rank()} of {self.size()}"
        return f"<ProcessGroup {self.group_name!r}: {rank}, backend {self.backend!r}>"


def group_of(
    made: NewMembership,
    kind: type[ProcessGroup],
    options: GroupOptions,
    description: str,
    name: str,
    ranks: Sequence[int],
) -> ProcessGroup:
    """Return a group of this rank's part in it: it has replaced another, or been joined."""
    options.group_name = name
    communicator = made.communicator
    rank, size = communicator.rank, communicator.size
    new = kind(
        made.store, rank, size, options, ranks=ranks, description=description, communicator=communicator
    )
    new.previous_ranks = made.survivors
    if (offer := made.offer) is not None:
        new.generation, new.member_ids, new.lost_ranks = offer.terms.generation, offer.members, offer.lost
        new.joined_ranks = tuple(sorted(offer.joiners.values()))
    return new


def _are_ranks(ranks: Sequence[int]) -> bool:
    if isinstance(ranks, range):
        return not ranks or min(ranks[0], ranks[-1]) >= 0
    return len(set(ranks)) == len(ranks) and min(ranks) >= 0 and max(ranks) <= _LARGEST_RANK


def _leave(communicator: Communicator, process: int) -> None:
    """Leave a group that nothing refers to any more, except in a process that was forked from the rank."""
    if os.getpid() == process and not communicator.closed:
        communicator.close()
