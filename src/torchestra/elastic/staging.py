"""Blocks that go from rank to rank within a host through a few places in memory that both can address.

A source has SLOTS places for each of its targets, in its heap. It copies block k of those for a target into
place k modulo SLOTS, and tells the block's checksum; the target copies it from there to where it belongs,
and tells that the place is free. Both copies compute the checksum in passing. A place is small enough to stay
in the last-level cache, so that between the two copies nothing goes through memory.

No deadlock: all ranks go through k = 0, 1, … and send their blocks k before they receive those of others. To
send block k a source waits for the target's copy of block k - SLOTS, to receive block k a target waits for
the source's sending of it: each for something earlier in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from torchestra.collectives.functions import recv, send
from torchestra.elastic.blocks import BLOCK_BYTES
from torchestra.errors import InvalidArgumentError
from torchestra.process_group import ProcessGroup

SLOTS = 3
MIN_BLOCKS = 4
"""Fewer between two ranks go by messages: new memory costs more than what is spared."""
_FILLED, _FREE = 1, 2  # tags


class Stream(NamedTuple):
    """Say which blocks go from one rank to another, and where their places are.

    Attributes:
        source, target: the ranks.
        blocks: numbers of blocks, in their order.
        address: of the first place, in this process.
    """

    source: int
    target: int
    blocks: Sequence[int]
    address: int


class Slots:
    """Hold the places that this rank has for its targets.

    Attributes:
        offset: where they are in this rank's heap; None if there are none.
    """

    def __init__(self, group: ProcessGroup, targets: int) -> None:
        engine = group.communicator.engine
        self._memory: torch.Tensor | None = None
        self.offset: int | None = None
        heap = engine.heap_of(group.rank())
        if not targets or heap is None:
            return
        try:
            self._memory = engine.empty((targets * SLOTS * BLOCK_BYTES,), torch.uint8)
        except InvalidArgumentError:  # the group's shared memory is full: blocks go by messages, then
            return
        self.offset = self._memory.data_ptr() - heap


def move(
    group: ProcessGroup,
    streams: Sequence[Stream],
    copy_out: Callable[[int, int], int],
    copy_in: Callable[[int, int], int],
) -> tuple[list[int], list[int]]:
    """Send and receive the blocks of all streams of this rank; all ranks of the streams call this.

    Args:
        streams: those that this rank is the source or the target of.
        copy_out: called with a block's number and an address to copy it to; returns its checksum.
        copy_in: called with a block's number and the address to copy it from; returns its checksum.

    Returns:
        The blocks that have come, and those of them whose checksum is not the source's.
    """
    came: list[int] = []
    bad: list[int] = []
    word = torch.zeros(1, dtype=torch.int64)
    me = group.rank()
    outgoing = [stream for stream in streams if stream.source == me]
    incoming = [stream for stream in streams if stream.target == me]
    longest = max((len(stream.blocks) for stream in streams), default=0)
    for k in range(longest + SLOTS):
        for stream in outgoing:
            if SLOTS <= k < len(stream.blocks) + SLOTS:  # at the end too, so that nothing is on its way
                recv(word, group=group, group_src=stream.target, tag=_FREE)
            if k < len(stream.blocks):
                number = stream.blocks[k]
                word[0] = copy_out(number, _slot_address(stream, k))
                send(word, group=group, group_dst=stream.target, tag=_FILLED)
        for stream in incoming:
            if k < len(stream.blocks):
                recv(word, group=group, group_src=stream.source, tag=_FILLED)
                came.append(stream.blocks[k])
                if copy_in(stream.blocks[k], _slot_address(stream, k)) != int(word[0]):
                    bad.append(stream.blocks[k])
                send(word, group=group, group_dst=stream.source, tag=_FREE)
    return came, bad


def _slot_address(stream: Stream, k: int) -> int:
    return stream.address + k % SLOTS * BLOCK_BYTES
