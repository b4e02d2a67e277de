"""Collectives that can be traced, compiled and differentiated.

    import torchestra.functional as funcol

    total = funcol.all_reduce(tensor, "sum", group)     # at once; ``tensor`` stays as it is
    y = x @ w                                           # meanwhile
    z = y + total                                       # waits

They are operators of torch (``torch.ops.torchestra.*``), so that ``make_fx``, ``torch.compile`` and
``torch.export`` see them.
"""

from __future__ import annotations

from torchestra.functional.asynchronous import AsyncCollectiveTensor
from torchestra.functional.collectives import (
    all_gather_into_tensor_coalesced,
    all_gather_single,
    all_gather_single_autograd,
    all_gather_single_coalesced,
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_reduce,
    all_reduce_autograd,
    all_reduce_coalesced,
    all_to_all_single,
    all_to_all_single_autograd,
    broadcast,
    permute_tensor,
    reduce_scatter_single,
    reduce_scatter_single_autograd,
    reduce_scatter_single_coalesced,
    reduce_scatter_tensor,
    reduce_scatter_tensor_autograd,
    reduce_scatter_tensor_coalesced,
    wait_tensor,
)
from torchestra.functional.groups import Group, expand_group, find_or_make_group

__all__ = [
    "AsyncCollectiveTensor",
    "Group",
    "all_gather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_single_coalesced",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_reduce",
    "all_reduce_autograd",
    "all_reduce_coalesced",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "expand_group",
    "find_or_make_group",
    "permute_tensor",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
    "wait_tensor",
]
