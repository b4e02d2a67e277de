"""The collectives among ranks of one host: arguments of a tensor operation become those of a kernel.

Every method takes contiguous CPU tensors that have been checked, returns when the operation is done, and raises
what :meth:`Member.finish` raises. ``seconds`` is how long it may wait for the other ranks, ``site`` the calling
line where that is not on the thread's stack (asynchronous operations).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchestra.engine import layout as at
from torchestra.engine.algorithms import Choices
from torchestra.engine.channels import Mailbox
from torchestra.engine.kernels import move, reduce
from torchestra.engine.member import Member
from torchestra.engine.operations import DTYPE_CODE, DTYPES, UNEVEN, Kind, pack
from torchestra.engine.reductions import reduction, supports
from torchestra.types import ReduceOp

_BARRIER = pack(Kind.barrier)


def _uneven(lengths: Sequence[int]) -> int:
    """A count for lengths that differ between the ranks: all must mean the same ones."""
    return UNEVEN | (hash(tuple(lengths)) & (UNEVEN - 1))


class LocalEngine:
    """One rank's engine in a group whose ranks share an arena."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.size = member.size
        self.rank = member.rank
        self.choices = Choices.for_group(member.size, member.arena.layout.slot_bytes)
        member.set_word(at.STREAM_ABOVE, self.choices.stream_above)
        self.mailbox = Mailbox(member)
        self._context = member.context
        # (meta, bytes per element, address of the reduction) by operation and dtype, filled as they are used.
        self._reductions: list[dict[torch.dtype, tuple[int, int, int]]] = [{} for _ in ReduceOp._NAMES]
        self._heap_first = member.heap.first_address
        self._heap_last = member.heap.last_address

    def reduction_of(self, dtype: torch.dtype, op: ReduceOp) -> tuple[int, int, int]:
        known = self._reductions[op.code].get(dtype)
        if known is None:
            known = (pack(Kind.all_reduce, dtype, op), dtype.itemsize, reduction(dtype, op))
            self._reductions[op.code][dtype] = known
        return known

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, seconds: float, site: str | None = None) -> None:
        """Replace the tensor by the reduction of all ranks' tensors."""
        known = self._reductions[op.code].get(tensor.dtype)
        meta, unit, function = known if known is not None else self.reduction_of(tensor.dtype, op)
        address = tensor.data_ptr()
        count = tensor.numel()
        if count * unit <= self.choices.direct:
            chunk, shared = 0, at.NOT_SHARED
        else:
            chunk = self.choices.all_reduce_chunk(count, unit)
            shared = self.member.heap.offset_of(address)
        code = reduce.all_reduce(
            self._context, meta, count, address, address, unit, function, -1, chunk, shared
        )
        if code != at.DONE:
            arguments = (self._context, meta, count, address, address, unit, function, -1, chunk, shared)
            self.member.finish(code, reduce.all_reduce, arguments, seconds, site)

    def reduce(
        self, tensor: torch.Tensor, op: ReduceOp, root: int, seconds: float, site: str | None = None
    ) -> None:
        """Replace the root's tensor by the reduction; the others' stay as they are."""
        _, unit, function = self.reduction_of(tensor.dtype, op)
        meta = pack(Kind.reduce, tensor.dtype, op, root)
        address, count = tensor.data_ptr(), tensor.numel()
        chunk = self.choices.all_reduce_chunk(count, unit)
        shared = self.member.heap.offset_of(address)
        self._run(
            reduce.all_reduce,
            (self._context, meta, count, address, address, unit, function, root, chunk, shared),
            seconds,
            site,
        )

    def broadcast(self, tensor: torch.Tensor, root: int, seconds: float, site: str | None = None) -> None:
        """Replace every rank's tensor by the root's."""
        address, count, length = tensor.data_ptr(), tensor.numel(), tensor.nbytes
        meta = pack(Kind.broadcast, tensor.dtype, root=root)
        chunk = self.choices.share_chunk(length)
        shared = self.member.heap.offset_of(address)
        self._run(
            move.broadcast,
            (self._context, meta, count, address, length, root, chunk, shared),
            seconds,
            site,
        )

    def all_gather_flat(
        self, output: torch.Tensor, tensor: torch.Tensor, seconds: float, site: str | None = None
    ) -> None:
        """Put every rank's tensor, one after the other, into the output."""
        address, count, length = tensor.data_ptr(), tensor.numel(), tensor.nbytes
        meta = pack(Kind.all_gather, tensor.dtype)
        chunk = self.choices.share_chunk(length)
        shared = self.member.heap.offset_of(address)
        self._run(
            move.all_gather,
            (self._context, meta, count, address, output.data_ptr(), length, chunk, shared),
            seconds,
            site,
        )

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, seconds: float, site: str | None = None
    ) -> None:
        """Put every rank's tensor into an output of its own; sizes may differ between ranks."""
        lengths = [output.nbytes for output in outputs]
        count = tensor.numel() if len(set(lengths)) == 1 else _uneven(lengths)
        self._share(
            pack(Kind.all_gather, tensor.dtype), count, tensor, lengths, [o.data_ptr() for o in outputs], seconds, site
        )

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Put every rank's tensor into an output of the root."""
        targets = [0] * self.size if outputs is None else [output.data_ptr() for output in outputs]
        meta = pack(Kind.gather, tensor.dtype, root=root)
        self._share(meta, tensor.numel(), tensor, [tensor.nbytes] * self.size, targets, seconds, site)

    def _share(
        self,
        meta: int,
        count: int,
        tensor: torch.Tensor,
        lengths: list[int],
        targets: list[int],
        seconds: float,
        site: str | None,
    ) -> None:
        self.member.set_table(at.TARGETS, targets)
        self.member.set_table(at.TARGET_BYTES, lengths)
        address = tensor.data_ptr()
        chunk = self.choices.share_chunk(max(lengths))
        arguments = (self._context, meta, count, address, chunk, self.member.heap.offset_of(address))
        self._run(move.share, arguments, seconds, site)

    def reduce_scatter_flat(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, seconds: float, site: str | None = None
    ) -> None:
        """Reduce the tensors of all ranks, and give each rank its piece of the result."""
        _, unit, function = self.reduction_of(output.dtype, op)
        meta = pack(Kind.reduce_scatter, output.dtype, op)
        count = output.numel()
        chunk = self.choices.exchange_chunk(output.nbytes, self.size) // unit
        self._run(
            reduce.reduce_scatter_even,
            (self._context, meta, count, tensor.data_ptr(), output.data_ptr(), unit, function, chunk),
            seconds,
            site,
        )

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Reduce, for each rank, the tensors that all ranks have for it; sizes may differ between them."""
        _, unit, function = self.reduction_of(output.dtype, op)
        meta = pack(Kind.reduce_scatter, output.dtype, op)
        lengths = [tensor.nbytes for tensor in tensors]
        count = output.numel() if len(set(lengths)) == 1 else _uneven(lengths)
        self.member.set_table(at.SOURCES, [tensor.data_ptr() for tensor in tensors])
        self.member.set_table(at.SOURCE_BYTES, lengths)
        chunk = self.choices.exchange_chunk(max(lengths), self.size) // unit
        longest = max(lengths) // unit
        self._run(
            reduce.reduce_scatter,
            (self._context, meta, count, output.data_ptr(), unit, function, chunk, longest),
            seconds,
            site,
        )

    def all_to_all_flat(
        self, output: torch.Tensor, tensor: torch.Tensor, seconds: float, site: str | None = None
    ) -> None:
        """Send piece p of the tensor to rank p, and receive its piece for this rank; all equally long."""
        length = tensor.nbytes // self.size
        meta = pack(Kind.all_to_all, tensor.dtype)
        chunk = self.choices.exchange_chunk(length, self.size)
        arguments = (self._context, meta, -1, tensor.data_ptr(), output.data_ptr(), length, chunk)
        self._run(move.all_to_all_even, arguments, seconds, site)

    def exchange(
        self,
        kind: Kind,
        dtype: torch.dtype,
        sends: Sequence[tuple[int, int]],
        receives: Sequence[tuple[int, int]],
        seconds: float,
        site: str | None = None,
        root: int | None = None,
    ) -> None:
        """Send to and receive from each rank what (address, bytes) say: all_to_all and scatter."""
        member = self.member
        member.set_table(at.SOURCES, [address for address, _ in sends])
        member.set_table(at.SOURCE_BYTES, [length for _, length in sends])
        member.set_table(at.TARGETS, [address for address, _ in receives])
        member.set_table(at.TARGET_BYTES, [length for _, length in receives])
        chunk = self.choices.exchange_chunk(0, self.size)
        self._run(move.exchange, (self._context, pack(kind, dtype, root=root), -1, chunk), seconds, site)

    def barrier(self, seconds: float, site: str | None = None) -> None:
        """Return when all ranks have called."""
        self._run(move.barrier, (self._context, _BARRIER), seconds, site)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in the arena."""
        return self.member.heap.empty(shape, dtype)

    @staticmethod
    def reduces(dtype: torch.dtype, op: ReduceOp) -> bool:
        """Whether tensors of the dtype can be reduced by the operation."""
        return supports(dtype, op)

    @staticmethod
    def moves(dtype: torch.dtype) -> bool:
        """Whether tensors of the dtype can be sent."""
        return dtype in DTYPE_CODE

    def close(self) -> None:
        """Leave the group. Peers that wait for this rank get an error."""
        self.mailbox.close()
        self.member.leave()

    def _run(self, kernel: object, arguments: tuple[int, ...], seconds: float, site: str | None) -> None:
        code = kernel(*arguments)  # type: ignore[operator]
        if code != at.DONE:
            self.member.finish(code, kernel, arguments, seconds, site)  # type: ignore[arg-type]


__all__ = ["DTYPES", "LocalEngine"]
