"""Flat buffers that hold one value per element of many tensors, in memory that the ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchestra.collectives.shared_tensors import empty
from torchestra.errors import InvalidArgumentError
from torchestra.process_group import ProcessGroup

_ALIGNMENT = 64  # bytes: where a tensor begins, and a rank's share
_MOST_RANKS = 64  # that a buffer has padding for, in case the group grows
_RENEWED_BYTES = 32 << 20  # in a step


class Slot(NamedTuple):
    """Say where a tensor's elements are: tensor ``tensor`` from element ``offset`` on."""

    tensor: int
    offset: int


class FlatLayout:
    """Know the places of the tensors of one dtype and device in a flat buffer.

    Attributes:
        tensors: all tensors, of which this has some.
        slots: of those that it has.
        length: in elements, of all of them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> None:
        self.tensors = tensors
        self.dtype, self.device = tensors[indices[0]].dtype, tensors[indices[0]].device
        self.slots: list[Slot] = []
        self._step = max(1, _ALIGNMENT // self.dtype.itemsize)
        self.length = 0
        for index in indices:
            self.slots.append(Slot(index, self.length))
            self.length += -(-tensors[index].numel() // self._step) * self._step

    @staticmethod
    def all_of(tensors: Sequence[torch.Tensor]) -> list[FlatLayout]:
        """Return one layout for each dtype and device among the tensors."""
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(tensors):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
        return [FlatLayout(tensors, indices) for indices in kinds.values()]

    def padded(self, ranks: int) -> int:
        """Return the length of a buffer that is divided into equal shares of so many ranks."""
        unit = self._step * ranks
        return max(1, -(-self.length // unit)) * unit

    def capacity(self, ranks: int) -> int:
        """Return the length that suffices for every number of ranks up to this one."""
        return self.length + self._step * ranks

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a buffer, by slot, in their tensors' shapes."""
        return [
            flat[offset : offset + self.tensors[index].numel()].view(self.tensors[index].shape)
            for index, offset in self.slots
        ]


class FlatBuffer:
    """Hold a buffer of a layout.

    Attributes:
        group_name: the group whose ranks share its memory, if it is shared.
        flat: the whole, padded for a number of ranks; the padding is 0.
        views: its parts, by slot.
    """

    __slots__ = ("_layout", "_memory", "_touched", "flat", "group_name", "views")

    def __init__(self, layout: FlatLayout, group: ProcessGroup) -> None:
        self.group_name = group.group_name
        self._layout = layout
        capacity = layout.capacity(max(group.size(), _MOST_RANKS))
        self._memory = _shared(capacity, layout.dtype, layout.device, group)
        self._touched = 0
        self.views = layout.views(self._memory)
        self.pad(group.size())

    def pad(self, ranks: int) -> bool:
        """Have the buffer be for so many ranks; return whether it is long enough."""
        length = self._layout.padded(ranks)
        if length > len(self._memory):
            return False
        self.flat = self._memory[:length]
        self.flat[self._layout.length :].zero_()
        return True

    def touch(self, nbytes: int) -> bool:
        """Have the system give memory for so many bytes more; return whether there is memory for all."""
        end = self._touched + max(1, nbytes // self._memory.itemsize)
        self._memory[self._touched : end].zero_()
        self._touched = end
        return end >= len(self._memory)


def _shared(length: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> torch.Tensor:
    """Return an uninitialised tensor, which the ranks of the group share if it is of the CPU and fits."""
    if device.type == "cpu":
        try:
            return empty(length, dtype=dtype, group=group)
        except InvalidArgumentError:  # the group's shared memory is full: collectives copy, then
            pass
    return torch.empty(length, dtype=dtype, device=device)


class BufferPool:
    """Lend buffers of a layout, and take them back.

    New memory costs more time than a step (a page fault for every 4 KiB), and all ranks would need it at once
    when their group has been replaced. So buffers of the group before serve on, which collectives of the new
    one copy from and to, until :meth:`renew` has replaced them, step by step.
    """

    def __init__(self, layout: FlatLayout, group: ProcessGroup) -> None:
        self.layout = layout
        self._group = group
        self._free: list[FlatBuffer] = []  # padded for the group; its own are at the end
        self._next: FlatBuffer | None = None  # which is to replace one, and partly touched

    def use(self, group: ProcessGroup) -> None:
        """Lend buffers for this group from now on."""
        self._group = group
        self._free = [buffer for buffer in self._free if buffer.pad(group.size())]

    def take(self) -> FlatBuffer:
        """Return a buffer whose elements are anything; padding is 0."""
        return self._free.pop() if self._free else FlatBuffer(self.layout, self._group)

    def give_back(self, buffer: FlatBuffer) -> None:
        """Take a buffer that nothing uses any more."""
        if buffer.pad(self._group.size()):
            self._free.insert(len(self._free) if self._is_own(buffer) else 0, buffer)

    def adopt(self, buffer: FlatBuffer) -> FlatBuffer:
        """Return a buffer that can serve this group, with the elements of one that is lent."""
        if buffer.pad(self._group.size()):
            return buffer
        mine = self.take()
        mine.flat[: self.layout.length].copy_(buffer.flat[: self.layout.length])
        return mine

    def renew(self) -> None:
        """Get on with replacing buffers of another group by such as this group's ranks share."""
        if self._next is not None and not self._is_own(self._next):
            self._next = None  # here and not in use(): its memory's end takes long, and others wait there
            return
        if not self._free or self._is_own(self._free[0]) or self.layout.device.type != "cpu":
            return
        if self._next is None:
            self._next = FlatBuffer(self.layout, self._group)
        if self._next.touch(_RENEWED_BYTES):
            del self._free[0]
            self._free.append(self._next)
            self._next = None

    def _is_own(self, buffer: FlatBuffer) -> bool:
        return buffer.group_name == self._group.group_name
