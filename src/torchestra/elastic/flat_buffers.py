"""Flat buffers that hold one value per element of many tensors, in memory that the ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchestra.collectives.shared_tensors import empty
from torchestra.errors import InvalidArgumentError
from torchestra.process_group import ProcessGroup

_ALIGNMENT = 64  # bytes: where a tensor begins, and a rank's share


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

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a buffer, by slot, in their tensors' shapes."""
        return [
            flat[offset : offset + self.tensors[index].numel()].view(self.tensors[index].shape)
            for index, offset in self.slots
        ]


class FlatBuffer:
    """Hold a buffer of a layout.

    Attributes:
        flat: the whole, padded.
        views: its parts, by slot.
    """

    __slots__ = ("flat", "views")

    def __init__(self, layout: FlatLayout, group: ProcessGroup) -> None:
        self.flat = shared(layout.padded(group.size()), layout.dtype, layout.device, group).zero_()
        self.views = layout.views(self.flat)


def shared(length: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> torch.Tensor:
    """Return an uninitialised tensor, which the ranks of the group share if it is of the CPU and fits."""
    if device.type == "cpu":
        try:
            return empty(length, dtype=dtype, group=group)
        except InvalidArgumentError:  # the group's shared memory is full: collectives copy, then
            pass
    return torch.empty(length, dtype=dtype, device=device)


class BufferPool:
    """Lend buffers of a layout in the memory of one group, and take them back."""

    def __init__(self, layout: FlatLayout, group: ProcessGroup) -> None:
        self.layout = layout
        self.group = group
        self._free: list[FlatBuffer] = []

    def take(self) -> FlatBuffer:
        """Return a buffer whose elements are anything; padding is 0."""
        return self._free.pop() if self._free else FlatBuffer(self.layout, self.group)

    def give_back(self, buffer: FlatBuffer) -> None:
        """Take a buffer that nothing uses any more; one of another group is forgotten."""
        if buffer.flat.numel() == self.layout.padded(self.group.size()):
            self._free.append(buffer)

    def adopt(self, buffer: FlatBuffer) -> FlatBuffer:
        """Return a buffer of this group with the elements of one that another group had."""
        mine = self.take()
        length = self.layout.length
        mine.flat[:length].copy_(buffer.flat[:length])
        return mine
