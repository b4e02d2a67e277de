"""Tensors as blocks of bytes with checksums, which are moved and compared one by one."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from torchestra.elastic.parts import TensorSpec
from torchestra.engine.device.views import raw
from torchestra.engine.kernels.checksum import copy_summed, stream_summed, summed

BLOCK_BYTES = 1 << 20
_MERGED_BELOW = 64 << 10
"""Shorter pieces of a block are sent in one message."""
_MULTIPLIER = 31
_KERNEL_MIN_BYTES = 8


class Piece(NamedTuple):
    """Some bytes of a tensor."""

    tensor: int
    start: int
    stop: int


Block = list[Piece]


def blocks_of(specs: Sequence[TensorSpec]) -> list[Block]:
    """Cut the bytes of all tensors, one after the other, into blocks; all but the last are equally long."""
    blocks: list[Block] = []
    room = 0
    for spec in specs:
        length = spec.dtype.itemsize * torch.Size(spec.shape).numel()
        start = 0
        while start < length:
            if room == 0:
                blocks.append([])
                room = BLOCK_BYTES
            stop = min(length, start + room)
            blocks[-1].append(Piece(spec.number, start, stop))
            room -= stop - start
            start = stop
    return blocks


def bytes_of(block: Block) -> int:
    """Return how long a block is."""
    return sum(piece.stop - piece.start for piece in block)


class TensorBlocks:
    """Give access to the blocks of tensors.

    Args:
        tensors: contiguous, by number (see :class:`TensorSpec`).
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._bytes = [raw(tensor) for tensor in tensors]

    def _pieces(self, block: Block) -> Iterator[torch.Tensor]:
        for piece in block:
            yield self._bytes[piece.tensor][piece.start : piece.stop]

    def checksum(self, block: Block) -> int:
        """Return a checksum of a block, of 64 bits: two that differ have the same one by chance only."""
        value = 0
        for piece in self._pieces(block):
            source = piece.cpu()
            value = _add(source.data_ptr(), len(source), value)
        return value

    def copy_out(self, block: Block, address: int) -> int:
        """Copy a block into memory of its length; return its :meth:`checksum`."""
        value = 0
        for piece in self._pieces(block):
            source = piece.cpu()
            value = _copy(copy_summed, address, source.data_ptr(), len(source), value)
            address += len(piece)
        return value

    def copy_in(self, block: Block, address: int) -> int:
        """Copy a block from memory of its length; return the :meth:`checksum` of what was there.

        It goes past the caches: a state seldom fits into them.
        """
        value = 0
        for piece in self._pieces(block):
            arrived = piece if piece.device.type == "cpu" else torch.empty_like(piece, device="cpu")
            value = _copy(stream_summed, arrived.data_ptr(), address, len(piece), value)
            if arrived is not piece:
                piece.copy_(arrived)
            address += len(piece)
        return value

    def to_send(self, block: Block) -> list[torch.Tensor]:
        """Return a block's bytes as messages: long pieces as they are, copies of the short ones in one."""
        pieces = list(self._pieces(block))
        short = [piece.cpu() for piece in pieces if len(piece) < _MERGED_BELOW]
        long = [piece for piece in pieces if len(piece) >= _MERGED_BELOW]
        return [*long, torch.cat(short)] if short else long

    def to_receive(self, block: Block) -> Receiving:
        """Return where the messages of a block go."""
        pieces = list(self._pieces(block))
        short = [piece for piece in pieces if len(piece) < _MERGED_BELOW]
        long = [piece for piece in pieces if len(piece) >= _MERGED_BELOW]
        return Receiving(long, short)


def _copy(kernel: Callable[..., int], target: int, source: int, length: int, checksum: int) -> int:
    """Copy some bytes, with a kernel where they are enough for it; return the checksum."""
    if length >= _KERNEL_MIN_BYTES:
        return int(kernel(target, source, length, checksum))
    ctypes.memmove(target, source, length)
    return _add(source, length, checksum)


def _add(source: int, length: int, checksum: int) -> int:
    """Return the checksum when some bytes are added."""
    if length >= _KERNEL_MIN_BYTES:
        return int(summed(source, length, checksum))
    return ctypes.c_int64(checksum * _MULTIPLIER + zlib.crc32(ctypes.string_at(source, length))).value


class Receiving:
    """Hold the targets of a block's messages.

    Attributes:
        messages: what to receive into, in the order of :meth:`TensorBlocks.to_send`.
    """

    def __init__(self, long: list[torch.Tensor], short: list[torch.Tensor]) -> None:
        self._short = short
        self._merged = torch.empty(sum(map(len, short)), dtype=torch.uint8) if short else None
        self.messages = long if self._merged is None else [*long, self._merged]

    def finish(self) -> None:
        """Distribute what came in one message; call it when all have come."""
        if self._merged is not None:
            for target, part in zip(
                self._short, self._merged.split([len(each) for each in self._short]), strict=True
            ):
                target.copy_(part)
