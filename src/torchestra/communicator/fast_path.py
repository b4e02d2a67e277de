"""Short ways through the commonest operations, for a group's communicator.

A small operation among processes takes half a microsecond, so that the Python around it decides. Here a call
that is synchronous, with plain tensors and nothing pending, is told by as few questions as possible and
handed to the engine; everything else, errors included, goes the general way of :class:`Communicator`, which
gives the same results. Questions to a tensor cost 0.04 µs each, a Python call 0.06, a ``with`` on a lock
0.12 (``acquire`` and ``release`` 0.10, but an interrupt between ``acquire`` and what notes its result would
leave the lock taken, or have one released that another thread has; in a ``with`` it cannot come there).

Nothing here copies or allocates; so what is left with an exception before its kernel has begun was left by an
interrupt, which is as if it had come before the call (queue.py says what is done elsewhere).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import profiler

from torchestra.communicator.communicator import Communicator
from torchestra.communicator.work import Work
from torchestra.engine.local import LocalEngine, Plan
from torchestra.engine.operations import Kind
from torchestra.tensors.contiguity import TENSORS, plain_address
from torchestra.types import ReduceOp


class QuickCommunicator(Communicator):
    """A communicator with short ways for plain tensors.

    What they serve, by operation (or root) and dtype, is remembered when it has gone the general way once,
    and so been checked: dtypes that the operation has, no complex ones, no factors.
    """

    def __init__(self, engine: LocalEngine, name: str, seconds: float) -> None:
        super().__init__(engine, name, seconds)
        self._reductions: list[dict[torch.dtype, Plan]] = [{} for _ in ReduceOp._NAMES]
        self._scatters: list[dict[torch.dtype, Plan]] = [{} for _ in ReduceOp._NAMES]
        self._broadcasts: list[dict[torch.dtype, Plan]] = [{} for _ in range(engine.size)]
        self._gathers: dict[torch.dtype, Plan] = {}
        self._exchanges: dict[torch.dtype, Plan] = {}
        self._messages: dict[torch.dtype, tuple[int, int]] = {}
        self._mailbox = engine.mailbox

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp, async_op: bool = False, seconds: float | None = None
    ) -> Work | None:
        try:
            quick = (
                async_op is False
                and (plan := self._reductions[op.code][tensor.dtype])
                # plain_address(tensor), without the call
                and tensor.__class__ in TENSORS
                and tensor.is_cpu
                and not tensor.is_nested
                and tensor.is_contiguous()
                and not tensor.is_neg()
                and tensor.untyped_storage().nbytes()
                >= ((count := tensor.numel()) + tensor.storage_offset()) * plan.unit
                and (address := tensor.data_ptr())
                and not self._progress.pending
                and not profiler._is_profiler_enabled
            )
        except (AttributeError, KeyError, RuntimeError):
            quick = False
        if quick:
            with self._lock:
                # engine.all_reduce(), without the call
                try:
                    if code := self.engine.all_reduce_kernel(plan.address, count, address):
                        self.engine.finish_all_reduce(code, plan, count, address, self.limit(seconds))
                except BaseException as error:
                    self.engine.leave_halfway(error)
                    raise
            return None
        work = super().all_reduce(tensor, op, async_op, seconds)
        self._remember(self._reductions[op.code], Kind.all_reduce, tensor.dtype, op)
        return work

    def all_reduce_list(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        dtype = tensors[0].dtype
        if (
            op.__class__ is ReduceOp
            and (plan := self._reductions[op.code].get(dtype)) is not None
            and async_op is False
            and not self._progress.pending
            and not profiler._is_profiler_enabled
            and all(each.dtype is dtype and plain_address(each) for each in tensors)
        ):
            with self._lock:
                self.engine.all_reduce_iovec(tensors, plan, self.seconds if seconds is None else seconds)
            return None
        work = super().all_reduce_list(tensors, op, async_op, seconds)
        self._remember(self._reductions[op.code], Kind.all_reduce, dtype, op)
        return work

    def broadcast(
        self, tensor: torch.Tensor, root: int, async_op: bool = False, seconds: float | None = None
    ) -> Work | None:
        if (
            tensor.__class__ in TENSORS
            and (plan := self._broadcasts[root].get(tensor.dtype)) is not None
            and async_op is False
            and plain_address(tensor)
            and not self._progress.pending
            and not profiler._is_profiler_enabled
        ):
            with self._lock:
                self.engine.broadcast(tensor, plan, self.seconds if seconds is None else seconds)
            return None
        work = super().broadcast(tensor, root, async_op, seconds)
        self._remember(self._broadcasts[root], Kind.broadcast, tensor.dtype, root=root)
        return work

    def all_gather_into_tensor(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        if (
            tensor.__class__ in TENSORS
            and (plan := self._gathers.get(tensor.dtype)) is not None
            and async_op is False
            and plain_address(tensor)
            and plain_address(output)
            and output.dtype is tensor.dtype
            and output.numel() == tensor.numel() * self.size
            and not self._progress.pending
            and not profiler._is_profiler_enabled
        ):
            with self._lock:
                self.engine.all_gather_flat(
                    output, tensor, plan, self.seconds if seconds is None else seconds
                )
            return None
        work = super().all_gather_into_tensor(output, tensor, async_op, seconds)
        self._remember(self._gathers, Kind.all_gather, tensor.dtype)
        return work

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        if (
            op.__class__ is ReduceOp
            and tensor.__class__ in TENSORS
            and (plan := self._scatters[op.code].get(tensor.dtype)) is not None
            and async_op is False
            and plain_address(tensor)
            and plain_address(output)
            and output.dtype is tensor.dtype
            and tensor.numel() == output.numel() * self.size
            and not self._progress.pending
            and not profiler._is_profiler_enabled
        ):
            with self._lock:
                self.engine.reduce_scatter_flat(
                    output, tensor, plan, self.seconds if seconds is None else seconds
                )
            return None
        work = super().reduce_scatter_tensor(output, tensor, op, async_op, seconds)
        self._remember(self._scatters[op.code], Kind.reduce_scatter, tensor.dtype, op)
        return work

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        if (
            output_splits is None
            and input_splits is None
            and tensor.__class__ in TENSORS
            and (plan := self._exchanges.get(tensor.dtype)) is not None
            and async_op is False
            and plain_address(tensor)
            and plain_address(output)
            and output.dtype is tensor.dtype
            and (shape := tensor.shape) == output.shape
            and shape
            and shape[0] % self.size == 0
            and not self._progress.pending
            and not profiler._is_profiler_enabled
        ):
            with self._lock:
                self.engine.all_to_all_flat(
                    output, tensor, plan, self.seconds if seconds is None else seconds
                )
            return None
        work = super().all_to_all_single(output, tensor, output_splits, input_splits, async_op, seconds)
        self._remember(self._exchanges, Kind.all_to_all, tensor.dtype)
        return work

    def barrier(self, async_op: bool = False, seconds: float | None = None) -> Work | None:
        if async_op is False and not (self._progress.pending or self.closed or profiler._is_profiler_enabled):
            with self._lock:
                self.engine.barrier(self.seconds if seconds is None else seconds)
            return None
        return super().barrier(async_op, seconds)

    def send(self, tensor: torch.Tensor, rank: int, tag: int = 0, seconds: float | None = None) -> None:
        if (
            tensor.__class__ in TENSORS
            and (found := self._messages.get(tensor.dtype)) is not None
            and tag.__class__ is int
            and seconds is None
            and (address := plain_address(tensor))
            and not profiler._is_profiler_enabled
        ):
            kind, unit = found
            waiter = self.engine.waiter(self.seconds)
            self._mailbox.send(address, tensor.numel() * unit, kind, rank, tag, waiter)
            return
        super().send(tensor, rank, tag, seconds)
        self._remember_messages(tensor.dtype)

    def recv(self, tensor: torch.Tensor, rank: int | None, tag: int = 0, seconds: float | None = None) -> int:
        if (
            tensor.__class__ in TENSORS
            and (found := self._messages.get(tensor.dtype)) is not None
            and tag.__class__ is int
            and seconds is None
            and (address := plain_address(tensor))
            and not profiler._is_profiler_enabled
        ):
            kind, unit = found
            waiter = self.engine.waiter(self.seconds)
            return self._mailbox.recv(address, tensor.numel() * unit, kind, rank, tag, waiter)
        source = super().recv(tensor, rank, tag, seconds)
        self._remember_messages(tensor.dtype)
        return source

    def close(self) -> None:
        self._leave_short_ways()
        super().close()

    def forget(self) -> None:
        super().forget()
        self._leave_short_ways()

    def _leave_short_ways(self) -> None:
        """Have every call go the general way, which refuses it."""
        self._messages.clear()
        for quick in (*self._reductions, *self._scatters, *self._broadcasts):
            quick.clear()
        self._gathers.clear()
        self._exchanges.clear()

    def _remember(
        self,
        quick: dict[torch.dtype, Plan],
        kind: Kind,
        dtype: torch.dtype,
        op: ReduceOp | None = None,
        root: int | None = None,
    ) -> None:
        if not dtype.is_complex and (op is None or op.factor is None):
            quick[dtype] = self.engine.plan(kind, dtype, op, root)

    def _remember_messages(self, dtype: torch.dtype) -> None:
        if not dtype.is_complex:
            self._messages[dtype] = (self.engine.kind_of_message(dtype), dtype.itemsize)
