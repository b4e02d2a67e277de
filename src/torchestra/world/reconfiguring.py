"""A default group without peers: ``init_process_group(enable_reconfigure=True)``."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial

from torchestra.arguments.options import GroupOptions
from torchestra.engine.device.agreement import DeviceRequest
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.errors import InvalidArgumentError
from torchestra.process_group import ProcessGroup
from torchestra.process_group.reconfigurable import reconfigurable_group
from torchestra.rendezvous import launch_environment
from torchestra.store import Store
from torchestra.store.secret import Secret
from torchestra.system.phases import report
from torchestra.world.registration import register, renumber_others
from torchestra.world.registry import World


def make_reconfigurable_world(
    world: World,
    name: str,
    backend: str,
    timeout_s: float,
    world_size: int,
    rank: int,
    store: Store | None,
    description: str,
    request: DeviceRequest,
    secret: Secret,
) -> None:
    """Give this rank a default group without peers. It waits for nobody.

    Args:
        world: the rank's registry.
        rank, world_size: what the group says of itself until it is reconfigured; -1: as the launcher says,
            else 0 and 1.

    Raises:
        InvalidArgumentError: the rank is none of that many.
    """
    launch, here = launch_environment(), current_thread_rank()
    known = (here.rank, here.size) if here is not None else (launch.rank, launch.world_size)
    rank, size = (
        given if given >= 0 else default if found is None else found
        for given, found, default in ((rank, known[0], 0), (world_size, known[1], 1))
    )
    if not 0 <= rank < size:
        raise InvalidArgumentError(f"rank must be from 0 to world_size - 1, got rank {rank} of {size}")
    if world.thread is None:
        world.thread = threading.current_thread()
    group = reconfigurable_group(
        rank,
        size,
        name,
        GroupOptions(timeout_s, backend=backend),
        backend=backend,
        timeout_s=timeout_s,
        description=description,
        store=store,
        secret=secret,
        program=world.thread,
        request=request,
    )
    group.when_reconfigured = partial(_renumber, world)
    world.default = group
    register(world, group)
    report("joined")


def _renumber(world: World, group: ProcessGroup, numbers: Mapping[int, int]) -> None:
    """Have the other groups of a registry follow its default group, which has new peers."""
    world.rename(group)
    report("grown" if group.joined_ranks else "shrunk")
    why = "the default group was reconfigured, and no longer has its rank {}; destroy this group"
    renumber_others(world, group, numbers, why)
