"""Enter groups into a rank's registry, and replace them by those that they are shrunk and grown to."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torchestra.errors import InvalidArgumentError
from torchestra.process_group import ProcessGroup
from torchestra.store import PrefixStore, Store
from torchestra.system.phases import report
from torchestra.world.registry import World


def world_store(met: Store) -> Store:
    """Return the part for groups of the store in which the ranks of a world have met."""
    return PrefixStore("torchestra", met)


def admission_store(groups: Store) -> Store:
    """Return the part of :func:`world_store` in which ranks ask to join the world."""
    return PrefixStore("admission", groups)


def refuse_second_world(world: World) -> None:
    """Raise InvalidArgumentError if a rank has a default group already."""
    if world.default is not None:
        raise InvalidArgumentError(
            "trying to initialize the default process group twice! Call destroy_process_group() first"
        )


def register(world: World, group: ProcessGroup, tag: str = "") -> None:
    """Enter a new group into a registry, where the group that it is shrunk or grown to will replace it."""
    world.add(group, tag)
    group.when_shrunk = partial(_replace, world, tag)


def _replace(world: World, tag: str, old: ProcessGroup, new: ProcessGroup) -> None:
    """Replace a group in the registry by the group that it was shrunk or grown to."""
    world.remove(old)
    register(world, new, tag)
    if old is not world.default:
        return
    world.default = new
    report("grown" if new.joined_ranks else "shrunk")
    numbers = {before: now for now, before in enumerate(new.previous_ranks) if before >= 0}
    new.ranks = range(new.size())
    why = (
        "the world has been shrunk and has no rank {} of this group any more; shrink() the group, or destroy"
        " it"
    )
    renumber_others(world, new, numbers, why)


def renumber_others(world: World, default: ProcessGroup, numbers: Mapping[int, int], why: str) -> None:
    """Have all groups but the default one follow its new numbers, and begin to count new groups anew.

    Args:
        numbers: new global ranks by old ones; a group that has lost a rank is aborted.
        why: the text of its error, with a place for the lost rank.
    """
    world.made = 0
    world.made_locally.clear()
    for group in list(world.groups.values()):
        if group is default:
            continue
        if not group.communicator.has_met:
            group.destroy()  # its members have not met, and would look for each other in the old store
            world.remove(group)
        elif lost := group.renumber(numbers):
            group.communicator.abort(why.format(lost[0]), failed=lost)
