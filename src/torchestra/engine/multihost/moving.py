"""Broadcast and the gathering of tensors over several hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from torchestra.engine.multihost.bridge import Pending
from torchestra.engine.multihost.crossing import Call, Crossing, bytes_of, split_evenly
from torchestra.engine.multihost.exchanging import memory
from torchestra.engine.multihost.joined import Cuts, Joined, chunk_ends

__all__ = ["all_gather", "broadcast"]

_CHUNK_BYTES = 1 << 20
_ON_THE_WAY = 4


def broadcast(crossing: Crossing, tensor: torch.Tensor, root: int, call: Call) -> None:
    """Replace every rank's tensor by the root's.

    On the root's host all get it first; then each rail brings a part of it to the other hosts, where the
    ranks exchange the parts. Large ones go in chunks.
    """
    hosts = crossing.hosts
    source, here = hosts.host_of[root], hosts.host_of[root] == crossing.host
    memory = bytes_of(tensor)
    if 0 < memory.numel() <= crossing.inline_bytes:
        _broadcast_inline(crossing, memory, root, call)
        return
    crossing.agree(call)
    on_the_way: deque[tuple[torch.Tensor, torch.Tensor, Pending | None]] = deque()
    start = 0
    for end in chunk_ends(memory.numel(), _CHUNK_BYTES * hosts.rails):
        chunk, start = memory[start:end], end
        if here:
            crossing.share_from(hosts.place_of[root], chunk, call)
        lengths = _by_place(chunk.numel(), crossing)
        part = chunk.split(lengths)[crossing.place]
        part = part if here else torch.empty_like(part)
        pending = None
        if crossing.bridge is not None and part.numel():
            pending = crossing.bridge.broadcast(part, source, call.seconds)
        on_the_way.append((chunk, part, pending))
        if len(on_the_way) == _ON_THE_WAY:
            _finish_broadcast(crossing, *on_the_way.popleft(), here, call)
    while on_the_way:
        _finish_broadcast(crossing, *on_the_way.popleft(), here, call)


def _by_place(number: int, crossing: Crossing) -> list[int]:
    lengths = split_evenly(number, crossing.hosts.rails)
    return lengths + [0] * (len(crossing.here) - len(lengths))


def _finish_broadcast(
    crossing: Crossing,
    chunk: torch.Tensor,
    part: torch.Tensor,
    pending: Pending | None,
    here: bool,
    call: Call,
) -> None:
    if pending is not None:
        crossing.wait(pending, call)
    if not here:
        crossing.share(chunk.split(_by_place(chunk.numel(), crossing)), part, call)


def _broadcast_inline(crossing: Crossing, memory: torch.Tensor, root: int, call: Call) -> None:
    hosts = crossing.hosts
    source = hosts.host_of[root]
    if not crossing.agree_here(call):
        crossing.refuse(call)
    if source == crossing.host:
        crossing.share_from(hosts.place_of[root], memory, call)
    envelope = crossing.post(call, differs=False, inline=memory if source == crossing.host else None)
    received, differs = crossing.open(envelope, call)
    told = received[source, : memory.numel()] if crossing.place == 0 else memory
    memory.copy_(crossing.settle_with(call, differs, told))


def all_gather(crossing: Crossing, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, call: Call) -> None:
    """Put every rank's tensor into an output of its own; sizes may differ between ranks.

    What the ranks of a host have is a block, which they have put together first. Each rail brings a part of
    every block to all hosts, chunk by chunk, and gives what comes to all ranks there.
    """
    hosts = crossing.hosts
    memories = [bytes_of(output) for output in outputs]
    crossing.agree(call)
    crossing.share([memories[rank] for rank in crossing.here], tensor, call)
    blocks = [Joined(_as_few([memories[rank] for rank in ranks])) for ranks in hosts.members]
    cuts = Cuts([block.numel for block in blocks], hosts.rails, _CHUNK_BYTES)
    on_the_way: deque[tuple[int, torch.Tensor, Pending | None]] = deque()
    for number in range(cuts.chunks):
        on_the_way.append((number, *_send_chunk(crossing, blocks, cuts, number, call)))
        if len(on_the_way) == _ON_THE_WAY:
            _finish_gather(crossing, blocks, cuts, *on_the_way.popleft(), call)
    while on_the_way:
        _finish_gather(crossing, blocks, cuts, *on_the_way.popleft(), call)


def _as_few(memories: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory that follows other memory is put together with it."""
    joined: list[tuple[int, int]] = []
    for each in memories:
        if joined and joined[-1][0] + joined[-1][1] == each.data_ptr():
            joined[-1] = joined[-1][0], joined[-1][1] + each.numel()
        else:
            joined.append((each.data_ptr(), each.numel()))
    return [memory(place) for place in joined]


def _send_chunk(
    crossing: Crossing, blocks: Sequence[Joined], cuts: Cuts, number: int, call: Call
) -> tuple[torch.Tensor, Pending | None]:
    """Let a chunk of this host's block go to the others, padded to the longest of all hosts."""
    hosts = range(len(blocks))
    own = blocks[crossing.host].get(*cuts.span(crossing.host, crossing.place, number))
    longest = max(cuts.length(host, crossing.place, number) for host in hosts)
    arrived = torch.empty(len(blocks) * longest, dtype=torch.uint8)
    if crossing.bridge is None or not longest:
        return arrived, None
    if own.numel() < longest:
        own = torch.cat([own, torch.zeros(longest - own.numel(), dtype=torch.uint8)])
    return arrived, crossing.bridge.all_gather(arrived, own, call.seconds)


def _finish_gather(
    crossing: Crossing,
    blocks: Sequence[Joined],
    cuts: Cuts,
    number: int,
    arrived: torch.Tensor,
    pending: Pending | None,
    call: Call,
) -> None:
    """Give what has come to all ranks of this host."""
    if pending is not None:
        crossing.wait(pending, call)
    rows = arrived.chunk(len(blocks)) if pending is not None else [arrived] * len(blocks)
    for host, (block, row) in enumerate(zip(blocks, rows, strict=True)):
        if host != crossing.host:
            spans = [cuts.span(host, place, number) for place in range(len(crossing.here))]
            rooms = [block.room(*span) for span in spans]
            crossing.share(rooms, row[: rooms[crossing.place].numel()], call)
            for (start, _), room in zip(spans, rooms, strict=True):
                block.put(start, room)
