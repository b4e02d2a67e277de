"""Broadcasts many tensors at once: those of one dtype are packed into one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch._utils import _unflatten_dense_tensors

from torchestra.nn.parallel.buckets import shared_memory
from torchestra.process_group import ProcessGroup

_MAX_BYTES = 32 << 20


class CoalescedBroadcast:
    """Tensors of one dtype and device, packed. Dtype, shapes and order are the same on every rank."""

    def __init__(self, tensors: Sequence[torch.Tensor], group: ProcessGroup) -> None:
        self._group = group
        self._tensors = list(tensors)
        numel = sum(tensor.numel() for tensor in tensors)
        self._flat = shared_memory(numel, tensors[0].dtype, group, tensors[0].device)
        self._views = _unflatten_dense_tensors(self._flat, tensors)

    def run(self, root: int = 0) -> None:
        """Replace all ranks' tensors by those of the group's rank ``root``. Must be called by all ranks."""
        with torch.no_grad():
            if self._group.rank() == root:
                torch._foreach_copy_(self._views, self._tensors)
            self._group.communicator.broadcast(self._flat, root)
            if self._group.rank() != root:
                torch._foreach_copy_(self._tensors, self._views)


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], group: ProcessGroup, root: int = 0, most_bytes: int = _MAX_BYTES
) -> None:
    """Replace the tensors on every rank by those of rank ``root`` of the group, in few broadcasts.

    Must be called by all ranks, with tensors of the same shapes and dtypes in the same order.
    """
    for batch in batches(tensors, most_bytes):
        CoalescedBroadcast(batch, group).run(root)


def batches(tensors: Sequence[torch.Tensor], most_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Batch the tensors of each dtype and device, in their order, up to ``most_bytes`` together.

    A batch has at least one tensor.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        batch: list[torch.Tensor] = []
        size = 0
        for tensor in same:
            if batch and size + tensor.nbytes > most_bytes:
                yield batch
                batch, size = [], 0
            batch.append(tensor)
            size += tensor.nbytes
        yield batch


class BufferBroadcast:
    """Broadcasts a module's buffers from a rank, before a forward pass.

    Their modules and names are looked up once; the tensors each time, since modules may replace them.
    """

    def __init__(self, module: torch.nn.Module, group: ProcessGroup, ignored: Collection[str] = ()) -> None:
        self._group = group
        self._owners: list[tuple[torch.nn.Module, str]] = []
        found: set[int] = set()
        for path, owner in module.named_modules():
            for name, buffer in owner._buffers.items():
                full = f"{path}.{name}" if path else name
                if buffer is not None and id(buffer) not in found and full not in ignored:
                    found.add(id(buffer))
                    self._owners.append((owner, name))
        self._buffers: list[torch.Tensor] = []
        self._broadcasts: list[CoalescedBroadcast] = []

    def __bool__(self) -> bool:
        return bool(self._owners)

    def run(self, root: int = 0) -> None:
        """Broadcast the buffers as they are now. Must be called by all ranks."""
        buffers = [owner._buffers[name] for owner, name in self._owners]
        current = [buffer for buffer in buffers if buffer is not None]
        if len(current) != len(self._buffers) or any(
            new is not known for new, known in zip(current, self._buffers, strict=True)
        ):
            self._buffers = current
            self._broadcasts = [
                CoalescedBroadcast(batch, self._group) for batch in batches(current, _MAX_BYTES)
            ]
        for broadcast in self._broadcasts:
            broadcast.run(root)
