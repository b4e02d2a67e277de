"""The registry of a rank's groups, by name and by tag.

A process that is a rank has one :class:`World`. If ranks are threads, each has its own, which a thread finds
by the rank that it belongs to (thread_ranks.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from torchestra.communicator import work_registry
from torchestra.engine.thread_ranks import (
    ThreadRank,
    being_thread_rank,
    current_thread_rank,
    leave_thread_rank,
)
from torchestra.errors import InvalidArgumentError, NotInitializedError
from torchestra.process_group import ProcessGroup
from torchestra.process_group.existing import existing_groups
from torchestra.store import Store
from torchestra.system.forking import forget_in_children

_BY_NAME = "ptd:"  # torch's prefix, which code looks for
_SHORT = 16


@dataclass(eq=False)
class World:
    """Hold one rank's groups, and count how often it has made some.

    A *tag* tells groups of the same ranks apart: there is one group per tag and set of ranks. A group that
    was made without a tag gets one derived from its name, so that tag and ranks identify every group.

    Attributes:
        groups: by name, in the order in which they were made.
        made: how many calls there have been in which all ranks made groups together.
        made_locally: the same for groups that only their members made, by :func:`label` of the ranks.
        thread: the thread that the rank's program runs in; the rank lives as long as it.
        known_as: the program's names for backends, where they differ from ours.
        others: the global ranks of the last group that compat has made without this rank.
        inherited: whether this process was forked from the rank. It may ask for the rank's groups, as the
            data set of a forked loader does, but their operations are refused.
    """

    default: ProcessGroup | None = None
    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    made: int = 0
    made_locally: dict[str, int] = field(default_factory=dict)
    thread: threading.Thread | None = None
    known_as: dict[str, str] = field(default_factory=dict)
    others: tuple[int, ...] = ()
    inherited: bool = False
    _tags: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        forget_in_children(self)

    def forget(self) -> None:
        """Mark the registry as inherited, in a forked child, which is not the rank."""
        self.inherited = True

    def add(self, group: ProcessGroup, tag: str = "") -> None:
        """Enter a new group, under a tag if it has one."""
        self.groups[group.group_name] = group
        group.known_as = self.known_as.get(group.backend, group.backend)
        if tag:
            self._tags[group.group_name] = tag

    def rename_backends(self, names: Mapping[str, str]) -> None:
        """Have all groups, also those still to be made, report these names for their backends."""
        self.known_as = dict(names)
        for group in self.groups.values():
            group.known_as = names.get(group.backend, group.backend)

    def check_name(self, group: ProcessGroup) -> None:
        """Refuse a group that was made directly if :meth:`group` would not find it by its name.

        Raises:
            InvalidArgumentError: there is another of the same name.
        """
        if self.groups.get(group.group_name) is not group:
            self._find_direct(group.group_name, group)

    def _find_direct(self, name: str, *known: ProcessGroup) -> ProcessGroup | None:
        """Return the group of a name that is not in the registry; there may be one, besides those given."""
        registered = self.groups.get(name)
        found = {*known, *existing_groups(name), *([] if registered is None else [registered])}
        if len(found) > 1:
            raise InvalidArgumentError(
                f"a group named {name!r} exists already; give a group that is made directly a name of its own"
            )
        return next(iter(found), None)

    def remove(self, group: ProcessGroup) -> None:
        """Forget a group."""
        del self.groups[group.group_name]
        self._tags.pop(group.group_name, None)

    def rename(self, group: ProcessGroup) -> None:
        """Enter a group without a tag under the name that it has now."""
        former = next(name for name, each in self.groups.items() if each is group)
        self.groups = {
            group.group_name if name == former else name: each for name, each in self.groups.items()
        }

    def close(self) -> None:
        """Destroy all groups, the last first, and forget them.

        Warns of results of functional collectives that were never waited for.
        """
        groups = list(reversed(self.groups.values()))
        for each in groups:
            each.destroy()
        self.groups.clear()
        self._tags.clear()
        self.default = None
        self.made = 0
        self.made_locally.clear()
        self.known_as.clear()
        if not self.inherited:
            for each in groups:
                work_registry.report(each)
        self.inherited = False

    def group(self, name: str) -> ProcessGroup:
        """Return the group of a name.

        Raises:
            NotInitializedError: this rank has none of that name.
        """
        found = self.groups.get(name) or self._find_direct(name)
        if found is None:
            raise NotInitializedError(
                f"Could not resolve the process group registered under the name {name!r}: this rank has"
                f" {', '.join(map(repr, self.groups)) or 'no groups'}. (A thread that was not started by"
                " threading.Thread must be given the context of the rank that it works for.)"
            )
        return found

    def tag_of(self, group: ProcessGroup) -> str:
        """Return the tag of a group; if it was made without one, a tag derived from its name."""
        return self._tags.get(group.group_name, _BY_NAME + group.group_name)

    def find(self, ranks: Sequence[int], tag: str = "") -> ProcessGroup | None:
        """Return the group of these global ranks, in any order, that has the tag, or None; without a tag, the
        first that was made without one.
        """
        if tag.startswith(_BY_NAME):
            candidates = [group for group in (self.groups.get(tag[len(_BY_NAME) :]),) if group is not None]
        else:
            candidates = [
                group for group in self.groups.values() if self._tags.get(group.group_name, "") == tag
            ]
        return next((group for group in candidates if _same_ranks(group.ranks, ranks)), None)


def _same_ranks(first: Sequence[int], second: Sequence[int]) -> bool:
    return len(first) == len(second) and (first == second or set(first) == set(second))


def compact(ranks: Sequence[int]) -> Sequence[int]:
    """Return the same ranks as a range if they are evenly spaced, else as a tuple."""
    if isinstance(ranks, range):
        return ranks
    given = tuple(ranks)
    step = given[1] - given[0] if len(given) > 1 else 1
    if not step:
        return given
    spaced = range(given[0], given[-1] + (1 if step > 0 else -1), step) if given else range(0)
    return spaced if len(spaced) == len(given) and tuple(spaced) == given else given


def label(ranks: Sequence[int]) -> str:
    """Return a short text that is unique to these ranks in this order."""
    if len(ranks) <= _SHORT:
        return "-".join(map(str, ranks))
    spaced = compact(ranks)
    if isinstance(spaced, range):
        return f"{spaced[0]}-to-{spaced[-1]}-by-{spaced.step}"
    return hashlib.sha256(repr(spaced).encode()).hexdigest()[:32]


process_world = World()
"""The registry of a process that is a rank."""


def current_world() -> World:
    """Return the registry of the rank that the calling thread belongs to."""
    here = current_thread_rank()
    return process_world if here is None else cast(World, here.world)


def own_world() -> World:
    """Return :func:`current_world`; in a forked child, an empty one in place of the inherited one."""
    world = current_world()
    if world.inherited:
        leave_thread_rank()
        world = current_world()
        world.close()
        world.thread = None
        world.others = ()
    return world


@contextlib.contextmanager
def thread_rank(rank: int, size: int, store: Store, host: str = "") -> Iterator[None]:
    """Make the calling thread rank ``rank`` of ``size`` while the block runs.

    Inside, ``init_process_group()`` without arguments joins the other threads that use the same
    ``store`` object; groups that the block leaves open are destroyed at its end. Threads that are started
    inside belong to the rank as well.

    Args:
        host: which host the rank pretends to be on, for tests; ranks with different ones share no memory.
    """
    thread = threading.current_thread()
    world = World(thread=thread)
    with being_thread_rank(ThreadRank(rank, size, store, thread, world, host)):
        try:
            yield
        finally:
            world.close()
