"""Groups that ranks near to each other make among themselves."""

from __future__ import annotations

import hashlib

import torch

from torchestra.collectives import all_gather_into_tensor
from torchestra.errors import InvalidArgumentError
from torchestra.process_group import ProcessGroup
from torchestra.store.process import ProcessIdentity
from torchestra.world import new_group

_DIGEST_BYTES = 16


def equal_part(group: ProcessGroup, size: int) -> ProcessGroup:
    """A group of this rank and its neighbours: ``size`` consecutive ranks of ``group``.

    Must be called by all ranks of ``group``.

    Raises:
        InvalidArgumentError: such parts do not make up the group.
    """
    if not isinstance(size, int) or not 0 < size <= group.size() or group.size() % size:
        raise InvalidArgumentError(
            f"subgroups of {size!r} ranks cannot make up group {group.group_name!r}, which has"
            f" {group.size()} ranks"
        )
    start = group.rank() // size * size
    return _made([group.to_global_rank(rank) for rank in range(start, start + size)])


def same_host(group: ProcessGroup) -> ProcessGroup:
    """A group of those ranks of ``group`` that run on this rank's host. Must be called by all its ranks."""
    me = ProcessIdentity.current()
    boot = me.space.partition("/")[0]
    digest = hashlib.sha256(f"{me.hostname} {boot}".encode()).digest()[:_DIGEST_BYTES]
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    everybodys = torch.empty(group.size(), _DIGEST_BYTES, dtype=torch.uint8)
    all_gather_into_tensor(everybodys, mine, group)
    here = (everybodys == mine).all(dim=1).tolist()
    return _made([group.to_global_rank(rank) for rank, is_here in enumerate(here) if is_here])


def _made(ranks: list[int]) -> ProcessGroup:
    group = new_group(ranks, use_local_synchronization=True, sort_ranks=False)
    assert isinstance(group, ProcessGroup), "this rank is among them"
    return group
