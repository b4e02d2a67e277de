"""Broadcast and the gathering of tensors over several hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from torchestra.engine.multihost.bridge import Pending
from torchestra.engine.multihost.crossing import INLINE_BYTES, Call, Crossing, bytes_of, split_evenly

__all__ = ["all_gather", "broadcast"]

_CHUNK_BYTES = 2 << 20
_ON_THE_WAY = 2


def broadcast(crossing: Crossing, tensor: torch.Tensor, root: int, call: Call) -> None:
    """Replace every rank's tensor by the root's.

    On the root's host all get it first; then each rail brings a part of it to the other hosts, where the
    ranks exchange the parts. Large ones go in chunks.
    """
    hosts = crossing.hosts
    source, here = hosts.host_of[root], hosts.host_of[root] == crossing.host
    memory = bytes_of(tensor)
    if 0 < memory.numel() <= INLINE_BYTES:
        _broadcast_inline(crossing, memory, root, call)
        return
    crossing.agree(call)
    on_the_way: deque[tuple[torch.Tensor, torch.Tensor, Pending | None]] = deque()
    for chunk in memory.split(_CHUNK_BYTES * hosts.rails):
        if chunk.numel() == 0:
            continue
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
    differs = not crossing.agree_here(call)
    if source == crossing.host and not differs:
        crossing.share_from(hosts.place_of[root], memory, call)
    received, differs = crossing.send_envelope(call, differs, memory if crossing.place == 0 else None)
    crossing.settle(call, differs)
    if crossing.place == 0:
        memory.copy_(received[source, : memory.numel()])
    crossing.share_from(0, memory, call)


def all_gather(crossing: Crossing, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, call: Call) -> None:
    """Put every rank's tensor into an output of its own; sizes may differ between ranks."""
    crossing.agree(call)
    lengths = [output.nbytes for output in outputs]
    by_host = [[lengths[rank] for rank in ranks] for ranks in crossing.hosts.members]
    own = torch.empty(sum(by_host[crossing.host]), dtype=torch.uint8)
    crossing.share(own.split(by_host[crossing.host]), tensor, call)
    blocks = crossing.spread(own, [sum(each) for each in by_host], call)
    for ranks, each, block in zip(crossing.hosts.members, by_host, blocks, strict=True):
        for rank, piece in zip(ranks, block.split(each), strict=True):
            bytes_of(outputs[rank]).copy_(piece)
