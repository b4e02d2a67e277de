"""The engine of operations on tensors of a device: what LocalEngine offers, by a backend of torch's.

The backend (launching.py) is whatever has the methods of ``torch.distributed.Backend``. Reductions are its
own. What only moves elements moves bytes, so every dtype can be moved. Tensors are contiguous, on the device,
and have been checked; what ranks have called is not compared: that would take a word between them before
every operation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from torchestra.engine.device.launching import EVERYBODY, LateBackend
from torchestra.engine.device.nccl import bindings
from torchestra.engine.device.stream_scheduler import Lane
from torchestra.engine.device.views import at, flat, raw, spanning
from torchestra.engine.local import LocalEngine
from torchestra.engine.operations import Kind, describe, pack
from torchestra.types import ReduceOp

__all__ = ["DeviceEngine", "Joint"]

_SLACK_SECONDS = 60.0  # the watch gives an operation up before torch does
_TAG = 0

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NUMBERS = (*_FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64)
_REDUCTIONS = {
    "SUM": _NUMBERS,
    "PRODUCT": _NUMBERS,
    "MIN": _NUMBERS,
    "MAX": _NUMBERS,
    "AVG": _FLOATS,
    "PREMUL_SUM": _NUMBERS,
}
"""What NCCL and this package round alike, for every dtype that NCCL has."""

_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


class DevicePlan(NamedTuple):
    """What the engine needs to know of a kind of operation on a dtype."""

    kind: Kind
    dtype: torch.dtype
    op: ReduceOp | None
    root: int | None


class Joint:
    """Several Works of torch's as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait for all; raises what one has failed with."""
        for work in self._works:
            work.wait()


class DeviceEngine:
    """One rank's engine for tensors of one device. Its methods are those of :class:`LocalEngine`.

    Args:
        base: the group's engine for tensors of the CPU.
        lane: how operations are launched on the device.
        open_backend: makes the backend, and what else must live as long as that.
    """

    kind_of_message = staticmethod(LocalEngine.kind_of_message)
    moves = staticmethod(LocalEngine.moves)

    def __init__(
        self, base: LocalEngine, lane: Lane, name: str, open_backend: Callable[[], tuple[Any, Any]]
    ) -> None:
        self.member = base.member
        self.mailbox = base.mailbox
        self.rank = base.rank
        self.size = base.size
        self.lane = lane
        self._backend = LateBackend(base.member, lane, name, open_backend)
        self.watch = self._backend.watch
        self.refuse = self._backend.refuse
        self.close = self._backend.close

    @staticmethod
    def reduces(dtype: torch.dtype, op: ReduceOp) -> bool:
        """Whether tensors of the dtype can be reduced by the operation on a device."""
        if dtype.is_complex:
            return op.name in ("SUM", "AVG", "PREMUL_SUM") and dtype.to_real() in _FLOATS
        return dtype in _REDUCTIONS.get(op.name, ())

    def plan(
        self, kind: Kind, dtype: torch.dtype, op: ReduceOp | None = None, root: int | None = None
    ) -> DevicePlan:
        """What the engine needs to know of an operation on a dtype."""
        return DevicePlan(kind, dtype, op, root)

    # -- operations

    def all_reduce(
        self, tensor: torch.Tensor, plan: DevicePlan, seconds: float, site: str | None = None
    ) -> None:
        """Replace the tensor by the reduction of all ranks' tensors, or the root's by the plan."""
        self._reduce([tensor], plan, seconds, site)

    def all_reduce_iovec(
        self, tensors: Sequence[torch.Tensor], plan: DevicePlan, seconds: float, site: str | None = None
    ) -> None:
        """:meth:`all_reduce` of each of several tensors."""
        self._reduce(tensors, plan, seconds, site)

    def broadcast(
        self, tensor: torch.Tensor, plan: DevicePlan, seconds: float, site: str | None = None
    ) -> None:
        """Replace every rank's tensor by the root's."""
        options = self._options("BroadcastOptions", seconds, rootRank=plan.root, rootTensor=0)
        self._move(plan, [tensor], seconds, site, lambda backend: backend.broadcast([raw(tensor)], options))

    def all_gather_flat(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        plan: DevicePlan,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Put every rank's tensor, one after the other, into the output."""
        options = self._options("AllgatherOptions", seconds)
        self._move(
            plan,
            [tensor],
            seconds,
            site,
            lambda backend: backend._allgather_base(raw(output), raw(tensor), options),
        )

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        plan: DevicePlan,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Put every rank's tensor into an output of its own; sizes may differ between ranks."""
        if len({output.numel() for output in outputs}) == 1:
            whole = tensor.new_empty((self.size, tensor.numel()))
            self.all_gather_flat(whole, tensor, plan, seconds, site)
            for output, row in zip(outputs, whole, strict=True):
                output.view(-1).copy_(row)
            return
        outputs[self.rank].copy_(tensor.view(outputs[self.rank].shape))
        roots = [
            (output, self._options("BroadcastOptions", seconds, rootRank=rank, rootTensor=0))
            for rank, output in enumerate(outputs)
            if output.numel()
        ]

        def begin(backend: Any) -> Joint:
            return Joint([backend.broadcast([raw(output)], options) for output, options in roots])

        self._move(plan, outputs, seconds, site, begin)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        plan: DevicePlan,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Put every rank's tensor into an output of the root; ``outputs`` is None on the others."""
        options = self._options("GatherOptions", seconds, rootRank=plan.root)
        targets = [] if outputs is None else [[raw(output) for output in outputs]]
        self._move(
            plan, [tensor], seconds, site, lambda backend: backend.gather(targets, [raw(tensor)], options)
        )

    def reduce_scatter_flat(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        plan: DevicePlan,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Reduce the tensors of all ranks, and give each rank its piece of the result."""
        assert plan.op is not None
        options = self._options("ReduceScatterOptions", seconds, reduceOp=self._op(plan.op))
        self._move(
            plan,
            [output],
            seconds,
            site,
            lambda backend: backend._reduce_scatter_base(flat(output), flat(tensor), options),
        )

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        plan: DevicePlan,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Reduce, for each rank, the tensors that all ranks have for it; sizes may differ between them."""
        assert plan.op is not None
        if len({tensor.numel() for tensor in tensors}) == 1:
            whole = torch.cat([tensor.view(-1) for tensor in tensors])
            self.reduce_scatter_flat(output, whole, plan, seconds, site)
            return
        pieces = [tensor.clone() for tensor in tensors]
        for root, piece in enumerate(pieces):
            self._reduce([piece], plan._replace(kind=Kind.reduce, root=root), seconds, site)
        output.copy_(pieces[self.rank].view(output.shape))

    def exchange(
        self,
        plan: DevicePlan,
        sends: Sequence[tuple[int, int]],
        receives: Sequence[tuple[int, int]],
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Send to and receive from each rank what (address, bytes) say: all_to_all and scatter."""
        sent, expected = [length for _, length in sends], [length for _, length in receives]
        source = spanning(sends, self.lane.device)
        if source is None:
            source = torch.cat([at(address, length, self.lane.device) for address, length in sends])
        whole = spanning(receives, self.lane.device)
        target = source.new_empty(sum(expected)) if whole is None else whole
        options = self._options("AllToAllOptions", seconds)
        self._move(
            plan,
            [source],
            seconds,
            site,
            lambda backend: backend.alltoall_base(target, source, expected, sent, options),
        )
        if whole is None:
            for (address, length), piece in zip(receives, target.split(expected), strict=True):
                at(address, length, self.lane.device).copy_(piece)

    def messages(
        self, batch: Sequence[tuple[bool, torch.Tensor, int]], seconds: float, *, together: bool
    ) -> Any:
        """Begin to send and receive; a Work of torch's for all of it.

        Args:
            batch: whether to send, what to send or to receive into, and the other rank.
            together: the order of these does not matter.
        """

        def begin(backend: Any) -> Joint:
            grouped = together and backend.supports_coalescing
            if grouped:
                backend._start_coalescing(self.lane.device)
            works = [
                backend.send([raw(tensor)], rank, _TAG)
                if is_send
                else backend.recv([raw(tensor)], rank, _TAG)
                for is_send, tensor, rank in batch
                if tensor.numel()
            ]
            return Joint([backend._end_coalescing(self.lane.device)] if grouped else works)

        ends: set[Hashable] = {(together, rank) for _, _, rank in batch}
        if together:
            ends.add(EVERYBODY)  # torch connects all ranks for a batch
        doing = ", ".join(
            f"{'send to' if is_send else 'recv from'} rank {rank}" for is_send, _, rank in batch
        )
        return self._backend.launch(doing, seconds, None, begin, ends)

    # -- what else is asked of an engine

    @staticmethod
    def combine(target: torch.Tensor, sources: Sequence[torch.Tensor], op: ReduceOp) -> None:
        """Reduce tensors of this rank."""
        target.copy_(sources[0])
        for source in sources[1:]:
            target.copy_(_COMBINE[op.name](target, source))

    @staticmethod
    def scale(tensor: torch.Tensor, factor: float) -> None:
        """Multiply a tensor of this rank by a factor, in place."""
        tensor.mul_(factor)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor on the device."""
        return torch.empty(shape, dtype=dtype, device=self.lane.device)

    def sequence_number(self) -> int:
        """How many operations this rank has begun."""
        return self._backend.launched

    # -- how it is done

    def _reduce(
        self, tensors: Sequence[torch.Tensor], plan: DevicePlan, seconds: float, site: str | None
    ) -> None:
        assert plan.op is not None
        buffers = [flat(tensor) for tensor in tensors]
        name = self._op(plan.op)
        if plan.root is not None:
            options = self._options("ReduceOptions", seconds, reduceOp=name, rootRank=plan.root, rootTensor=0)
            self._move(plan, tensors, seconds, site, lambda backend: backend.reduce(buffers, options))
        elif len(buffers) == 1:
            options = self._options("AllreduceOptions", seconds, reduceOp=name)
            self._move(plan, tensors, seconds, site, lambda backend: backend.allreduce(buffers, options))
        else:
            options = self._options("AllreduceCoalescedOptions", seconds, reduceOp=name)
            self._move(
                plan, tensors, seconds, site, lambda backend: backend.allreduce_coalesced(buffers, options)
            )

    def _op(self, op: ReduceOp) -> Any:
        # The factor of a PREMUL_SUM has been multiplied in.
        return getattr(bindings().ReduceOp, "SUM" if op.name == "PREMUL_SUM" else op.name)

    def _move(
        self,
        plan: DevicePlan,
        tensors: Sequence[torch.Tensor],
        seconds: float,
        site: str | None,
        begin: Callable[[Any], Any],
    ) -> None:
        """Launch an operation of the whole group; what is launched next comes after it."""
        count = sum(tensor.numel() for tensor in tensors)
        if not count and plan.kind not in (Kind.all_to_all, Kind.scatter):
            return  # on all ranks
        doing = f"{describe(pack(*plan), count)} on {self.lane.device}"
        work = self._backend.launch(doing, seconds, site, begin, {EVERYBODY})
        self._backend.settle(work, doing)

    def _options(self, kind: str, seconds: float, **values: Any) -> Any:
        options = getattr(bindings(), kind)()
        options.timeout = timedelta(seconds=seconds + _SLACK_SECONDS)
        for name, value in values.items():
            setattr(options, name, value)
        return options
