"""Groups that are made of others: of some ranks of a group, or of the ranks of several groups.

The methods have the names and arguments of torch's ``ProcessGroup``, and need no default group.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from torchestra.arguments.annotations import checked
from torchestra.arguments.options import GroupOptions
from torchestra.errors import InvalidArgumentError, shown
from torchestra.store import PrefixStore, Store
from torchestra.types import DEFAULT_TIMEOUT, Timeout, timeout_seconds

_Group = TypeVar("_Group", bound="SplitMethods")


class NewGroup(NamedTuple):
    """This rank's place in a group to be made.

    Attributes:
        store: the store in which its ranks meet.
        rank: this rank's number in it.
        ranks: the global ranks, by number.
        name: of the group.
    """

    store: Store
    rank: int
    ranks: Sequence[int]
    name: str


class SplitMethods:
    """Makes groups of some of a group's ranks, and of its ranks and those of others."""

    store: Store
    ranks: Sequence[int]
    group_desc: str
    # How often this rank has been in each part, and in each merged group: the members agree on it.
    _times_made: Counter[str]

    @checked
    def split_group(
        self: _Group,
        ranks: Sequence[int],
        timeout: Timeout | None = None,
        opts: GroupOptions | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[Any] | None = None,
    ) -> _Group | None:
        """Make a group of some ranks of this one, without a default group. The members must call this.

        :func:`torchestra.split_group` makes all parts at once, and the package knows them.

        Args:
            ranks: numbers in this group; the members keep their order.
            timeout: for operations of the new group, and for meeting; default: that of ``opts``, or this
                group's.
            opts: its options.
            group_name: its name, which must be new; default: this group's, and the ranks.
            group_desc: a description; default: this group's, and ``:split``.
            device_types: ignored: the part serves the devices that this group does.

        Returns:
            The group, which the program destroys; None on a rank that is not in it.

        Raises:
            InvalidArgumentError: ``ranks`` is empty, repeats, or names a rank that the group does not have.
            CollectiveTimeoutError: a member did not call this in time.
        """
        label = f"{self.group_name}:split:{'-'.join(map(str, sorted(ranks)))}"
        name = group_name or f"{label}:{self._times_made[label] + 1}"
        membership = member_of_part(self.store, self.rank(), self.ranks, ranks, name)
        if membership is None:
            return None
        self._times_made[label] += 1
        options = GroupOptions(self.timeout) if opts is None else opts
        return self._make_group(membership, options, timeout, group_desc or f"{self.group_desc}:split")

    @checked
    def merge_remote_group(
        self: _Group,
        store: Store,
        size: int,
        timeout: Timeout = DEFAULT_TIMEOUT,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> _Group:
        """Make a group of the ranks of this one and of other groups. All ranks of all of them must call this.

        They may be parts of one world, or of worlds that know nothing of each other. The groups are ordered
        by their global ranks, or else as they came; ranks keep their order within. The groups stay.

        Args:
            store: shared by all the ranks, and used for no other merge under this name.
            size: how many ranks the groups have together.
            timeout: for operations of the new group, and for meeting.
            group_name: of the new group, the same on all ranks; default: ``"merged"``.
            group_desc: its description.

        Returns:
            The group, which the program destroys.

        Raises:
            InvalidArgumentError: the groups that came have more than ``size`` ranks.
            StoreTimeoutError, CollectiveTimeoutError: not all ranks came in time.
        """
        if size < len(self.ranks):
            raise InvalidArgumentError(
                f"merge_remote_group: `size` must be the number of ranks of all groups, and this one has"
                f" {len(self.ranks)}; got {shown(size)}"
            )
        name = group_name or "merged"
        limit = timedelta(seconds=timeout_seconds(timeout, "merge_remote_group"))
        self._times_made[name] += 1
        key = f"{self.group_name}:merge:{name}:{self._times_made[name]}"
        membership = member_of_merged(store, size, limit, name, self.rank(), self.ranks, self.store, key)
        return self._make_group(membership, GroupOptions(limit), None, group_desc or "merged")

    # -- of the group

    def rank(self) -> int:
        """Return this rank's number."""
        raise NotImplementedError

    @property
    def group_name(self) -> str:
        """Return the group's name."""
        raise NotImplementedError

    @property
    def timeout(self) -> timedelta:
        """Return the time-out of operations."""
        raise NotImplementedError

    def _make_group(
        self: _Group, membership: NewGroup, options: GroupOptions, timeout: Timeout | None, description: str
    ) -> _Group:
        """Make a group that this rank is a member of."""
        raise NotImplementedError


def member_of_part(
    store: Store, rank: int, ranks: Sequence[int], chosen: Sequence[int], name: str
) -> NewGroup | None:
    """Return a rank's membership in a part of its group; None if it is not in it.

    Args:
        store: the group's.
        rank, ranks: this rank's number in the group, and the global ranks of all.
        chosen: the part, by numbers in the group.
        name: of the part.

    Raises:
        InvalidArgumentError: ``chosen`` is empty, repeats, or names a rank that the group does not have.
    """
    members = sorted(chosen)
    if not members or len(set(members)) != len(members) or members[0] < 0 or members[-1] >= len(ranks):
        raise InvalidArgumentError(
            f"split_group: `ranks` must be different ranks of the group (0 to {len(ranks) - 1}), at least"
            f" one; got {shown(chosen)}"
        )
    if rank not in members:
        return None
    own = PrefixStore(name, store)
    return NewGroup(own, members.index(rank), [ranks[member] for member in members], name)


def member_of_merged(
    store: Store,
    size: int,
    limit: timedelta,
    name: str,
    rank: int,
    ranks: Sequence[int],
    told: Store,
    key: str,
) -> NewGroup:
    """Return a rank's membership in a group that several groups merge into. All ranks of all groups call it.

    Rank 0 of each group takes a number and writes its global ranks under it; every rank reads the numbers
    from 0 until the ranks are ``size``, so all read the same, and order the groups by their ranks.

    Args:
        store: shared by all ranks.
        size: the number of ranks of all groups together.
        limit: how long to wait for the other groups.
        name: of the merged group.
        rank, ranks: this rank's number in its group, and the global ranks of that.
        told, key: where the rank 0 of this group tells the others its number.

    Raises:
        InvalidArgumentError: the groups that came have more than ``size`` ranks.
        StoreTimeoutError: not all groups came in time.
    """
    own = PrefixStore(f"merge/{name}", store)
    if rank == 0:
        taken = own.add("numbers", 1) - 1
        own.set(f"group/{taken}", json.dumps(list(ranks)))
        told.set(key, str(taken))
    else:
        told.wait([key], limit)
        taken = int(told.get(key))
    groups: list[tuple[list[int], int]] = []
    while (found := sum(len(each) for each, _ in groups)) < size:
        number = len(groups)
        own.wait([f"group/{number}"], limit)
        groups.append((json.loads(own.get(f"group/{number}")), number))
    if found > size:
        raise InvalidArgumentError(
            f"merge_remote_group: groups of {[len(each) for each, _ in groups]} ranks came, but `size` is"
            f" {size}; it must be the number of ranks of all groups together"
        )
    groups.sort()
    before = sum(len(each) for each, number in groups[: [number for _, number in groups].index(taken)])
    everyone = [member for each, _ in groups for member in each]
    apart = len(set(everyone)) == size  # global ranks of several worlds say nothing
    return NewGroup(own, before + rank, everyone if apart else range(size), name)
