"""Reductions over several hosts.

Within the host the ranks reduce-scatter, so that the rank at place r holds part r of the host's sum; each
rail reduces its part over the hosts; within the host the ranks gather the parts. A large tensor goes in
chunks: while one is on the way between hosts, the next is reduced within the host.

On a rail of two, each end sends its part to the other and both add them up: as many bytes as any other way,
and one trip. On a longer one each end adds up a piece of the part, from all hosts, and the pieces are
gathered then (Rabenseifner's algorithm). Every sum is over the hosts in their order, whoever computes it, so
all ranks get the same bits.

AVG: of floating-point numbers the host's average is averaged over the hosts, with weights where these have
different numbers of ranks, so that nothing overflows that does not in one host; integers are added up, and
divided at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchestra.engine.multihost.bridge import Pending
from torchestra.engine.multihost.crossing import INLINE_BYTES, Call, Crossing, bytes_of, split_evenly
from torchestra.engine.reductions import combine, reduction
from torchestra.types import ReduceOp

__all__ = ["Reducer"]

_CHUNK_BYTES = 2 << 20
"""Of each rail. Long enough to keep a fast network busy, short enough that the first and last cost little."""

_ON_THE_WAY = 2
_SUM, _AVG = ReduceOp("SUM"), ReduceOp("AVG")


@dataclass
class _Chunk:
    """A part of the tensor on its way.

    Attributes:
        target: where its result goes.
        part: this rank's part of the host's sum; empty beyond the last rail.
        arrived: what comes from the other hosts.
        pending: the operation that brings it.
    """

    target: torch.Tensor
    part: torch.Tensor
    arrived: torch.Tensor
    pending: Pending | None


class Reducer:
    """The reductions of one dtype by one operation."""

    def __init__(self, crossing: Crossing, dtype: torch.dtype, op: ReduceOp) -> None:
        self._crossing = crossing
        self._dtype = dtype
        self._hosts = len(crossing.hosts)
        self._size = len(crossing.hosts.host_of)
        averages = op.name == "AVG"
        self._averages_floats = averages and (dtype.is_floating_point or dtype.is_complex)
        self._divides = averages and not self._averages_floats
        self._op = _SUM if self._divides else op
        self._function = reduction(dtype, self._op)
        self._weight = len(crossing.here) * self._hosts / self._size if self._averages_floats else 1.0

    def all_reduce(self, tensor: torch.Tensor, target: torch.Tensor, call: Call) -> None:
        """Reduce the tensors of all ranks into the target, which may be the tensor."""
        if 0 < tensor.nbytes <= INLINE_BYTES:
            self._all_reduce_inline(tensor, target, call)
            return
        crossing = self._crossing
        crossing.agree(call)
        count = max(1, _CHUNK_BYTES // self._dtype.itemsize) * crossing.hosts.rails
        chunks = zip(tensor.view(-1).split(count), target.view(-1).split(count), strict=True)
        on_the_way: deque[_Chunk] = deque()
        for source, place in chunks:
            if source.numel() == 0:
                continue
            on_the_way.append(self._send(source, place, call))
            if len(on_the_way) == _ON_THE_WAY:
                self._receive(on_the_way.popleft(), call)
        while on_the_way:
            self._receive(on_the_way.popleft(), call)

    def _all_reduce_inline(self, tensor: torch.Tensor, target: torch.Tensor, call: Call) -> None:
        """In one trip: the host's sum goes along with the envelope."""
        crossing = self._crossing
        total = tensor.clone().view(-1)
        plan = crossing.plan(call, self._dtype.itemsize, self._function, root=0)
        differs = not crossing.reduce_here(total, plan, call)
        inline = None
        if crossing.place == 0:
            self._weigh(total)
            inline = bytes_of(total)
        received, differs = crossing.send_envelope(call, differs, inline)
        crossing.settle(call, differs)
        if crossing.place == 0:
            self._combine(total, [row[: total.nbytes] for row in received])
            self._divide(total)
        crossing.share_from(0, total, call)
        bytes_of(target).copy_(bytes_of(total))

    def _send(self, source: torch.Tensor, target: torch.Tensor, call: Call) -> _Chunk:
        """Reduce a chunk within the host, and let this rank's part of it go."""
        crossing = self._crossing
        lengths = split_evenly(source.numel(), crossing.hosts.rails)
        lengths += [0] * (len(crossing.here) - len(lengths))
        part = source.new_empty(lengths[crossing.place])
        self.reduce_scatter_here(part, source.split(lengths), call)
        arrived, pending = part, None
        if crossing.bridge is not None and part.numel():
            if self._hosts == 2:
                arrived = part.new_empty(2 * part.numel())
                pending = crossing.bridge.all_gather(bytes_of(arrived), bytes_of(part), call.seconds)
            else:
                arrived, pending = self._begin_pieces(part, call)
        return _Chunk(target, part, arrived, pending)

    def _begin_pieces(self, part: torch.Tensor, call: Call) -> tuple[torch.Tensor, Pending]:
        crossing, unit = self._crossing, self._dtype.itemsize
        assert crossing.bridge is not None
        lengths = [length * unit for length in split_evenly(part.numel(), self._hosts)]
        own = lengths[crossing.host]
        arrived = part.new_empty(self._hosts * own // unit)
        expected = [own] * self._hosts
        return arrived, crossing.bridge.exchange(
            bytes_of(arrived), expected, bytes_of(part), lengths, call.seconds
        )

    def _receive(self, chunk: _Chunk, call: Call) -> None:
        """Add up what comes from the hosts, and gather the parts within this one."""
        crossing = self._crossing
        if chunk.pending is not None:
            crossing.wait(chunk.pending, call)
            if self._hosts == 2:
                self._combine(chunk.part, [bytes_of(half) for half in chunk.arrived.chunk(2)])
            else:
                self._gather_pieces(chunk, call)
            self._divide(chunk.part)
        lengths = split_evenly(chunk.target.numel(), crossing.hosts.rails)
        lengths += [0] * (len(crossing.here) - len(lengths))
        crossing.share(chunk.target.split(lengths), chunk.part, call)

    def _gather_pieces(self, chunk: _Chunk, call: Call) -> None:
        crossing = self._crossing
        assert crossing.bridge is not None
        lengths = split_evenly(chunk.part.numel(), self._hosts)
        piece = chunk.part.new_zeros(lengths[0])  # the first is the longest
        own = piece[: lengths[crossing.host]]
        if own.numel():
            self._combine(own, [bytes_of(row) for row in chunk.arrived.split(own.numel())])
        pieces = piece.new_empty(self._hosts * piece.numel())
        crossing.wait(crossing.bridge.all_gather(bytes_of(pieces), bytes_of(piece), call.seconds), call)
        rows = zip(pieces.split(piece.numel()), chunk.part.split(lengths), strict=True)
        for row, place in rows:
            place.copy_(row[: place.numel()])

    def reduce_scatter(self, output: torch.Tensor, tensors: Sequence[torch.Tensor], call: Call) -> None:
        """Reduce for each rank the tensors that all ranks have for it; sizes may differ between them."""
        crossing, unit = self._crossing, self._dtype.itemsize
        crossing.agree(call)
        rails, places = crossing.hosts.rails, len(crossing.here)
        blocks = [[tensors[rank].reshape(-1) for rank in ranks] for ranks in crossing.hosts.members]
        flat = [torch.cat(block) for block in blocks]
        cuts = [split_evenly(block.numel(), rails) for block in flat]
        parts = [block.split(cut) for block, cut in zip(flat, cuts, strict=True)]
        by_place = [torch.cat([part[rail] for part in parts]) for rail in range(rails)]
        by_place += [output.new_empty(0)] * (places - rails)
        reduced = output.new_empty(by_place[crossing.place].numel())
        self.reduce_scatter_here(reduced, by_place, call)
        own_cut = cuts[crossing.host]
        part = reduced
        if crossing.bridge is not None:
            part = reduced.new_empty(own_cut[crossing.place])
            arrived = part.new_empty(self._hosts * part.numel())
            sent = [cut[crossing.place] * unit for cut in cuts]
            expected = [part.nbytes] * self._hosts
            if any(sent) or any(expected):
                crossing.wait(
                    crossing.bridge.exchange(
                        bytes_of(arrived), expected, bytes_of(reduced), sent, call.seconds
                    ),
                    call,
                )
            if part.numel():
                self._combine(part, [bytes_of(row) for row in arrived.split(part.numel())])
                self._divide(part)
        own = output.new_empty(sum(own_cut))
        crossing.share(own.split([*own_cut, *[0] * (places - rails)]), part, call)
        before = sum(tensors[rank].numel() for rank in crossing.here[: crossing.place])
        output.view(-1).copy_(own[before : before + output.numel()])

    def reduce_scatter_here(self, output: torch.Tensor, tensors: Sequence[torch.Tensor], call: Call) -> None:
        """Reduce for each place, within the host, what all of its ranks have for it."""
        plan = self._crossing.plan(call, self._dtype.itemsize, self._function)
        self._crossing.local.reduce_scatter(output, tensors, plan, call.seconds, call.site)
        self._weigh(output)

    def _weigh(self, tensor: torch.Tensor) -> None:
        if self._weight != 1.0:
            tensor.mul_(self._weight)

    def _combine(self, target: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        addresses = [source.data_ptr() for source in sources]
        combine(self._dtype, self._op, target.data_ptr(), addresses, target.numel())

    def _divide(self, tensor: torch.Tensor) -> None:
        """Make averages of sums of integers, truncated towards zero."""
        if not self._divides:
            return
        if self._dtype in (torch.uint16, torch.uint32, torch.uint64):
            numbers = tensor.numpy()
            numbers //= self._size
        else:
            tensor.copy_(torch.div(tensor, self._size, rounding_mode="trunc"))
