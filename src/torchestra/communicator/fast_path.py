"""The fast path of the commonest operations: what they do before their kernel, in as few steps as possible.

A small operation among processes takes half a microsecond, so that the Python around it decides. Here a call
that is synchronous, with plain tensors and nothing pending, is told by as few questions as possible and
handed to the operation's kernel; everything else, errors included, goes the general way of
:class:`~torchestra.communicator.communicator.Communicator`, whose methods these functions decorate, and which
gives the same results. Questions to a tensor cost 0.04 µs each, a Python call 0.06, a ``with`` on a lock
0.12 (``acquire`` and ``release`` 0.10, but an interrupt between ``acquire`` and what notes its result would
leave the lock taken, or have one released that another thread has; in a ``with`` it cannot come there).

Nothing here copies or allocates; so what is left with an exception before its kernel has begun was left by an
interrupt, which is as if it had come before the call (queue.py says what is done elsewhere).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.autograd import profiler

from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.interface import Engine
from torchestra.engine.operations import (
    ALL_GATHER_INTO_TENSOR,
    ALL_REDUCE,
    ALL_TO_ALL_SINGLE,
    BROADCAST,
    REDUCE_SCATTER_TENSOR,
    Collective,
)
from torchestra.tensors.contiguity import TENSORS, plain_address
from torchestra.types import ReduceOp

if TYPE_CHECKING:
    from torchestra.communicator.communicator import Communicator
    from torchestra.communicator.work import Work

_Method = TypeVar("_Method", bound=Callable[..., Any])
_ByDtype = dict[torch.dtype, Any]


class Plans:
    """What the fast path serves: the engine's plans, by operation (or root) and dtype.

    A plan is put here when its operation has gone the general way once, and so been checked: for dtypes that
    the operation has, no complex ones, no factors. An engine without kernels never gets one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.reductions: list[_ByDtype] = [{} for _ in ReduceOp._NAMES]
        self.scatters: list[_ByDtype] = [{} for _ in ReduceOp._NAMES]
        self.broadcasts: defaultdict[int, _ByDtype] = defaultdict(dict)
        self.gathers: _ByDtype = {}
        self.exchanges: _ByDtype = {}
        self.messages: dict[torch.dtype, tuple[int, int]] = {}

    def remember(
        self,
        plans: _ByDtype,
        row: Collective,
        dtype: torch.dtype,
        op: ReduceOp | None = None,
        root: int | None = None,
    ) -> None:
        """Serve such operations from now on."""
        if dtype in plans:
            return
        if self._engine.kernels and not dtype.is_complex and (op is None or op.factor is None):
            plans[dtype] = self._engine.plan(row, dtype, op, root)

    def remember_messages(self, dtype: torch.dtype) -> None:
        """Serve messages of a dtype from now on."""
        if self._engine.kernels and not dtype.is_complex:
            self.messages[dtype] = (DTYPE_CODE[dtype], dtype.itemsize)

    def clear(self) -> None:
        """Have every call go the general way, which refuses it."""
        tables = (self.gathers, self.exchanges, *self.reductions, *self.scatters, *self.broadcasts.values())
        for plans in (*tables, self.messages):
            plans.clear()


def all_reduce(general: _Method) -> _Method:
    """The fast path of all_reduce."""

    @wraps(general)
    def method(
        self: Communicator,
        tensor: torch.Tensor,
        op: ReduceOp,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        try:
            fast = (
                async_op is False
                and (plan := self.fast.reductions[op.code][tensor.dtype])
                # plain_address(tensor), without the call
                and tensor.__class__ in TENSORS
                and tensor.is_cpu
                and not tensor.is_nested
                and tensor.is_contiguous()
                and not tensor.is_neg()
                and tensor.untyped_storage().nbytes()
                >= ((count := tensor.numel()) + tensor.storage_offset()) * plan.unit
                and (address := tensor.data_ptr())
                and not self.thread.pending
                and not profiler._is_profiler_enabled
            )
        except (AttributeError, KeyError, RuntimeError):
            fast = False
        if fast:
            engine: Any = self.engine
            with self.lock:
                # engine.call(), without the call
                try:
                    if code := engine.kernels.all_reduce(plan.address, count, address):
                        engine.context.finish(
                            code,
                            engine.kernels.all_reduce,
                            (plan.address, count, address),
                            self.timeout_s if timeout_s is None else timeout_s,
                            None,
                        )
                except BaseException as error:
                    engine.leave_halfway(error)
                    raise
            return None
        work: Work | None = general(self, tensor, op, async_op, timeout_s)
        if self.engine.kernels:
            self.fast.remember(self.fast.reductions[op.code], ALL_REDUCE, tensor.dtype, op)
        return work

    return cast(_Method, method)


def all_reduce_list(general: _Method) -> _Method:
    """The fast path of all_reduce_list."""

    @wraps(general)
    def method(
        self: Communicator,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        dtype = tensors[0].dtype
        if (
            op.__class__ is ReduceOp
            and (plan := self.fast.reductions[op.code].get(dtype)) is not None
            and async_op is False
            and not self.thread.pending
            and not profiler._is_profiler_enabled
            and all(each.dtype is dtype and plain_address(each) for each in tensors)
        ):
            with self.lock:
                self.engine.collective(plan, tensors, tensors, self.limit(timeout_s))
            return None
        work: Work | None = general(self, tensors, op, async_op, timeout_s)
        self.fast.remember(self.fast.reductions[op.code], ALL_REDUCE, dtype, op)
        return work

    return cast(_Method, method)


def broadcast(general: _Method) -> _Method:
    """The fast path of broadcast."""

    @wraps(general)
    def method(
        self: Communicator,
        tensor: torch.Tensor,
        root: int,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        if (
            tensor.__class__ in TENSORS
            and (plan := self.fast.broadcasts[root].get(tensor.dtype)) is not None
            and async_op is False
            and (address := plain_address(tensor))
            and not self.thread.pending
            and not profiler._is_profiler_enabled
        ):
            engine: Any = self.engine
            arguments = (plan.address, tensor.numel(), address)
            with self.lock:
                engine.call(
                    engine.kernels.broadcast, arguments, self.timeout_s if timeout_s is None else timeout_s
                )
            return None
        work: Work | None = general(self, tensor, root, async_op, timeout_s)
        self.fast.remember(self.fast.broadcasts[root], BROADCAST, tensor.dtype, root=root)
        return work

    return cast(_Method, method)


def all_gather_into_tensor(general: _Method) -> _Method:
    """The fast path of all_gather_into_tensor."""

    @wraps(general)
    def method(
        self: Communicator,
        output: torch.Tensor,
        tensor: torch.Tensor,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        if (
            tensor.__class__ in TENSORS
            and (plan := self.fast.gathers.get(tensor.dtype)) is not None
            and async_op is False
            and (source := plain_address(tensor))
            and (target := plain_address(output))
            and output.dtype is tensor.dtype
            and output.numel() == (count := tensor.numel()) * self.size
            and not self.thread.pending
            and not profiler._is_profiler_enabled
        ):
            engine: Any = self.engine
            arguments = (plan.address, count, source, target)
            with self.lock:
                engine.call(
                    engine.kernels.all_gather, arguments, self.timeout_s if timeout_s is None else timeout_s
                )
            return None
        work: Work | None = general(self, output, tensor, async_op, timeout_s)
        self.fast.remember(self.fast.gathers, ALL_GATHER_INTO_TENSOR, tensor.dtype)
        return work

    return cast(_Method, method)


def reduce_scatter_tensor(general: _Method) -> _Method:
    """The fast path of reduce_scatter_tensor."""

    @wraps(general)
    def method(
        self: Communicator,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: ReduceOp,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        if (
            op.__class__ is ReduceOp
            and tensor.__class__ in TENSORS
            and (plan := self.fast.scatters[op.code].get(tensor.dtype)) is not None
            and async_op is False
            and (source := plain_address(tensor))
            and (target := plain_address(output))
            and output.dtype is tensor.dtype
            and tensor.numel() == (count := output.numel()) * self.size
            and not self.thread.pending
            and not profiler._is_profiler_enabled
        ):
            engine: Any = self.engine
            arguments = (plan.address, count, source, target)
            with self.lock:
                engine.call(
                    engine.kernels.reduce_scatter_even,
                    arguments,
                    self.timeout_s if timeout_s is None else timeout_s,
                )
            return None
        work: Work | None = general(self, output, tensor, op, async_op, timeout_s)
        self.fast.remember(self.fast.scatters[op.code], REDUCE_SCATTER_TENSOR, tensor.dtype, op)
        return work

    return cast(_Method, method)


def all_to_all_single(general: _Method) -> _Method:
    """The fast path of all_to_all_single."""

    @wraps(general)
    def method(
        self: Communicator,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        if (
            output_splits is None
            and input_splits is None
            and tensor.__class__ in TENSORS
            and (plan := self.fast.exchanges.get(tensor.dtype)) is not None
            and async_op is False
            and (source := plain_address(tensor))
            and (target := plain_address(output))
            and output.dtype is tensor.dtype
            and (shape := tensor.shape) == output.shape
            and shape
            and shape[0] % self.size == 0
            and not self.thread.pending
            and not profiler._is_profiler_enabled
        ):
            engine: Any = self.engine
            arguments = (plan.address, tensor.numel() * plan.unit // self.size, source, target)
            with self.lock:
                engine.call(
                    engine.kernels.all_to_all_even,
                    arguments,
                    self.timeout_s if timeout_s is None else timeout_s,
                )
            return None
        work: Work | None = general(self, output, tensor, output_splits, input_splits, async_op, timeout_s)
        self.fast.remember(self.fast.exchanges, ALL_TO_ALL_SINGLE, tensor.dtype)
        return work

    return cast(_Method, method)


def barrier(general: _Method) -> _Method:
    """The fast path of barrier."""

    @wraps(general)
    def method(self: Communicator, async_op: bool = False, timeout_s: float | None = None) -> Work | None:
        if (
            async_op is False
            and not self.uses_device
            and (engine := self.engine).kernels is not None
            and not (self.thread.pending or self.queue.closed or profiler._is_profiler_enabled)
        ):
            with self.lock:
                engine.barrier(self.timeout_s if timeout_s is None else timeout_s)
            return None
        return cast("Work | None", general(self, async_op, timeout_s))

    return cast(_Method, method)


def send(general: _Method) -> _Method:
    """The fast path of send."""

    @wraps(general)
    def method(
        self: Communicator, tensor: torch.Tensor, rank: int, tag: int = 0, timeout_s: float | None = None
    ) -> None:
        if (
            tensor.__class__ in TENSORS
            and (found := self.fast.messages.get(tensor.dtype)) is not None
            and tag.__class__ is int
            and timeout_s is None
            and (address := plain_address(tensor))
            and not profiler._is_profiler_enabled
        ):
            kind, unit = found
            engine: Any = self.engine
            engine.mailbox.send(
                address, tensor.numel() * unit, kind, rank, tag, engine.waiter(self.timeout_s)
            )
            return
        general(self, tensor, rank, tag, timeout_s)
        self.fast.remember_messages(tensor.dtype)

    return cast(_Method, method)


def recv(general: _Method) -> _Method:
    """The fast path of recv."""

    @wraps(general)
    def method(
        self: Communicator,
        tensor: torch.Tensor,
        rank: int | None,
        tag: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        if (
            tensor.__class__ in TENSORS
            and (found := self.fast.messages.get(tensor.dtype)) is not None
            and tag.__class__ is int
            and timeout_s is None
            and (address := plain_address(tensor))
            and not profiler._is_profiler_enabled
        ):
            kind, unit = found
            engine: Any = self.engine
            waiter = engine.waiter(self.timeout_s)
            return cast(int, engine.mailbox.recv(address, tensor.numel() * unit, kind, rank, tag, waiter))
        source = general(self, tensor, rank, tag, timeout_s)
        self.fast.remember_messages(tensor.dtype)
        return cast(int, source)

    return cast(_Method, method)
