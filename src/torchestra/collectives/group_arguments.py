"""The arguments of the public functions that name a group or ranks: found, or refused in torch's words."""

from __future__ import annotations

import warnings

from torchestra.arguments.annotations import refuse_type
from torchestra.errors import InvalidArgumentError, shown
from torchestra.process_group import NonMember, ProcessGroup
from torchestra.tensors import checks
from torchestra.world.init import AnyGroup, get_rank, is_initialized


def warn_not_in_group(group: NonMember, name: str, stacklevel: int = 4) -> None:
    """Warn, in torch's words and at the calling line, that a function does nothing on this rank."""
    rank = get_rank() if is_initialized() else -1
    warnings.warn(
        f"Running {name} on global rank {rank} which does not belong to the given group: this rank is"
        f" {group!r}. Nothing is done.",
        stacklevel=stacklevel,
    )


def member_of(group: AnyGroup, name: str, stacklevel: int = 4) -> ProcessGroup | None:
    """Return the group, or None with a warning if this rank is not in it."""
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, NonMember):
        warn_not_in_group(group, name, stacklevel)
        return None
    return refuse_type(name, "group", "a ProcessGroup", group)


def root_of(
    group: ProcessGroup,
    rank: int | None,
    group_rank: int | None,
    parameter: str,
    name: str,
    default: int | None = None,
) -> int:
    """Return the root in the group's numbering, from a global or a group rank."""
    if group_rank is None and rank is not None:
        if rank.__class__ is int and 0 <= rank < group.same_numbers:
            return rank
        return group.to_group_rank(rank, parameter, name)
    if rank is not None:
        raise InvalidArgumentError(
            f"{name}: give `{parameter}` or `group_{parameter}`, not both; got {shown(rank)} and"
            f" {shown(group_rank)}"
        )
    if group_rank is not None:
        return checks.check_rank(group_rank, group.size(), f"group_{parameter}", name)
    if default is None:
        raise InvalidArgumentError(f"{name}: give `{parameter}` or `group_{parameter}`")
    return default


def sender_of(group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int | None:
    """Return the rank to receive from in the group's numbering, or None for any."""
    if rank is None and group_rank is None:
        return None
    return root_of(group, rank, group_rank, "src", name)
