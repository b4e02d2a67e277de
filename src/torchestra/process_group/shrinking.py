"""A group of the ranks that are left, in place of a group that has lost some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchestra.engine.local import LocalEngine
from torchestra.engine.shrinking import shrink
from torchestra.errors import GroupDestroyedError, InvalidArgumentError, InvalidArgumentTypeError
from torchestra.hosts import HostsCommunicator
from torchestra.quick import QuickCommunicator
from torchestra.types import Timeout, timeout_seconds

if TYPE_CHECKING:
    from torchestra.process_group.group import ProcessGroup


def shrunk(
    group: ProcessGroup, exclude: Sequence[int], timeout: Timeout | None, *, abort: bool
) -> ProcessGroup:
    """What :meth:`ProcessGroup.shrink` returns; the old group is left aborted, but is not destroyed.

    Args:
        abort: have all that is under way in the group fail at once, on all ranks; else what this rank has
            begun may end before.
    """
    communicator = group.communicator
    _check(group, exclude)
    member = communicator.engine.member
    seconds = communicator.seconds if timeout is None else timeout_seconds(timeout)
    if abort:
        member.abort_to_shrink()
    communicator.settle(seconds)
    generation = group.generation + 1
    name = f"{group.group_name.removesuffix(f'~{group.generation}')}~{generation}"
    made = shrink(member, name, exclude, seconds)
    try:
        member.abort_to_shrink()
        communicator.settle(seconds)
        options = group.options
        options.group_name = name
        new = type(group)(
            made.store,
            made.member.rank,
            made.member.size,
            options,
            ranks=[group.ranks[rank] for rank in made.survivors],
            description=group.group_desc,
            communicator=QuickCommunicator(LocalEngine(made.member), name, communicator.seconds),
        )
        new.generation = generation
        new.previous_ranks = made.survivors
        new.lost_ranks = tuple(rank for rank in range(group.size()) if rank not in made.survivors)
    except BaseException:
        made.member.leave()  # interrupted: nobody has the new group in hand
        raise
    return new


def _check(group: ProcessGroup, exclude: Sequence[int]) -> None:
    if group.backend == "fake":
        raise InvalidArgumentTypeError(
            f"shrink: Process group backend for {group.group_name!r} does not support shrinking operations: a"
            " fake world has no other ranks"
        )
    if isinstance(group.communicator, HostsCommunicator):
        raise InvalidArgumentTypeError(
            f"shrink: Process group backend for {group.group_name!r} does not support shrinking operations:"
            f" its ranks are on {len(group.communicator.hosts)} hosts"
        )
    for rank in exclude:
        if not isinstance(rank, int) or not 0 <= rank < group.size() or rank == group.rank():
            raise InvalidArgumentError(
                f"shrink: `exclude` must be other ranks of group {group.group_name!r} (0 to"
                f" {group.size() - 1}), got {rank!r} on rank {group.rank()}"
            )
    if group.communicator.closed:
        raise GroupDestroyedError(
            f"shrink: rank {group.rank()} has destroyed group {group.group_name!r}, or shrunk it already"
        )
