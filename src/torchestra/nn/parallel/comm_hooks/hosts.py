"""Finds the ranks that run on one host."""

from __future__ import annotations

import hashlib

import torch

from torchestra.collectives.functions import all_gather_into_tensor
from torchestra.process_group import ProcessGroup
from torchestra.store.process import ProcessIdentity
from torchestra.world.new_groups import new_group

_DIGEST_BYTES = 16


def same_host(group: ProcessGroup) -> ProcessGroup:
    """Make a group of the ranks of ``group`` on this rank's host. Must be called by all its ranks."""
    me = ProcessIdentity.current()
    boot = me.space.partition("/")[0]
    digest = hashlib.sha256(f"{me.hostname} {boot}".encode()).digest()[:_DIGEST_BYTES]
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    digests = torch.empty(group.size(), _DIGEST_BYTES, dtype=torch.uint8)
    all_gather_into_tensor(digests, mine, group)
    matches = (digests == mine).all(dim=1).tolist()
    ranks = [group.to_global_rank(rank) for rank, same in enumerate(matches) if same]
    made = new_group(ranks, use_local_synchronization=True)
    assert isinstance(made, ProcessGroup), "this rank is among them"
    return made
