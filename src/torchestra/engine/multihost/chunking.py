"""Treat several tensors as one, and cut one into chunks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from torchestra.engine.multihost.hierarchy import bytes_of, split_evenly

_FIRST, _LEAST = 4, 8
"""The first chunk is this part of the longest, and the last is at least that."""


def chunk_ends(length: int, longest: int) -> list[int]:
    """Return the ends of the chunks that ``length`` elements are cut into.

    The first is short, so that the link is soon busy, and so are the last ones, because the hosts work on
    them after the link is done.
    """
    ends: list[int] = []
    least = max(1, longest // _LEAST)
    at, limit = 0, max(1, longest // _FIRST)
    while at < length:
        rest = length - at
        at += min(rest, limit, max(least, -(-rest // 2)))
        limit = min(2 * limit, max(1, longest))
        ends.append(at)
    return ends


class Joined:
    """Treat some contiguous tensors of one dtype as one, with as few copies as possible.

    Attributes:
        numel: how many elements there are in all.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor.view(-1) for tensor in tensors]
        self._starts = [*accumulate((tensor.numel() for tensor in tensors), initial=0)]
        self.numel = self._starts[-1]

    def get(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements of a range: a view if they are in one tensor, else a copy."""
        pieces = self._pieces(start, stop)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def buffer(self, start: int, stop: int) -> torch.Tensor:
        """Return a tensor to fill for :meth:`put`: a view if the range is in one tensor."""
        pieces = self._pieces(start, stop)
        return pieces[0] if len(pieces) == 1 else pieces[0].new_empty(stop - start)

    def put(self, start: int, tensor: torch.Tensor) -> None:
        """Copy a tensor to the range from ``start`` on. (As bytes, since torch cannot copy every dtype.)"""
        pieces = self._pieces(start, start + tensor.numel())
        for piece, source in zip(pieces, tensor.split([each.numel() for each in pieces]), strict=True):
            if piece.data_ptr() != source.data_ptr():
                bytes_of(piece).copy_(bytes_of(source))

    def _pieces(self, start: int, stop: int) -> list[torch.Tensor]:
        if start == stop:
            return [self._tensors[0][:0]]
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)
        starts = self._starts
        return [
            self._tensors[each][max(start - starts[each], 0) : stop - starts[each]]
            for each in range(first, last)
        ]


class ChunkPlan:
    """Cut the hosts' blocks into a part for each rail, and these into chunks.

    Args:
        lengths: of the blocks, by host.
        rails: how many there are.
        longest: how long a chunk is at most.

    Attributes:
        chunks: how many chunks the longest part has.
    """

    def __init__(self, lengths: Sequence[int], rails: int, longest: int) -> None:
        cuts = [split_evenly(length, rails) for length in lengths]
        self._starts = [[*accumulate(cut, initial=0)] for cut in cuts]
        self._ends = [0, *chunk_ends(max(max(cut) for cut in cuts), longest)]
        self.chunks = len(self._ends) - 1

    def span(self, host: int, rail: int, chunk_index: int) -> tuple[int, int]:
        """Return the range of a rail's chunk in a host's block; empty beyond the last rail or chunk."""
        starts = self._starts[host]
        if rail + 1 >= len(starts):
            return 0, 0
        start, end = starts[rail], starts[rail + 1]
        return min(start + self._ends[chunk_index], end), min(start + self._ends[chunk_index + 1], end)

    def length(self, host: int, rail: int, chunk_index: int) -> int:
        """Return the length of that range."""
        start, stop = self.span(host, rail, chunk_index)
        return stop - start
