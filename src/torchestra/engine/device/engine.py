"""The engine of operations on tensors of a device, by a backend of torch's.

The backend (launching.py) is whatever has the methods of ``torch.distributed.Backend``. It does the
reductions. Operations that only move elements move bytes, so they take every dtype. Tensors are contiguous,
on the device, and have been checked; the ranks do not compare their calls: that would take an exchange before
every operation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from torchestra.engine.device.launching import ALL_RANKS, LateBackend
from torchestra.engine.device.nccl import bindings
from torchestra.engine.device.stream_scheduler import StreamScheduler
from torchestra.engine.device.views import at, flat, raw, spanning
from torchestra.engine.interface import Engine
from torchestra.engine.operations import REDUCE, Collective, Kind, describe, even_parts, pack
from torchestra.types import ReduceOp

Tensors = Sequence[torch.Tensor]

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
    """Hold the constants of a collective on a dtype."""

    row: Collective
    dtype: torch.dtype
    op: ReduceOp | None
    root: int | None
    timeout_s: float = 0.0
    site: str | None = None


class CombinedWork:
    """Several of torch's Works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        """Return whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait for all; raise the error of one that has failed."""
        for work in self._works:
            work.wait()


class DeviceEngine(Engine):
    """One rank's engine for tensors of one device; the base engine does barriers, and messages go in batches.

    Args:
        base: the group's engine for tensors of the CPU.
        scheduler: how operations are launched on the device.
        open_backend: makes the backend, and an object that must live as long.
    """

    def __init__(
        self, base: Any, scheduler: StreamScheduler, name: str, open_backend: Callable[[], tuple[Any, Any]]
    ) -> None:
        self.context = base.context
        self.hosts = base.hosts
        self.rank = base.rank
        self.size = base.size
        self.scheduler = scheduler
        self._backend = LateBackend(base.context, scheduler, name, open_backend)
        self.watch = self._backend.watch
        self.refuse = self._backend.refuse

    @staticmethod
    def reduces(dtype: torch.dtype, op: ReduceOp) -> bool:
        """Return whether tensors of the dtype can be reduced by the operation on a device."""
        if dtype.is_complex:
            return op.name in ("SUM", "AVG", "PREMUL_SUM") and dtype.to_real() in _FLOATS
        return dtype in _REDUCTIONS.get(op.name, ())

    def plan(
        self, row: Collective, dtype: torch.dtype, op: ReduceOp | None = None, root: int | None = None
    ) -> DevicePlan:
        return DevicePlan(row, dtype, op, root)

    def collective(
        self, plan: DevicePlan, inputs: Tensors, outputs: Tensors, timeout_s: float, site: str | None = None
    ) -> None:
        plan = plan._replace(timeout_s=timeout_s, site=site)
        ALGORITHMS[plan.row.algorithm](self, plan, inputs, outputs)

    def messages(
        self, batch: Sequence[tuple[bool, torch.Tensor, int]], timeout_s: float, *, together: bool
    ) -> Any:
        """Begin to send and receive; return one torch Work for all.

        Args:
            batch: whether to send, what to send or to receive into, and the other rank.
            together: their order does not matter.
        """

        def begin(backend: Any) -> CombinedWork:
            grouped = together and backend.supports_coalescing
            if grouped:
                backend._start_coalescing(self.scheduler.device)
            works = [
                backend.send([raw(tensor)], rank, _TAG)
                if is_send
                else backend.recv([raw(tensor)], rank, _TAG)
                for is_send, tensor, rank in batch
                if tensor.numel()
            ]
            return CombinedWork([backend._end_coalescing(self.scheduler.device)] if grouped else works)

        ends: set[Hashable] = {(together, rank) for _, _, rank in batch}
        if together:
            ends.add(ALL_RANKS)  # torch connects all ranks for a batch
        doing = ", ".join(
            f"{'send to' if is_send else 'recv from'} rank {rank}" for is_send, _, rank in batch
        )
        return self._backend.launch(doing, timeout_s, None, begin, ends)

    # -- the rest of the engine's interface

    def combine(self, target: torch.Tensor, sources: Tensors, op: ReduceOp) -> None:
        target.copy_(sources[0])
        for source in sources[1:]:
            target.copy_(_COMBINE[op.name](target, source))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.scheduler.device)

    def sequence_number(self) -> int:
        return self._backend.launched

    def close(self) -> None:
        self._backend.close()

    @property
    def is_aborted(self) -> bool:
        return bool(self.context.is_aborted)

    def abort(self, why: str, failed: Sequence[int] = ()) -> None:
        self.context.abort(why, failed=tuple(failed))

    # -- launching

    def op(self, op: ReduceOp) -> Any:
        """Return torch's object for a reduce operation; a PREMUL_SUM's factor has been applied before."""
        return getattr(bindings().ReduceOp, "SUM" if op.name == "PREMUL_SUM" else op.name)

    def launch(self, plan: DevicePlan, tensors: Tensors, begin: Callable[[Any], Any]) -> None:
        """Launch an operation of the whole group; later launches are ordered after it."""
        count = sum(tensor.numel() for tensor in tensors)
        if not count and plan.row.kind not in (Kind.all_to_all, Kind.scatter):
            return  # on all ranks
        meta = pack(plan.row.kind, plan.dtype, plan.op, plan.root)
        doing = f"{describe(meta, count)} on {self.scheduler.device}"
        work = self._backend.launch(doing, plan.timeout_s, plan.site, begin, {ALL_RANKS})
        self._backend.order_after(work, doing)

    def options(self, kind: str, timeout_s: float, **values: Any) -> Any:
        """Return an object of torch's options class for ``kind``, with values."""
        options = getattr(bindings(), kind)()
        options.timeout = timedelta(seconds=timeout_s + _SLACK_SECONDS)
        for name, value in values.items():
            setattr(options, name, value)
        return options


Algorithm = Callable[[DeviceEngine, DevicePlan, Tensors, Tensors], None]


def _all_reduce(engine: DeviceEngine, plan: DevicePlan, inputs: Tensors, outputs: Tensors) -> None:
    assert plan.op is not None
    buffers = [flat(tensor) for tensor in inputs]
    name = engine.op(plan.op)
    if plan.root is not None:
        options = engine.options(
            "ReduceOptions", plan.timeout_s, reduceOp=name, rootRank=plan.root, rootTensor=0
        )
        engine.launch(plan, inputs, lambda backend: backend.reduce(buffers, options))
    elif len(buffers) == 1:
        options = engine.options("AllreduceOptions", plan.timeout_s, reduceOp=name)
        engine.launch(plan, inputs, lambda backend: backend.allreduce(buffers, options))
    else:
        options = engine.options("AllreduceCoalescedOptions", plan.timeout_s, reduceOp=name)
        engine.launch(plan, inputs, lambda backend: backend.allreduce_coalesced(buffers, options))


def _broadcast(engine: DeviceEngine, plan: DevicePlan, inputs: Tensors, outputs: Tensors) -> None:
    tensor = raw(inputs[0])
    options = engine.options("BroadcastOptions", plan.timeout_s, rootRank=plan.root, rootTensor=0)
    engine.launch(plan, inputs, lambda backend: backend.broadcast([tensor], options))


def _all_gather_flat(engine: DeviceEngine, plan: DevicePlan, inputs: Tensors, outputs: Tensors) -> None:
    tensor, output = raw(inputs[0]), raw(outputs[0])
    options = engine.options("AllgatherOptions", plan.timeout_s)
    engine.launch(plan, inputs, lambda backend: backend._allgather_base(output, tensor, options))


def _all_gather(engine: DeviceEngine, plan: DevicePlan, inputs: Tensors, outputs: Tensors) -> None:
    tensor = inputs[0]
    if len({output.numel() for output in outputs}) == 1:
        whole = tensor.new_empty((engine.size, tensor.numel()))
        _all_gather_flat(engine, plan, inputs, [whole])
        for output, row in zip(outputs, whole, strict=True):
            output.view(-1).copy_(row)
        return
    outputs[engine.rank].copy_(tensor.view(outputs[engine.rank].shape))
    roots = [
        (output, engine.options("BroadcastOptions", plan.timeout_s, rootRank=rank, rootTensor=0))
        for rank, output in enumerate(outputs)
        if output.numel()
    ]

    def begin(backend: Any) -> CombinedWork:
        return CombinedWork([backend.broadcast([raw(output)], options) for output, options in roots])

    engine.launch(plan, outputs, begin)


def _gather(engine: DeviceEngine, plan: DevicePlan, inputs: Tensors, outputs: Tensors) -> None:
    options = engine.options("GatherOptions", plan.timeout_s, rootRank=plan.root)
    tensor, targets = raw(inputs[0]), [[raw(output) for output in outputs]] if outputs else []
    engine.launch(plan, inputs, lambda backend: backend.gather(targets, [tensor], options))


def _reduce_scatter_tensor(engine: DeviceEngine, plan: DevicePlan, inputs: Tensors, outputs: Tensors) -> None:
    assert plan.op is not None
    output, tensor = flat(outputs[0]), flat(inputs[0])
    options = engine.options("ReduceScatterOptions", plan.timeout_s, reduceOp=engine.op(plan.op))
    engine.launch(plan, outputs, lambda backend: backend._reduce_scatter_base(output, tensor, options))


def _reduce_scatter(engine: DeviceEngine, plan: DevicePlan, inputs: Tensors, outputs: Tensors) -> None:
    if len({tensor.numel() for tensor in inputs}) == 1:
        whole = torch.cat([tensor.view(-1) for tensor in inputs])
        _reduce_scatter_tensor(engine, plan, [whole], outputs)
        return
    pieces = [tensor.clone() for tensor in inputs]
    for root, piece in enumerate(pieces):
        _all_reduce(engine, plan._replace(row=REDUCE, root=root), [piece], [piece])
    outputs[0].copy_(pieces[engine.rank].view(outputs[0].shape))


def _exchange(engine: DeviceEngine, plan: DevicePlan, inputs: Tensors, outputs: Tensors) -> None:
    """Send to and receive from each rank a tensor: all_to_all and scatter."""
    device = engine.scheduler.device
    sends, receives = ([(each.data_ptr(), each.nbytes) for each in tensors] for tensors in (inputs, outputs))
    if plan.root is not None:
        alone, sends = receives[0], sends or [(0, 0)] * engine.size
        receives = [(0, 0)] * engine.size
        receives[plan.root] = alone
    elif len(inputs) == 1:
        (sends, receives) = (even_parts(ranges[0], engine.size) for ranges in (sends, receives))
    sent, expected = [length for _, length in sends], [length for _, length in receives]
    source = spanning(sends, device)
    if source is None:
        source = torch.cat([at(address, length, device) for address, length in sends])
    whole = spanning(receives, device)
    target = source.new_empty(sum(expected)) if whole is None else whole
    options = engine.options("AllToAllOptions", plan.timeout_s)
    engine.launch(
        plan,
        [source],
        lambda backend: backend.alltoall_base(target, source, expected, sent, options),
    )
    if whole is None:
        for (address, length), piece in zip(receives, target.split(expected), strict=True):
            at(address, length, device).copy_(piece)


ALGORITHMS: dict[str, Algorithm] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_flat,
    "gather": _gather,
    "scatter": _exchange,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _exchange,
}
"""By the ``algorithm`` of a row: how a device's backend runs it. What is not here goes through the host."""
