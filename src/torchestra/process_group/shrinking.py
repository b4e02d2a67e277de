"""A group of the ranks that are left, which replaces a group that has lost some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from torchestra.communicator.communicator import Communicator
from torchestra.communicator.device import agreement_of, delegate
from torchestra.engine.local import LocalEngine
from torchestra.engine.membership.shrinking import shrink
from torchestra.engine.multihost.hosts import Hosts
from torchestra.errors import GroupDestroyedError, InvalidArgumentError, InvalidArgumentTypeError, shown
from torchestra.process_group.starting import start
from torchestra.store import Store
from torchestra.types import Timeout, timeout_seconds

_Group = TypeVar("_Group")


def shrunk(
    communicator: Communicator,
    backend: str,
    name: str,
    exclude: Sequence[int],
    timeout: Timeout | None,
    put_into_place: Callable[[NewMembership], _Group],
    *,
    abort: bool,
) -> _Group:
    """Do the work of :meth:`ProcessGroup.shrink`; this aborts the old group, but does not destroy it.

    Args:
        communicator, backend: the old group's.
        name: of the new group.
        put_into_place: makes the new group of this rank's part of it, and replaces the old one.
        abort: have all operations under way in the group fail at once, on all ranks; else those that this
            rank has begun may end first.
    """
    _check(communicator, backend, exclude)
    context = communicator.engine.context
    seconds = communicator.timeout_s if timeout is None else timeout_seconds(timeout)
    if abort:
        context.abort_to_shrink()
    communicator.drain(seconds)
    make = _within_host if communicator.engine.hosts is None else _between_hosts
    made = make(communicator, name, exclude, seconds, backend)
    try:
        if (agreement := agreement_of(communicator)) is not None:
            delegate(made.communicator, made.store, agreement.among(made.survivors))
        context.abort_to_shrink()
        communicator.drain(seconds)
        return put_into_place(made)
    except BaseException:
        made.leave()  # interrupted: nothing refers to the new group
        raise


class NewMembership(NamedTuple):
    """Hold a survivor's part of the new group: its communicator and store, and how to leave them.

    ``survivors`` are, by new number, the numbers in the old group.
    """

    communicator: Communicator
    store: Store
    survivors: tuple[int, ...]
    leave: Callable[[], None]


def _within_host(
    communicator: Communicator, name: str, exclude: Sequence[int], seconds: float, backend: str
) -> NewMembership:
    made = shrink(communicator.engine.context, name, exclude, seconds)
    new = Communicator(LocalEngine(made.context), name, communicator.timeout_s)
    return NewMembership(new, made.store, made.survivors, made.context.leave)


def _between_hosts(
    communicator: Communicator, name: str, exclude: Sequence[int], seconds: float, backend: str
) -> NewMembership:
    from torchestra.engine.multihost.shrinking import shrink_hosts

    engine, hierarchy = communicator.engine, communicator.engine.hierarchy
    # MPI need not survive the death of a rank. A network trusted with MPI may be trusted with Gloo.
    bridge = "gloo" if engine.bridge_kind == "mpi" else engine.bridge_kind

    def enter(store: Store, rank: int, hosts: Hosts, seconds: float) -> Communicator:
        program = hierarchy.context.program
        return start(store, rank, hosts.size, name, seconds, backend, program, hosts, bridge)

    made = shrink_hosts(hierarchy, exclude, seconds, enter)
    made.entered.timeout_s = communicator.timeout_s
    return NewMembership(made.entered, made.store, made.survivors, made.entered.close)


def _check(communicator: Communicator, backend: str, exclude: Sequence[int]) -> None:
    name, rank, size = communicator.name, communicator.rank, communicator.size
    if backend == "fake":
        raise InvalidArgumentTypeError(
            f"shrink: Process group backend for {name!r} does not support shrinking operations: a fake world"
            " has no other ranks"
        )
    for each in exclude:
        if not 0 <= each < size or each == rank:
            raise InvalidArgumentError(
                f"shrink: `exclude` must be other ranks of group {name!r} (0 to {size - 1}), got"
                f" {shown(each)} on rank {rank}"
            )
    if communicator.has_met:
        communicator.queue.refuse_if_inherited("shrink")
    if communicator.closed:
        raise GroupDestroyedError(f"shrink: rank {rank} has destroyed group {name!r}, or shrunk it already")
