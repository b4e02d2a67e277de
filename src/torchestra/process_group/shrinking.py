"""A group of the ranks that are left, which replaces a group that has lost some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from torchestra.communicator.communicator import Communicator
from torchestra.communicator.device import agreement_of, delegate
from torchestra.engine import layout as at
from torchestra.engine.hosts import Hosts
from torchestra.engine.local import LocalEngine
from torchestra.engine.membership.admission import Offer
from torchestra.engine.membership.growing import GrownGroup, Growth
from torchestra.engine.membership.shrinking import shrink
from torchestra.errors import GroupDestroyedError, InvalidArgumentError, InvalidArgumentTypeError, shown
from torchestra.process_group.starting import GroupSpec, refuse, start
from torchestra.store import Store
from torchestra.types import Timeout, timeout_seconds

_Group = TypeVar("_Group")


def shrunk(
    communicator: Communicator,
    backend: str,
    name: str,
    exclude: Sequence[int],
    timeout: Timeout | None,
    successor: Callable[[NewMembership], _Group],
    *,
    abort: bool,
    growth: Growth[Communicator] | None = None,
) -> _Group:
    """Do the work of :meth:`ProcessGroup.shrink` and ``grow``; abort the old group, but do not destroy it.

    Args:
        communicator, backend: the old group's.
        name: of the new group.
        successor: makes the new group of this rank's part in it.
        abort: have all operations under way in the group fail at once, on all ranks; else those that this
            rank has begun may end first.
        growth: lets others in; default: nobody is let in.
    """
    context = communicator.engine.context
    seconds = communicator.timeout_s if timeout is None else timeout_seconds(timeout)
    if abort:
        context.abort_to_shrink()
    communicator.drain(seconds)
    make = _within_host if communicator.engine.hosts is None else _between_hosts
    made = make(communicator, name, exclude, seconds, backend, growth)
    try:
        if made.offer is None and (agreement := agreement_of(communicator)) is not None:
            delegate(made.communicator, made.store, agreement.among(made.survivors))
        context.abort_to_shrink()
        communicator.drain(seconds)
        _note_change(communicator, made)
        return successor(made)
    except BaseException:
        made.leave()  # interrupted: nothing refers to the new group
        raise


class NewMembership(NamedTuple):
    """Hold a rank's part of the new group: its communicator and store, and how to leave them.

    ``survivors`` are, by new number, the numbers in the old group; ``offer`` is what let joiners in, if any
    are in the group.
    """

    communicator: Communicator
    store: Store
    survivors: tuple[int, ...]
    leave: Callable[[], None]
    offer: Offer | None = None

    @classmethod
    def grown(cls, made: GrownGroup[Communicator]) -> NewMembership:
        """Return the part of a member or a joiner in a group with joiners; in ``survivors`` these are -1."""
        return cls(made.entered, made.store, made.offer.previous, made.entered.close, made.offer)


def _note_change(old: Communicator, made: NewMembership) -> None:
    """Count the change in the new group's arena, for readers outside of the job; all members do so alike."""
    before, after = old.engine.context.arena, made.communicator.engine.context.arena
    lost = not set(range(old.size)).issubset(made.survivors)
    joined = any(rank < 0 for rank in made.survivors)
    for word, changed in ((at.GENERATION, True), (at.TIMES_SHRUNK, lost), (at.TIMES_GROWN, joined)):
        after.store_word(word, before.load_word(word) + changed)


def _within_host(
    communicator: Communicator,
    name: str,
    exclude: Sequence[int],
    seconds: float,
    backend: str,
    growth: Growth[Communicator] | None,
) -> NewMembership:
    made = shrink(communicator.engine.context, name, exclude, seconds, growth)
    if isinstance(made, GrownGroup):
        return NewMembership.grown(made)
    new = Communicator(LocalEngine(made.context), name, communicator.timeout_s)
    return NewMembership(new, made.store, made.survivors, made.context.leave)


def surviving_bridge(communicator: Communicator) -> str | None:
    """Return the bridge between hosts for the group that replaces this one; None if it is on one host."""
    if communicator.engine.hosts is None:
        return None
    # MPI need not survive the death of a rank. A network trusted with MPI may be trusted with Gloo.
    kind = communicator.engine.bridge_kind
    return "gloo" if kind == "mpi" else kind


def _between_hosts(
    communicator: Communicator,
    name: str,
    exclude: Sequence[int],
    seconds: float,
    backend: str,
    growth: Growth[Communicator] | None,
) -> NewMembership:
    from torchestra.engine.multihost.shrinking import shrink_hosts

    hierarchy, bridge = communicator.engine.hierarchy, surviving_bridge(communicator)

    def enter(store: Store, rank: int, hosts: Hosts, seconds: float) -> Communicator:
        return start(
            GroupSpec(
                store=store,
                rank=rank,
                size=hosts.size,
                name=name,
                timeout_s=seconds,
                backend=backend,
                program=hierarchy.context.program,
                hosts=hosts,
                bridge=bridge,
            )
        )

    def cancel(store: Store, hosts: Hosts) -> None:
        refuse(store, name, hosts, "it was given up, as one of its ranks is gone or has given up")

    made = shrink_hosts(hierarchy, exclude, seconds, enter, cancel, growth)
    if isinstance(made, GrownGroup):
        return NewMembership.grown(made)
    made.entered.timeout_s = communicator.timeout_s
    return NewMembership(made.entered, made.store, made.survivors, made.entered.close)


def check_members(communicator: Communicator, backend: str, exclude: Sequence[int], call: str) -> None:
    """Refuse arguments of ``call``, which is ``"shrink"`` or ``"grow"``, and groups that cannot do that."""
    name, rank, size = communicator.name, communicator.rank, communicator.size
    if backend == "fake":
        raise InvalidArgumentTypeError(
            f"{call}: Process group backend for {name!r} does not support shrinking operations: a fake world"
            " has no other ranks"
        )
    for each in exclude:
        if not 0 <= each < size or each == rank:
            raise InvalidArgumentError(
                f"{call}: `exclude` must be other ranks of group {name!r} (0 to {size - 1}), got"
                f" {shown(each)} on rank {rank}"
            )
    if communicator.has_met:
        communicator.queue.refuse_if_inherited(call)
    if communicator.closed:
        raise GroupDestroyedError(f"{call}: rank {rank} has destroyed group {name!r}, or shrunk it already")
