"""Registering groups of torchestra with torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d

c10d: Any = distributed_c10d  # whose annotations are of the newest torch


def enter_group(
    group: Any, backend: str, backend_config: str, store: Any, global_ranks: Sequence[int], name: str
) -> None:
    """Register a group with torch.distributed, as its functions that make groups do.

    Args:
        group: a ``torch.distributed.ProcessGroup``.
        backend: the result of ``get_backend``.
        backend_config: the backends by device, as ``"cpu:gloo,cuda:gloo"``.
        store: the store that the group's ranks share.
        global_ranks: the members, by number in the group.
        name: of the group in torch.distributed, the same on all members.
    """
    world = c10d._world
    group._set_group_name(name)
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    world.pg_backend_config[group] = backend_config
    world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(global_ranks)}
    c10d._register_process_group(name, group)
    tag = f"ptd:{name}"
    world.tags_to_pg.setdefault("", []).append(group)
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag


def default_group() -> Any:
    """Return torch.distributed's default group; None where there is none."""
    return distributed.group.WORLD


def set_default(group: Any) -> None:
    """Make a registered group torch.distributed's default group."""
    c10d._update_default_pg(group)


def next_name() -> str:
    """Return the name of the next group that all ranks make together."""
    return str(c10d._process_group_name([], use_hashed_name=False))
