"""``shrink_group``: torch's public function to go on without some ranks, over :meth:`ProcessGroup.shrink`."""

from __future__ import annotations

from torchestra.arguments.annotations import checked
from torchestra.errors import DistError, InvalidArgumentError, InvalidArgumentTypeError, shown
from torchestra.process_group import ProcessGroup
from torchestra.world.init import AnyGroup, default_group

SHRINK_DEFAULT = 0x00
"""For :func:`shrink_group`: operations that this rank has begun in the group end first."""

SHRINK_ABORT = 0x01
"""For :func:`shrink_group`: operations that have been begun in the group fail."""


@checked
def shrink_group(
    ranks_to_exclude: list[int],
    group: AnyGroup | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: None = None,
) -> ProcessGroup:
    """Make a group without some ranks, which replaces the old one.

    To be called by every rank that goes on, and by no other; all give the same ranks. Those may be dead or
    alive; if others have died too, the new group is without them as well. For all else see
    :meth:`ProcessGroup.shrink`, which finds out by itself which ranks have died. Unlike torch's, it does not
    destroy other groups when it shrinks the default group: those that have lost no rank go on.

    Args:
        ranks_to_exclude: ranks, in the group's numbering; at least one.
        group: the group; default: the default group, which the new one then replaces.
        shrink_flags: with ``SHRINK_DEFAULT``, operations that this rank has begun in the group end first,
            within the group's time-out; with ``SHRINK_ABORT`` they fail at once, on all ranks.
        pg_options: must be None; this backend has no options.

    Returns:
        The new group.

    Raises:
        InvalidArgumentTypeError, InvalidArgumentError: an argument is wrong; nothing has happened.
        DistError: this rank is one of those to exclude.
        CollectiveTimeoutError, RankExcludedError, GroupDestroyedError: as from :meth:`ProcessGroup.shrink`.
    """
    _check_form(ranks_to_exclude, shrink_flags)
    if pg_options is not None:
        raise InvalidArgumentError(
            f"shrink_group: pg_options: this backend has no options, got {shown(pg_options)}"
        )
    shrunk_group = default_group() if group is None else group
    if not isinstance(shrunk_group, ProcessGroup):
        raise InvalidArgumentError(f"shrink_group: this rank is {shrunk_group!r}")
    _check_ranks(ranks_to_exclude, shrunk_group)
    if shrink_flags == SHRINK_ABORT:
        return shrunk_group.shrink(ranks_to_exclude)
    return shrunk_group.shrink_when_idle(ranks_to_exclude)


def _check_form(ranks_to_exclude: object, shrink_flags: int) -> None:
    if not isinstance(ranks_to_exclude, list):
        raise InvalidArgumentTypeError(
            f"shrink_group: `ranks_to_exclude` must be a list, got {shown(ranks_to_exclude)}"
        )
    if not ranks_to_exclude:
        raise InvalidArgumentError(
            "shrink_group: ranks_to_exclude cannot be empty, got []; to go on without whoever has died,"
            " call group.shrink()"
        )
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise InvalidArgumentError(
            f"shrink_group: Invalid shrink_flags value: {shown(shrink_flags)}. Must be SHRINK_DEFAULT"
            f" ({SHRINK_DEFAULT}) or"
            f" SHRINK_ABORT ({SHRINK_ABORT})"
        )


def _check_ranks(ranks_to_exclude: list[int], group: ProcessGroup) -> None:
    size = group.size()
    if size <= 1:
        raise InvalidArgumentError(
            f"Cannot shrink a process group with size {size}; it must have at least 2 ranks"
        )
    seen: set[int] = set()
    for index, rank in enumerate(ranks_to_exclude):
        if not 0 <= rank < size:
            raise InvalidArgumentError(
                f"shrink_group: Rank {shown(rank)} at index {index} of ranks_to_exclude is out of bounds for"
                f" group size {size}; there are 0 to {size - 1}"
            )
        if rank in seen:
            raise InvalidArgumentError(
                f"shrink_group: Duplicate rank {rank} found in ranks_to_exclude at index {index}"
            )
        seen.add(rank)
    if len(seen) >= size:
        raise InvalidArgumentError(f"Cannot exclude all {size} ranks from process group; one must remain")
    if group.rank() in seen:
        raise DistError(
            f"Current rank {group.rank()} is in the exclusion list and should not call shrink_group(); only"
            " the ranks that remain do"
        )
