"""Divides parameters between ranks, and exchanges those that each rank has updated.

A partition lists, for each rank, the parameters that it updates. It is the same on all ranks, so each rank
knows which parameters it receives from which.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._utils import _unflatten_dense_tensors

from torchestra.collectives.functions import all_gather, broadcast
from torchestra.process_group import ProcessGroup

Partition = list[list[torch.Tensor]]

_LARGE_BYTES = 64 << 10


def partition(parameters: Sequence[torch.Tensor], loads: list[int]) -> Partition:
    """Assign each parameter to a rank, so that all ranks have about equally many elements.

    Largest first, each to the rank that has the least so far (the first such): Graham's LPT rule ("Bounds on
    Multiprocessing Timing Anomalies", 1969), by which the fullest rank has at most 4/3 of the least possible.

    Args:
        parameters: the parameters to assign.
        loads: how many elements each rank has already; updated in place.
    """
    shares: Partition = [[] for _ in loads]
    for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append(parameter)
        loads[rank] += parameter.numel()
    return shares


def flattened(parameters: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Move the parameters' elements into one tensor, and make their data views of it."""
    flat = torch.empty(_numel(parameters), dtype=dtype)
    for parameter, view in zip(parameters, _unflatten_dense_tensors(flat, parameters), strict=True):
        view.copy_(parameter.detach())
        parameter.data = view
    return flat


class Shards:
    """The parameters of all ranks, all of one dtype, ready to be exchanged.

    Args:
        shares: the parameters that each rank updates.
        as_views: make the parameters parts of one tensor per rank; an exchange is one all_gather of these.
            If not, each exchange copies small parameters into such tensors, and broadcasts large ones one by
            one.
    """

    def __init__(self, shares: Partition, group: ProcessGroup, *, as_views: bool) -> None:
        self._group = group
        self._dtype = next((each.dtype for share in shares for each in share), torch.float32)
        self._flats: list[torch.Tensor] = []
        self._small: Partition = [[] for _ in shares]
        self._large: Partition = [[] for _ in shares]
        if as_views:
            with torch.no_grad():
                self._flats = [flattened(share, self._dtype) for share in shares]
            return
        for share, small, large in zip(shares, self._small, self._large, strict=True):
            for parameter in share:
                (large if parameter.nbytes >= _LARGE_BYTES else small).append(parameter)

    @torch.no_grad()
    def exchange(self) -> None:
        """Receive the parameters that other ranks have updated. Must be called by all ranks."""
        own = self._group.rank()
        if self._flats:
            all_gather(self._flats, self._flats[own], self._group)
        elif any(self._small):
            flats = [torch.empty(_numel(share), dtype=self._dtype) for share in self._small]
            views = list(map(_unflatten_dense_tensors, flats, self._small))
            _copy(views[own], self._small[own])
            all_gather(flats, flats[own], self._group)
            for rank, share in enumerate(self._small):
                if rank != own:
                    _copy(share, views[rank])
        for rank, share in enumerate(self._large):
            for parameter in share:
                broadcast(parameter.detach(), group_src=rank, group=self._group)


def _numel(parameters: Sequence[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
