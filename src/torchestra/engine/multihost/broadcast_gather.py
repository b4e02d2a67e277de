"""Broadcast and the gathering of tensors over several hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from torchestra.engine.multihost.all_to_all import memory
from torchestra.engine.multihost.bridge import Pending
from torchestra.engine.multihost.chunking import ChunkPlan, Joined, chunk_ends
from torchestra.engine.multihost.hierarchy import Call, Hierarchy, bytes_of, split_evenly

_CHUNK_BYTES = 1 << 20
_IN_FLIGHT = 4


def broadcast(hierarchy: Hierarchy, tensor: torch.Tensor, root: int, call: Call) -> None:
    """Replace every rank's tensor by the root's.

    On the root's host all get it first; then each rail brings a part of it to the other hosts, where the
    ranks exchange the parts. Large ones go in chunks.
    """
    hosts = hierarchy.hosts
    source, here = hosts.host_of[root], hosts.host_of[root] == hierarchy.host
    memory = bytes_of(tensor)
    if 0 < memory.numel() <= hierarchy.inline_bytes:
        _broadcast_inline(hierarchy, memory, root, call)
        return
    hierarchy.agree(call)
    in_flight: deque[tuple[torch.Tensor, torch.Tensor, Pending | None]] = deque()
    start = 0
    for end in chunk_ends(memory.numel(), _CHUNK_BYTES * hosts.rails):
        chunk, start = memory[start:end], end
        if here:
            hierarchy.share_from(hosts.local_rank_of[root], chunk, call)
        lengths = _by_local_rank(chunk.numel(), hierarchy)
        part = chunk.split(lengths)[hierarchy.local_rank]
        part = part if here else torch.empty_like(part)
        pending = None
        if hierarchy.bridge is not None and part.numel():
            pending = hierarchy.bridge.broadcast(part, source, call.timeout_s)
        in_flight.append((chunk, part, pending))
        if len(in_flight) == _IN_FLIGHT:
            _finish_broadcast(hierarchy, *in_flight.popleft(), here, call)
    while in_flight:
        _finish_broadcast(hierarchy, *in_flight.popleft(), here, call)


def _by_local_rank(count: int, hierarchy: Hierarchy) -> list[int]:
    lengths = split_evenly(count, hierarchy.hosts.rails)
    return lengths + [0] * (len(hierarchy.here) - len(lengths))


def _finish_broadcast(
    hierarchy: Hierarchy,
    chunk: torch.Tensor,
    part: torch.Tensor,
    pending: Pending | None,
    here: bool,
    call: Call,
) -> None:
    if pending is not None:
        hierarchy.wait(pending, call)
    if not here:
        hierarchy.share(chunk.split(_by_local_rank(chunk.numel(), hierarchy)), part, call)


def _broadcast_inline(hierarchy: Hierarchy, memory: torch.Tensor, root: int, call: Call) -> None:
    hosts = hierarchy.hosts
    source = hosts.host_of[root]
    if not hierarchy.agree_here(call):
        hierarchy.refuse(call)
    if source == hierarchy.host:
        hierarchy.share_from(hosts.local_rank_of[root], memory, call)
    headers = hierarchy.send_header(call, differs=False, inline=memory if source == hierarchy.host else None)
    received, differs = hierarchy.compare_headers(headers, call)
    own = received[source, : memory.numel()] if hierarchy.local_rank == 0 else memory
    memory.copy_(hierarchy.share_verdict_and_result(call, differs, own))


def all_gather(
    hierarchy: Hierarchy, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, call: Call
) -> None:
    """Put every rank's tensor into an output of its own; sizes may differ between ranks.

    The tensors of a host's ranks form a block, which these put together first. Each rail brings a part of
    every block to all hosts, chunk by chunk, and gives it to all ranks there.
    """
    hosts = hierarchy.hosts
    memories = [bytes_of(output) for output in outputs]
    hierarchy.agree(call)
    hierarchy.share([memories[rank] for rank in hierarchy.here], tensor, call)
    blocks = [Joined(_as_few([memories[rank] for rank in ranks])) for ranks in hosts.members]
    cuts = ChunkPlan([block.numel for block in blocks], hosts.rails, _CHUNK_BYTES)
    in_flight: deque[tuple[int, torch.Tensor, Pending | None]] = deque()
    for chunk_index in range(cuts.chunks):
        in_flight.append((chunk_index, *_send_chunk(hierarchy, blocks, cuts, chunk_index, call)))
        if len(in_flight) == _IN_FLIGHT:
            _finish_gather(hierarchy, blocks, cuts, *in_flight.popleft(), call)
    while in_flight:
        _finish_gather(hierarchy, blocks, cuts, *in_flight.popleft(), call)


def _as_few(memories: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Join tensors whose memory is adjacent. A bridge may still send from it when the operation has failed.

    So what is returned keeps the tensors alive.
    """
    joined: list[tuple[int, int]] = []
    for each in memories:
        if joined and joined[-1][0] + joined[-1][1] == each.data_ptr():
            joined[-1] = joined[-1][0], joined[-1][1] + each.numel()
        else:
            joined.append((each.data_ptr(), each.numel()))
    return [memory(each, memories) for each in joined]


def _send_chunk(
    hierarchy: Hierarchy, blocks: Sequence[Joined], cuts: ChunkPlan, chunk_index: int, call: Call
) -> tuple[torch.Tensor, Pending | None]:
    """Send a chunk of this host's block to the others, padded to the longest of all hosts."""
    hosts = range(len(blocks))
    own = blocks[hierarchy.host].get(*cuts.span(hierarchy.host, hierarchy.local_rank, chunk_index))
    longest = max(cuts.length(host, hierarchy.local_rank, chunk_index) for host in hosts)
    arrived = torch.empty(len(blocks) * longest, dtype=torch.uint8)
    if hierarchy.bridge is None or not longest:
        return arrived, None
    if own.numel() < longest:
        own = torch.cat([own, torch.zeros(longest - own.numel(), dtype=torch.uint8)])
    return arrived, hierarchy.bridge.all_gather(arrived, own, call.timeout_s)


def _finish_gather(
    hierarchy: Hierarchy,
    blocks: Sequence[Joined],
    cuts: ChunkPlan,
    chunk_index: int,
    arrived: torch.Tensor,
    pending: Pending | None,
    call: Call,
) -> None:
    """Give what has arrived to all ranks of this host."""
    if pending is not None:
        hierarchy.wait(pending, call)
    rows = arrived.chunk(len(blocks)) if pending is not None else [arrived] * len(blocks)
    for host, (block, row) in enumerate(zip(blocks, rows, strict=True)):
        if host != hierarchy.host:
            spans = [cuts.span(host, local_rank, chunk_index) for local_rank in range(len(hierarchy.here))]
            buffers = [block.buffer(*span) for span in spans]
            hierarchy.share(buffers, row[: buffers[hierarchy.local_rank].numel()], call)
            for (start, _), buffer in zip(spans, buffers, strict=True):
                block.put(start, buffer)
