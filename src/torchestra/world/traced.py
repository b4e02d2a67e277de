"""What torch.compile traces in place of functions that ask for the default group, or for ranks and sizes.

What they return depends on the rank, so the compiler has to see where it is from: it guards the numbers and
names that a compiled program was made with, and compiles anew for another rank, or another world.
"""

from __future__ import annotations

from typing import Union, cast

from torchestra.engine.thread_ranks import is_seen, seen
from torchestra.process_group import NonMember, ProcessGroup
from torchestra.system.untraced import untraced
from torchestra.world.registry import World, process_world

AnyGroup = Union[ProcessGroup, NonMember]


@untraced
def break_graph() -> None:
    """Do nothing: the compiler ends the graph before the function that is traced, and calls that itself."""


def has_default() -> bool:
    """Stand for is_initialized()."""
    here = seen.rank
    if not is_seen():
        break_graph()
    world = process_world if here is None else cast(World, here.world)
    return world.default is not None


def default_while_traced() -> ProcessGroup:
    """Return the default group of the rank that the calling thread belongs to; without one, break the graph.

    After a break the program gets the error of the function that it has called.
    """
    if not has_default():
        break_graph()
    here = seen.rank
    world = process_world if here is None else cast(World, here.world)
    return cast(ProcessGroup, world.default)


def _known(group: AnyGroup | None) -> AnyGroup:
    if group is None:
        return default_while_traced()
    if not isinstance(group, (ProcessGroup, NonMember)):
        break_graph()
    return group


def group_rank(group: AnyGroup | None = None) -> int:
    """Stand for get_rank()."""
    return _known(group).rank()


def group_size(group: AnyGroup | None = None) -> int:
    """Stand for get_world_size()."""
    return _known(group).size()


def group_ranks(group: AnyGroup | None = None) -> list[int]:
    """Stand for get_process_group_ranks()."""
    return list(_known(group).ranks)
