"""Several groups at once: the world, or a group, cut into parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchestra.arguments.annotations import checked
from torchestra.arguments.options import GroupOptions
from torchestra.errors import InvalidArgumentError
from torchestra.process_group import NonMember, ProcessGroup
from torchestra.types import Timeout
from torchestra.world.init import AnyGroup, GroupTerms, default_group
from torchestra.world.new_groups import make_groups, make_parts
from torchestra.world.registry import current_world


@checked
def new_subgroups(
    group_size: int | None = None,
    group: AnyGroup | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: GroupOptions | None = None,
    group_desc: str | None = None,
) -> tuple[AnyGroup, list[AnyGroup]]:
    """Cut a group into subgroups of equal size, of consecutive ranks. Must be called by all its ranks.

    Args:
        group_size: ranks per subgroup, a divisor of the group's size; default: the number of CUDA devices.
        group: the group to cut; default: the default group.
        timeout, backend, pg_options, group_desc: as for :func:`torchestra.new_group`, for each subgroup.

    Returns:
        The subgroup that this rank is in, and all subgroups (a :class:`NonMember` for each of the others).

    Raises:
        InvalidArgumentError: the group's size is not a multiple of ``group_size``, or this rank is not in it.
        CollectiveMismatchError: another rank has given another ``group_size``.
    """
    if group_size is None:
        if not torch.cuda.is_available():
            raise InvalidArgumentError(
                "new_subgroups: Default group size only takes effect when CUDA is available. If your subgroup"
                " using a backend that does not depend on CUDA, please pass in 'group_size' correctly."
            )
        group_size = torch.cuda.device_count()
    if not isinstance(group_size, int) or group_size <= 0:
        raise InvalidArgumentError(f"new_subgroups: The arg 'group_size' ({group_size}) must be positive")
    parent = _parent(group, "new_subgroups")
    size = parent.size()
    if size < group_size:
        raise InvalidArgumentError(
            f"new_subgroups: The arg 'group_size' ({group_size}) must not exceed the world size ({size})"
        )
    if size % group_size:
        raise InvalidArgumentError(
            f"new_subgroups: The world size ({size}) must be divisible by '{group_size=}'"
        )
    parts = [sorted(parent.ranks[start : start + group_size]) for start in range(0, size, group_size)]
    terms = GroupTerms(timeout, backend, pg_options)
    if parent is current_world().default:
        subgroups = make_groups("new_subgroups", parts, terms, group_desc)
    else:  # other groups may be cut at the same time, by other ranks
        subgroups = make_parts("new_subgroups", parent, parts, terms, group_desc or "undefined")
    return subgroups[parent.rank() // group_size], subgroups


@checked
def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]] | None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: GroupOptions | None = None,
    group_desc: str | None = None,
) -> tuple[AnyGroup | None, list[AnyGroup]]:
    """Make a group from each of several lists of global ranks. Must be called by every rank of the world.

    No rank may be in two of the lists; a rank may be in none.

    Returns:
        The subgroup that this rank is in, or None, and all subgroups (a :class:`NonMember` for each of the
        others).

    Raises:
        InvalidArgumentError: there are no lists, :func:`torchestra.new_group` does not take one of them, or a
            rank is in two of them.
        CollectiveMismatchError: another rank has given other lists.
    """
    if not ranks_per_subgroup_list:
        raise InvalidArgumentError(
            "new_subgroups_by_enumeration: The arg 'ranks_per_subgroup_list' cannot be empty"
        )
    size = default_group().size()
    seen: dict[int, Sequence[int]] = {}
    for ranks in ranks_per_subgroup_list:
        for rank in ranks:
            if rank in seen:
                raise InvalidArgumentError(
                    f"new_subgroups_by_enumeration: Rank {rank} has appeared in both subgroup"
                    f" {seen[rank]} and {ranks}"
                )
            if not isinstance(rank, int) or not 0 <= rank < size:
                raise InvalidArgumentError(
                    f"Rank {rank} is out of range. Valid ranks are 0 to {size - 1} (world_size={size})"
                )
            seen[rank] = ranks
    terms = GroupTerms(timeout, backend, pg_options)
    subgroups = make_groups("new_subgroups_by_enumeration", ranks_per_subgroup_list, terms, group_desc)
    own = next((group for group in subgroups if not isinstance(group, NonMember)), None)
    return own, subgroups


@checked
def split_group(
    parent_pg: AnyGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout | None = None,
    pg_options: GroupOptions | None = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> AnyGroup:
    """Split a group. Must be called by all ranks of the group, with the same lists.

    (torch's function does this for NCCL only.)

    Args:
        parent_pg: the group to split; default: the default group.
        split_ranks: the ranks of each part, as *numbers in the group*. No rank may be in two parts; it may be
            in none. A part's ranks are numbered in their order in the group.
        timeout: for operations of the parts; default: the default group's.
        pg_options, backend: as for :func:`torchestra.new_group`.
        group_desc: a description; default: the group's, ``:split:`` and how often it has been split before.

    Returns:
        The part that this rank is in; a :class:`NonMember` if it is in none.

    Raises:
        InvalidArgumentError: the lists are empty, overlap or name ranks that the group does not have, or this
            rank is not in the group.
        CollectiveMismatchError: another rank of the group has given other lists.
    """
    if not split_ranks:
        raise InvalidArgumentError("split_group: split_ranks cannot be None or empty")
    parent = _parent(parent_pg, "split_group")
    seen: set[int] = set()
    for part in split_ranks:
        if len(part) == 0:
            raise InvalidArgumentError("split_group: the split group cannot be empty")
        if len(part) > parent.size():
            raise InvalidArgumentError(
                "split_group: the split group's size should be less or equal to the world_size set by"
                f" init_process_group: {list(part)} of a group of {parent.size()} ranks"
            )
        if len(set(part)) != len(part):
            raise InvalidArgumentError(f"split_group: the split group cannot have duplicate ranks: {part}")
        for rank in part:
            parent.to_global_rank(rank)
        if seen & set(part):
            raise InvalidArgumentError(
                f"split_group: ranks {sorted(seen & set(part))} of {list(part)} are in another split as well"
            )
        seen |= set(part)
    parts = [[parent.to_global_rank(rank) for rank in sorted(part)] for part in split_ranks]
    made = make_parts("split_group", parent, parts, GroupTerms(timeout, backend, pg_options), group_desc)
    own = next((group for group in made if not isinstance(group, NonMember)), None)
    if own is None:
        return NonMember([parent.to_global_rank(rank) for rank in seen], made[0].group_name)
    return own


def _parent(group: object, name: str) -> ProcessGroup:
    chosen = default_group() if group is None else group
    if isinstance(chosen, NonMember):
        raise InvalidArgumentError(f"{name}: this rank is {chosen!r}; only members can cut a group")
    if not isinstance(chosen, ProcessGroup):
        raise InvalidArgumentError(f"{name}: Group {chosen!r} is not registered")
    return chosen
