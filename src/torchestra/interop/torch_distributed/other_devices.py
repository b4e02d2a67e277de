"""The part of a group that another backend serves, as in ``"cpu:torchestra,cuda:nccl"``.

torch.distributed uses a process group written in Python for the whole group, whatever devices it was
requested for. So for a device of another backend, a group of torchestra makes a group of only that backend
when it first gets a tensor of that device.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import Store, _DistributedBackendOptions
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from torchestra.errors import InvalidArgumentError

_GroupName: Any = getattr(c10d, "GroupName", str)  # in torch 2.6 a plain string


class Membership(NamedTuple):
    """The arguments from which a backend makes a group.

    Attributes:
        store: the store that the group's ranks share.
        rank, size: in the group.
        ranks: the global ranks.
        timeout: of operations.
        name, description: of the group.
        options: the ``pg_options`` that it was made with.
    """

    store: Store
    rank: int
    size: int
    ranks: list[int]
    timeout: timedelta
    name: str
    description: str
    options: Any


def backends_by_device(group: ProcessGroup) -> dict[str, str] | None:
    """Return the backend requested for each type of device; None while torch does not say."""
    text = c10d._world.pg_backend_config.get(group)
    if text is None:
        return None
    return dict(part.split(":", 1) for part in text.split(","))


def group_on(device: str, backend: str, member: Membership) -> ProcessGroup:
    """Make the same group on another backend that torch has or knows. All ranks must call this.

    Raises:
        InvalidArgumentError: there is no such backend, or it is a process group rather than a backend.
    """
    store = c10d.PrefixStore(f"{device}/", member.store)
    group = c10d.ProcessGroup(store, member.rank, member.size)
    kind = c10d.Backend.backend_type_map[backend]
    made = _backend(backend, store, member)
    if isinstance(made, ProcessGroup):
        raise InvalidArgumentError(
            f'backend {backend!r} makes whole process groups, so it cannot serve {device} beside "torchestra"'
        )
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, made)
    group._set_group_name(_GroupName(member.name))
    group._set_group_desc(member.description)
    return group


def _backend(backend: str, store: Store, member: Membership) -> Any:
    if backend == c10d.Backend.GLOO and c10d.is_gloo_available():
        return c10d.ProcessGroupGloo(store, member.rank, member.size, timeout=member.timeout)
    if backend == c10d.Backend.NCCL and c10d.is_nccl_available():
        options = member.options
        if not isinstance(options, c10d.ProcessGroupNCCL.Options):
            options = c10d.ProcessGroupNCCL.Options()
        options._timeout = member.timeout
        options.global_ranks_in_group = member.ranks
        options.group_name = _GroupName(member.name)
        return c10d.ProcessGroupNCCL(store, member.rank, member.size, options)
    plugin = c10d.Backend._plugins.get(backend.upper())
    if plugin is None:
        raise InvalidArgumentError(
            f'backend {backend!r} is not available here beside "torchestra"; available are "nccl" and'
            ' "gloo" where torch has them, and registered ones'
        )
    if not plugin.extended_api:
        return plugin.creator_fn(store, member.rank, member.size, member.timeout)
    asked = _DistributedBackendOptions()
    asked.store = store
    asked.group_rank = member.rank
    asked.group_size = member.size
    asked.timeout = member.timeout
    asked.group_id = member.name
    asked.global_ranks_in_group = member.ranks
    return plugin.creator_fn(asked, member.options)
