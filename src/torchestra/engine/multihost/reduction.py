"""Reductions over several hosts.

Within the host the ranks reduce-scatter, so that local rank r holds part r of the host's sum; each
rail reduces its part over the hosts; within the host the ranks gather the parts. A large tensor goes in
chunks: while one is on the way between hosts, the next is reduced within the host. The first ones are on
their way before it is known that all hosts have called the same.

On a rail of two, each end sends its part to the other and both add them up: as many bytes as any other way,
and one trip. On a longer one each end adds up a piece of the part, from all hosts, and the pieces are
gathered then (Rabenseifner's algorithm); all_reduce among many hosts does so in two steps (grid.py). Every
sum is over the hosts in their order, or over those of a row and then over the rows, whichever rank computes
it, so all ranks get the same bits.

AVG: of floating-point numbers the host's average is averaged over the hosts, with weights where these have
different numbers of ranks, so that nothing overflows that does not in one host; integers are added up, and
divided at the end.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from torchestra.engine.kernels.reductions import combine, divide, reduction, scale
from torchestra.engine.multihost.bridge import Pending
from torchestra.engine.multihost.chunking import ChunkPlan, Joined, chunk_ends
from torchestra.engine.multihost.hierarchy import EAGER_CHUNKS, Call, Hierarchy, bytes_of, split_evenly
from torchestra.engine.operations import ALL_REDUCE, REDUCE_SCATTER
from torchestra.types import ReduceOp

_CHUNK_BYTES = 1 << 20
"""Of each rail."""

_IN_FLIGHT = 4
"""How many chunks there are between the hosts at once. Gloo sends a message when it has been told that it is
expected, and is told so after whatever is sent to it before."""

_SUM, _AVG = ReduceOp("SUM"), ReduceOp("AVG")


@dataclass
class _Chunk:
    """A part of the tensors on its way.

    Attributes:
        start, stop: which one.
        part: this rank's part of the host's sum, and then of the whole; empty beyond the last rail.
        pending: the transfer of the other hosts' parts.
        rows: these, by host.
        pieces: in a grid, the part, then the piece of it that this host has reduced over its row, and then
            that over its column.
    """

    start: int
    stop: int
    part: torch.Tensor
    pending: Pending | None = None
    rows: Sequence[torch.Tensor] = ()
    pieces: list[torch.Tensor] = field(default_factory=list)


def _pending(chunks: Iterable[_Chunk]) -> list[Pending]:
    return [chunk.pending for chunk in chunks if chunk.pending is not None]


class Reducer:
    """The reductions of one dtype by one operation."""

    def __init__(self, hierarchy: Hierarchy, dtype: torch.dtype, op: ReduceOp) -> None:
        self._hierarchy = hierarchy
        self._dtype = dtype
        self._hosts = len(hierarchy.hosts)
        self._size = len(hierarchy.hosts.host_of)
        averages = op.name == "AVG"
        self._averages_floats = averages and (dtype.is_floating_point or dtype.is_complex)
        self._divides = averages and not self._averages_floats
        self._op = _SUM if self._divides else op
        self._function = reduction(dtype, self._op)
        self._weight = len(hierarchy.here) * self._hosts / self._size if self._averages_floats else 1.0
        # How many chunks to gather at once; of two hosts each has the sum already.
        self._kept = 1 if self._hosts == 2 else 2
        grid, host = hierarchy.grid, hierarchy.host
        self._ways = [] if grid is None else [grid.row(host), grid.column(host)]

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], call: Call
    ) -> None:
        """Reduce the tensors of all ranks, as if they were one, into the targets, which may be the tensors.

        The ranks' tensors need not be cut alike.
        """
        source, target = Joined(tensors), Joined(targets)
        if 0 < source.numel * self._dtype.itemsize <= self._hierarchy.inline_bytes:
            self._all_reduce_inline(source, target, call)
            return
        longest = max(1, _CHUNK_BYTES // self._dtype.itemsize) * self._hierarchy.hosts.rails
        spans = [*itertools.pairwise([0, *chunk_ends(source.numel, longest)])]
        sent: deque[_Chunk] = deque()
        ready: deque[_Chunk] = deque()

        def begin() -> list[Pending]:
            for span in spans[: EAGER_CHUNKS + 1]:
                ready.append(self._reduce_here(source, *span, call))
                if len(sent) < EAGER_CHUNKS and self._send(ready[0], call, eager=True):
                    sent.append(ready.popleft())
            return _pending(sent)

        self._hierarchy.agree(call, begin)
        summed: deque[_Chunk] = deque()
        for span in spans[len(sent) :]:
            chunk = ready.popleft() if ready else self._reduce_here(source, *span, call)
            self._send(chunk, call)
            sent.append(chunk)
            if len(sent) == _IN_FLIGHT:
                summed.append(self._sum(sent.popleft(), call))
            if len(summed) == self._kept:
                self._receive(summed.popleft(), target, call)
        while sent or summed:
            if sent:
                summed.append(self._sum(sent.popleft(), call))
            self._receive(summed.popleft(), target, call)

    def _all_reduce_inline(self, source: Joined, target: Joined, call: Call) -> None:
        """Reduce in one trip: the host's sum goes along with the envelope."""
        hierarchy = self._hierarchy
        total = source.get(0, source.numel).clone()
        if not hierarchy.reduce_here(
            total, hierarchy.plan(ALL_REDUCE, call, self._dtype.itemsize, self._function, root=0), call
        ):
            hierarchy.refuse(call)
        if hierarchy.local_rank == 0:
            self._scale_total(total)
        headers = hierarchy.send_header(call, differs=False, inline=bytes_of(total))
        received, differs = hierarchy.compare_headers(headers, call)
        if hierarchy.local_rank == 0 and not differs:
            self._combine(total, [row[: total.nbytes] for row in received])
            self._divide(total)
        bytes_of(total).copy_(hierarchy.share_verdict_and_result(call, differs, bytes_of(total)))
        target.put(0, total)

    def _lengths(self, count: int) -> list[int]:
        """Return, by local rank, the length of its part of ``count`` elements."""
        rails = self._hierarchy.hosts.rails
        return split_evenly(count, rails) + [0] * (len(self._hierarchy.here) - rails)

    def _reduce_here(self, source: Joined, start: int, stop: int, call: Call) -> _Chunk:
        """Reduce a chunk within the host; return this rank's part of it."""
        whole = source.get(start, stop)
        lengths = self._lengths(stop - start)
        part = whole.new_empty(lengths[self._hierarchy.local_rank])
        self.reduce_scatter_here(part, whole.split(lengths), call)
        return _Chunk(start, stop, part)

    def _send(self, chunk: _Chunk, call: Call, *, eager: bool = False) -> bool:
        """Send this rank's part of a chunk: all of it to the only other host, or a piece to each host."""
        if self._ways:
            if not eager:
                chunk.pieces = [chunk.part]
                self._scatter(chunk, call)
            return not eager
        host, count = self._hierarchy.host, chunk.part.numel()
        if self._hosts > 2:
            lengths = split_evenly(count, self._hosts)
            return self._send_pieces(chunk, lengths, [lengths[host]] * self._hosts, call, eager=eager)
        lengths = [0 if each == host else count for each in range(2)]
        return self._send_pieces(chunk, lengths, lengths, call, eager=eager)

    def _send_pieces(
        self, chunk: _Chunk, sent: Sequence[int], expected: Sequence[int], call: Call, *, eager: bool
    ) -> bool:
        """Send a piece of a part to each host.

        Args:
            sent, expected: by host, the lengths of the pieces that go there and come from there.
            eager: it is not yet known that all ranks have called the same. Then nothing is begun unless all
                hosts send each other something, and not too much; all ends decide alike.

        Returns:
            Whether it has been begun.
        """
        bridge, unit = self._hierarchy.bridge, self._dtype.itemsize
        buffer_lengths = list(expected)
        if eager:
            most = self._hierarchy.eager_bytes // unit
            others = [each != self._hierarchy.host for each in range(self._hosts)]
            lengths = itertools.compress((*sent, *expected), others * 2)
            if not all(0 < length <= most for length in lengths):
                return False
            buffer_lengths = [
                most if other else length for other, length in zip(others, buffer_lengths, strict=True)
            ]
        if bridge is None or not any((*sent, *expected)):
            return False
        arrived = chunk.part.new_empty(sum(buffer_lengths))
        chunk.rows = [
            row[:length] for row, length in zip(arrived.split(buffer_lengths), expected, strict=True)
        ]
        in_bytes = ([unit * length for length in lengths] for lengths in (buffer_lengths, sent))
        room_bytes, sent_bytes = in_bytes
        chunk.pending = bridge.exchange(
            bytes_of(arrived), room_bytes, bytes_of(chunk.part), sent_bytes, call.timeout_s
        )
        return True

    def _sum(self, chunk: _Chunk, call: Call) -> _Chunk:
        """Reduce the data of the other hosts; of more than two, send them the sum of the own piece."""
        hierarchy, part = self._hierarchy, chunk.part
        if chunk.pending is None or hierarchy.bridge is None:
            return chunk
        if self._ways:
            self._add_up(chunk, call)
            self._scatter(chunk, call)
            self._add_up(chunk, call)
            self._gather(chunk, call)
            return chunk
        hierarchy.wait(chunk.pending, call)
        chunk.pending = None
        if self._hosts == 2:
            rows = [part if host == hierarchy.host else row for host, row in enumerate(chunk.rows)]
            self._combine(part, [bytes_of(row) for row in rows])
            return chunk
        lengths = split_evenly(part.numel(), self._hosts)
        piece = part.new_zeros(lengths[0])  # the first is the longest
        own = piece[: lengths[hierarchy.host]]
        if own.numel():
            self._combine(own, [bytes_of(row) for row in chunk.rows])
        arrived = piece.new_empty(self._hosts * piece.numel())
        chunk.rows = arrived.split(piece.numel())
        chunk.pending = hierarchy.bridge.all_gather(bytes_of(arrived), bytes_of(piece), call.timeout_s)
        return chunk

    def _receive(self, chunk: _Chunk, target: Joined, call: Call) -> None:
        """Gather the sum's pieces from the hosts, and its parts within this one."""
        hierarchy, part = self._hierarchy, chunk.part
        if chunk.pending is not None and self._ways:
            self._put_together(chunk, call)
            self._gather(chunk, call)
            self._put_together(chunk, call)
        elif chunk.pending is not None:
            hierarchy.wait(chunk.pending, call)
            lengths = split_evenly(part.numel(), self._hosts)
            for row, target_piece in zip(chunk.rows, part.split(lengths), strict=True):
                target_piece.copy_(row[: target_piece.numel()])
        if part.numel():
            self._divide(part)
        whole = target.buffer(chunk.start, chunk.stop)
        hierarchy.share(whole.split(self._lengths(whole.numel())), part, call)
        target.put(chunk.start, whole)

    # -- in a grid (grid.py): over the row, then over the column, and back

    def _scatter(self, chunk: _Chunk, call: Call) -> None:
        """Begin to send each host of the next way its part of the last piece."""
        bridge, way, piece = self._hierarchy.bridge, self._ways[len(chunk.pieces) - 1], chunk.pieces[-1]
        if bridge is None:
            return
        lengths = split_evenly(piece.numel(), len(way))
        own = lengths[way.index(self._hierarchy.host)]
        chunk.rows = list(piece.new_empty((len(way), own)))
        parts = [bytes_of(part) for part in piece.split(lengths)]
        chunk.pending = bridge.exchange_among(way, [*map(bytes_of, chunk.rows)], parts, call.timeout_s)

    def _add_up(self, chunk: _Chunk, call: Call) -> None:
        """Reduce what the hosts of a way have sent."""
        assert chunk.pending is not None
        self._hierarchy.wait(chunk.pending, call)
        own = torch.empty_like(chunk.rows[0])
        if own.numel():
            self._combine(own, [bytes_of(row) for row in chunk.rows])
        chunk.pieces.append(own)

    def _gather(self, chunk: _Chunk, call: Call) -> None:
        """Begin to tell the hosts of the last way what this one has reduced."""
        bridge, way = self._hierarchy.bridge, self._ways[len(chunk.pieces) - 2]
        assert bridge is not None
        own, whole = chunk.pieces.pop(), chunk.pieces[-1]
        chunk.rows = whole.split(split_evenly(whole.numel(), len(way)))
        buffers = [bytes_of(row) for row in chunk.rows]
        chunk.pending = bridge.exchange_among(way, buffers, [bytes_of(own)] * len(way), call.timeout_s)

    def _put_together(self, chunk: _Chunk, call: Call) -> None:
        """Wait until the pieces of the hosts of a way have arrived."""
        assert chunk.pending is not None
        self._hierarchy.wait(chunk.pending, call)

    def reduce_scatter(self, output: torch.Tensor, tensors: Sequence[torch.Tensor], call: Call) -> None:
        """Reduce for each rank the tensors that all ranks have for it; sizes may differ between them.

        What is for the ranks of a host is a block. Each rail reduces a part of every block, chunk by chunk.
        """
        hierarchy = self._hierarchy
        members, host = hierarchy.hosts.members, hierarchy.host
        blocks = [Joined([tensors[rank] for rank in ranks]) for ranks in members]
        cuts = ChunkPlan(
            [block.numel for block in blocks], hierarchy.hosts.rails, _CHUNK_BYTES // self._dtype.itemsize
        )
        sent: deque[_Chunk] = deque()
        ready: deque[_Chunk] = deque()

        def begin() -> list[Pending]:
            for chunk_index in range(cuts.chunks)[: EAGER_CHUNKS + 1]:
                ready.append(self._reduce_blocks(blocks, cuts, chunk_index, call))
                if len(sent) < EAGER_CHUNKS and self._send_blocks(ready[0], cuts, call, eager=True):
                    sent.append(ready.popleft())
            return _pending(sent)

        hierarchy.agree(call, begin)
        own = output.new_empty(blocks[host].numel)
        for chunk_index in range(len(sent), cuts.chunks):
            chunk = ready.popleft() if ready else self._reduce_blocks(blocks, cuts, chunk_index, call)
            self._send_blocks(chunk, cuts, call)
            sent.append(chunk)
            if len(sent) == _IN_FLIGHT:
                self._receive_block(sent.popleft(), cuts, own, call)
        while sent:
            self._receive_block(sent.popleft(), cuts, own, call)
        before = sum(tensors[rank].numel() for rank in hierarchy.here[: hierarchy.local_rank])
        output.view(-1).copy_(own[before : before + output.numel()])

    def _reduce_blocks(
        self, blocks: Sequence[Joined], cuts: ChunkPlan, chunk_index: int, call: Call
    ) -> _Chunk:
        """Reduce a chunk of all blocks within the host; return this rank's part of it, block by block."""
        hosts, local_ranks = range(self._hosts), range(len(self._hierarchy.here))
        by_local_rank = [
            [
                block.get(*cuts.span(host, local_rank, chunk_index))
                for host, block in zip(hosts, blocks, strict=True)
            ]
            for local_rank in local_ranks[: self._hierarchy.hosts.rails]
        ]
        sources = [torch.cat(parts) for parts in by_local_rank]
        sources += [blocks[0].get(0, 0)] * (len(local_ranks) - len(sources))
        part = torch.empty_like(sources[self._hierarchy.local_rank])
        self.reduce_scatter_here(part, sources, call)
        return _Chunk(chunk_index, chunk_index, part)

    def _send_blocks(self, chunk: _Chunk, cuts: ChunkPlan, call: Call, *, eager: bool = False) -> bool:
        """Send the pieces of a part to the hosts that they are for."""
        hierarchy = self._hierarchy
        sent = [cuts.length(host, hierarchy.local_rank, chunk.start) for host in range(self._hosts)]
        return self._send_pieces(chunk, sent, [sent[hierarchy.host]] * self._hosts, call, eager=eager)

    def _receive_block(self, chunk: _Chunk, cuts: ChunkPlan, own: torch.Tensor, call: Call) -> None:
        """Reduce the data that has come for this host, and share it with its ranks."""
        hierarchy, chunk_index = self._hierarchy, chunk.start
        total = own[:0]
        if chunk.pending is not None:
            hierarchy.wait(chunk.pending, call)
            if chunk.rows[0].numel():
                total = torch.empty_like(chunk.rows[0])
                self._combine(total, [bytes_of(row) for row in chunk.rows])
                self._divide(total)
        rails = hierarchy.hosts.rails
        pieces = [own[slice(*cuts.span(hierarchy.host, rail, chunk_index))] for rail in range(rails)]
        hierarchy.share([*pieces, *[own[:0]] * (len(hierarchy.here) - rails)], total, call)

    def reduce_scatter_here(self, output: torch.Tensor, tensors: Sequence[torch.Tensor], call: Call) -> None:
        """Reduce for each local rank, within the host, the tensors that all of its ranks have for it."""
        plan = self._hierarchy.plan(REDUCE_SCATTER, call, self._dtype.itemsize, self._function)
        self._hierarchy.local.collective(plan, tensors, [output], call.timeout_s, call.site)
        self._scale_total(output)

    def _scale_total(self, tensor: torch.Tensor) -> None:
        if self._weight != 1.0:
            scale(self._dtype, tensor.data_ptr(), self._weight, tensor.numel())

    def _combine(self, target: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        addresses = [source.data_ptr() for source in sources]
        combine(self._dtype, self._op, target.data_ptr(), addresses, target.numel())

    def _divide(self, tensor: torch.Tensor) -> None:
        """Make averages of sums of integers, truncated towards zero."""
        if self._divides:
            divide(self._dtype, tensor.data_ptr(), self._size, tensor.numel())
