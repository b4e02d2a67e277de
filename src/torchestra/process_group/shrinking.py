"""A group of the ranks that are left, in place of a group that has lost some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torchestra.communicator.communicator import Communicator
from torchestra.communicator.device import agreement_of, delegate
from torchestra.engine.local import LocalEngine
from torchestra.engine.membership.shrinking import shrink
from torchestra.engine.multihost.hosts import Hosts
from torchestra.errors import GroupDestroyedError, InvalidArgumentError, InvalidArgumentTypeError, shown
from torchestra.process_group.starting import start
from torchestra.store import Store
from torchestra.types import Timeout, timeout_seconds

if TYPE_CHECKING:
    from torchestra.process_group.group import ProcessGroup


def shrunk(
    group: ProcessGroup, exclude: Sequence[int], timeout: Timeout | None, *, abort: bool
) -> ProcessGroup:
    """Return what :meth:`ProcessGroup.shrink` returns; the old group is left aborted, but is not destroyed.

    Args:
        abort: have all that is under way in the group fail at once, on all ranks; else what this rank has
            begun may end before.
    """
    communicator = group.communicator
    _check(group, exclude)
    context = communicator.engine.context
    seconds = communicator.timeout_s if timeout is None else timeout_seconds(timeout)
    if abort:
        context.abort_to_shrink()
    communicator.drain(seconds)
    name = f"{group.group_name.removesuffix(f'~{group.generation}')}~{group.generation + 1}"
    make = _within_host if communicator.engine.hosts is None else _between_hosts
    made = make(communicator, name, exclude, seconds, group.backend)
    try:
        if (agreement := agreement_of(communicator)) is not None:
            delegate(made.communicator, made.store, agreement.among(made.survivors))
        context.abort_to_shrink()
        communicator.drain(seconds)
        return _put_into_place(group, made, name)
    except BaseException:
        made.leave()  # interrupted: nobody has the new group in hand
        raise


class _Made(NamedTuple):
    """Hold a survivor's part of the new group: its communicator and store, and how to leave them.

    ``survivors`` are, by new number, the numbers in the group that was.
    """

    communicator: Communicator
    store: Store
    survivors: tuple[int, ...]
    leave: Callable[[], None]


def _within_host(
    communicator: Communicator, name: str, exclude: Sequence[int], seconds: float, backend: str
) -> _Made:
    made = shrink(communicator.engine.context, name, exclude, seconds)
    new = Communicator(LocalEngine(made.context), name, communicator.timeout_s)
    return _Made(new, made.store, made.survivors, made.context.leave)


def _between_hosts(
    communicator: Communicator, name: str, exclude: Sequence[int], seconds: float, backend: str
) -> _Made:
    from torchestra.engine.multihost.shrinking import shrink_hosts

    engine, hierarchy = communicator.engine, communicator.engine.hierarchy
    # MPI does not promise to outlive a rank. Where it was used the network is trusted, so Gloo may be.
    bridge = "gloo" if engine.bridge_kind == "mpi" else engine.bridge_kind

    def enter(store: Store, rank: int, hosts: Hosts, seconds: float) -> Communicator:
        program = hierarchy.context.program
        return start(store, rank, hosts.size, name, seconds, backend, program, hosts, bridge)

    made = shrink_hosts(hierarchy, exclude, seconds, enter)
    made.entered.timeout_s = communicator.timeout_s
    return _Made(made.entered, made.store, made.survivors, made.entered.close)


def _put_into_place(group: ProcessGroup, made: _Made, name: str) -> ProcessGroup:
    options = group.options
    options.group_name = name
    new = type(group)(
        made.store,
        made.communicator.rank,
        made.communicator.size,
        options,
        ranks=[group.ranks[rank] for rank in made.survivors],
        description=group.group_desc,
        communicator=made.communicator,
    )
    new.generation = group.generation + 1
    new.previous_ranks = made.survivors
    new.lost_ranks = tuple(rank for rank in range(group.size()) if rank not in made.survivors)
    return new


def _check(group: ProcessGroup, exclude: Sequence[int]) -> None:
    if group.backend == "fake":
        raise InvalidArgumentTypeError(
            f"shrink: Process group backend for {group.group_name!r} does not support shrinking operations: a"
            " fake world has no other ranks"
        )
    for rank in exclude:
        if not 0 <= rank < group.size() or rank == group.rank():
            raise InvalidArgumentError(
                f"shrink: `exclude` must be other ranks of group {group.group_name!r} (0 to"
                f" {group.size() - 1}), got {shown(rank)} on rank {group.rank()}"
            )
    if group.communicator.has_met:
        group.communicator.queue.refuse_if_inherited("shrink")
    if group.communicator.closed:
        raise GroupDestroyedError(
            f"shrink: rank {group.rank()} has destroyed group {group.group_name!r}, or shrunk it already"
        )
