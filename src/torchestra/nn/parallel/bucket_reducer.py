"""Reduces one bucket: gathers its gradients, averages them over the ranks, and writes the averages back.

The reducer calls ``start`` when all gradients of a bucket are ready. At the end of backward it calls
``complete`` for all buckets, then ``write_back``. On every rank it calls each for the same buckets, in the
same order.

Gradients are reduced in place, all of a bucket in one operation; but large ones alone where ranks are
processes of one host. There they lie in memory that the ranks share (gradient_memory.py), or some do. Where a
bucket has memory (buckets.py) they are copied into it first.

Autograd may give two parameters gradients in the same memory: parts of one tensor into which it has added
both. Such gradients are reduced in copies: in place, the second would be reduced from the first's average.

The gradient of a parameter that this rank has not used in the round must not change before all ranks know, at
the end, whether another rank has used it. So such gradients are reduced in a copy.

Where the host has cores to spare, the group's own thread reduces while backward goes on. Where it has none,
the two could only take turns: each reduction would empty backward's caches and wait once more for the slowest
rank; so reductions run at the end of backward. Ranks may differ in this: the order of operations is the same.

Between hosts the network is to be kept busy, so reductions always overlap with backward, and the first of a
round is sent before backward goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch

from torchestra.communicator.work import Work
from torchestra.engine.recorder.flight_entries import SpanTimes
from torchestra.errors import GradientReductionError, InvalidArgumentError
from torchestra.nn.parallel.buckets import Bucket
from torchestra.nn.parallel.comm_hooks.interface import (
    CommHook,
    GradBucket,
    await_future,
    run_comm_hook,
    wait_for_hook,
)
from torchestra.nn.parallel.gradient_memory import GradientMemory
from torchestra.nn.parallel.gradient_store import GradientStore
from torchestra.nn.parallel.rebuilding import follow
from torchestra.nn.parallel.sparse import empty_like_sparse, reduce_sparse
from torchestra.nn.parallel.statistics import Counters
from torchestra.process_group import ProcessGroup
from torchestra.types import ReduceOp

_INLINE_BYTES = 1 << 20
# The operations of a group that has failed end at once; a future of the program's own may never.
_HOOK_TIMEOUT_S = 10.0
_AVG, _SUM = ReduceOp.AVG, ReduceOp.SUM
_now = time.perf_counter_ns


def _uuid(group: ProcessGroup) -> int | None:
    """Return which call of reconfigure() a group is from; None if it is from none."""
    return None if group.reconfiguration is None else group.reconfiguration.uuid


class _PendingBucket:
    """A bucket whose reduction has been started.

    Attributes:
        gradients: of its parameters, None where there is none.
        unused: the slots of parameters that this rank has not used.
        copies: by slot, the tensor that is reduced instead of a gradient.
        saved: by slot, a copy of a gradient in the bucket's memory that may have to be restored.
        tensors: the tensors to reduce.
        works: the reductions that have begun, and are asynchronous.
        future: the communication hook's future.
        shadow: whether this rank contributes zeros, and keeps its gradients.
        began: when its gradients were ready, by ``time.perf_counter_ns()``.
    """

    __slots__ = ("began", "copies", "future", "gradients", "saved", "shadow", "tensors", "unused", "works")

    def __init__(
        self, gradients: list[torch.Tensor | None], unused: Collection[int] = (), *, shadow: bool = False
    ) -> None:
        self.began = _now()
        self.gradients = gradients
        self.unused = unused
        self.shadow = shadow
        self.copies: dict[int, torch.Tensor] = {}
        self.saved: dict[int, torch.Tensor] = {}
        self.tensors: list[torch.Tensor] = []
        self.works: list[Work] = []
        self.future: torch.futures.Future[torch.Tensor] | None = None


class BucketReducer:
    """Averages the gradients of buckets over the ranks of a group.

    Args:
        counters: count the work.
        as_views: leave each gradient as a view of its bucket's memory, instead of a copy of it.
        overlap: run reductions on the group's thread, concurrently with backward.
        memory: for gradients; large ones are then reduced in an operation of their own each.

    Attributes:
        divisor: divides sums; None: the number of ranks. The same on all ranks.
        has_hook: whether a communication hook averages, instead of all_reduce.
        begins_early: whether the reduction of a bucket begins when it is started, while backward goes on.
    """

    def __init__(
        self,
        group: ProcessGroup,
        store: GradientStore,
        names: Sequence[str],
        counters: Counters,
        *,
        as_views: bool,
        overlap: bool,
        memory: GradientMemory | None,
    ) -> None:
        self._group, self._communicator = group, group.communicator
        self._reconfigured_as = _uuid(group)
        self._store = store
        self._names = names
        self._counters = counters
        self._as_views = as_views
        self._overlap, self._memory = overlap, memory
        self._hook: tuple[CommHook, Any] | None = None
        self._pending: dict[int, _PendingBucket] = {}
        # The memory of the gradients that have been started in this round: address and bytes, ascending.
        self._spans: list[tuple[int, int]] = []
        self.divisor: float | None = None
        self.has_hook = False
        self.begins_early = overlap

    @property
    def needs_flat(self) -> bool:
        """Return whether each bucket must have memory for all its gradients."""
        return self._as_views or self.has_hook

    @property
    def memory(self) -> GradientMemory | None:
        """Return the memory for gradients, if backward is to use it."""
        return None if self.needs_flat else self._memory

    def set_hook(self, hook: CommHook, state: Any) -> None:
        """Let this hook average. Buckets must have memory from now on."""
        self._hook = hook, state
        self.has_hook = self.begins_early = True

    def adopt_hook(self, former: BucketReducer, former_group: ProcessGroup, group: ProcessGroup) -> None:
        """Take over the hook of another reducer, and replace that reducer's group in the hook's state."""
        if former._hook is not None:
            hook, state = former._hook
            self.set_hook(hook, follow(state, former_group, group))

    def reset(self) -> None:
        """Wait for the operations of the buckets that were started, then forget these."""
        for pending in self._pending.values():
            for work in pending.works:
                work.await_end()
            if pending.future is not None:
                # Callbacks of a hook may still write into its state. Its failure was reported already.
                with contextlib.suppress(Exception):
                    await_future(pending.future, _HOOK_TIMEOUT_S)
        self._pending.clear()

    # -- start

    def check_group(self) -> None:
        """Raise a GradientReductionError if the group has other ranks than when this was made."""
        if (uuid := _uuid(self._group)) != self._reconfigured_as:
            raise GradientReductionError(
                f"rank {self._group.rank()}: group {self._communicator.name!r} was reconfigured (uuid {uuid})"
                " after the module was wrapped, and the wrapper still averages over the ranks that were in it"
                " before; call rebuild() of the wrapper on all ranks of the group, and broadcast the"
                " parameters, buffers and optimizer state of one of them, before the next step"
            )

    def start(self, bucket: Bucket, unused: Collection[int], is_last: bool) -> None:
        """Gather a bucket's gradients and begin to reduce them.

        Args:
            unused: the slots in the bucket of parameters that were not used here.
            is_last: no other bucket will be started in this round.

        Raises:
            GradientReductionError: a gradient is missing or not as expected, or the group was reconfigured.
        """
        if self._reconfigured_as is not None:
            self.check_group()
        pending = self._pending[bucket.number] = _PendingBucket(self._store.take(bucket.parameters), unused)
        # With create_graph=True the gradients are part of a graph, and must not change.
        if torch.is_grad_enabled():
            self._copy_graph(bucket, pending)
        if bucket.sparse:
            pending.tensors = [self._sparse_gradient(bucket, pending)]
        elif bucket.flat is not None:
            self._fill(bucket, pending)
            pending.tensors = [bucket.flat]
        else:
            pending.tensors = self._in_place(bucket, pending)
        self._counters.copy_ns += _now() - pending.began
        if self.begins_early:
            self._begin(bucket, pending, is_last)

    def start_shadow(self, bucket: Bucket, is_last: bool) -> None:
        """Begin to reduce a bucket to which this rank contributes nothing; its gradients stay as they are."""
        pending = self._pending[bucket.number] = _PendingBucket([], shadow=True)
        if bucket.sparse:
            pending.tensors = [empty_like_sparse(bucket.parameters[0])]
        else:
            first = bucket.parameters[0]
            pending.tensors = [
                torch.zeros(sum(map(torch.Tensor.numel, each)), dtype=first.dtype, device=first.device)
                for each in self._groups(bucket, bucket.parameters)
            ]
        if self.begins_early:
            self._begin(bucket, pending, is_last)

    def _begin(self, bucket: Bucket, pending: _PendingBucket, is_last: bool) -> None:
        """Begin to reduce while backward goes on, or leave it for the end."""
        if self._hook is not None:
            hook, state = self._hook
            grad_bucket = GradBucket(bucket.number, pending.tensors[0], bucket.parameters, is_last)
            pending.future = run_comm_hook(hook, state, grad_bucket)
        # After the last one there is nothing left to overlap with, and another thread would start later.
        elif not (is_last and bucket.nbytes <= _INLINE_BYTES):
            engine = self._communicator.engine
            if engine.hosts is not None and len(self._pending) == 1 and not is_last:
                before = engine.operations_sent
                self._reduce(bucket, pending, async_op=True)
                engine.await_sending(before)
            else:
                self._reduce(bucket, pending, async_op=True)

    def _reduce(self, bucket: Bucket, pending: _PendingBucket, *, async_op: bool) -> None:
        """Reduce a bucket's tensors; sparse ones synchronously."""
        op = _AVG if self.divisor is None else _SUM
        if bucket.sparse:
            pending.copies[0] = reduce_sparse(self._communicator, pending.tensors[0], op)
            pending.tensors = []
            return
        alone = len(pending.tensors) == 1 or pending.shadow
        groups = [[each] for each in pending.tensors] if alone else self._groups(bucket, pending.tensors)
        for tensors in groups:
            if len(tensors) == 1:
                work = self._communicator.all_reduce(tensors[0], op, async_op)
            else:
                work = self._communicator.all_reduce_list(tensors, op, async_op)
            if work is not None:
                pending.works.append(work)

    def _groups(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """Return which of a bucket's tensors, one for each parameter, each operation reduces.

        All ranks must come to the same, so it depends on the parameters alone.
        """
        if self._memory is None or not bucket.large or bucket.flat is not None:
            return [tensors]
        found: list[Sequence[torch.Tensor]] = [[tensors[slot]] for slot in bucket.large]
        rest = [each for slot, each in enumerate(tensors) if slot not in bucket.large]
        return [*found, rest] if rest else found

    def _fill(self, bucket: Bucket, pending: _PendingBucket) -> None:
        """Copy the gradients into the bucket's memory."""
        views, gradients = bucket.views, pending.gradients
        for slot in pending.unused:
            if gradients[slot] is None:
                views[slot].zero_()
            elif gradients[slot] is views[slot]:
                pending.saved[slot] = views[slot].clone()
        pairs: list[Any] = list(zip(views, gradients, strict=True))
        if pending.unused:
            absent = {slot for slot in pending.unused if gradients[slot] is None}
            pairs = [pair for slot, pair in enumerate(pairs) if slot not in absent]
        if pairs:
            try:
                # Where a gradient is its view already, this does nothing.
                torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
            except (RuntimeError, TypeError):
                for slot in range(len(views)):
                    if slot not in pending.unused:
                        self._check(bucket, slot, pending)
                raise
        if self._as_views:
            # Now, not when the average is ready: the next gradients can use the memory that this frees.
            for slot, view in enumerate(views):
                if gradients[slot] is not view and slot not in pending.unused:
                    self._store.put(bucket.parameters[slot], view)

    def _in_place(self, bucket: Bucket, pending: _PendingBucket) -> list[torch.Tensor]:
        """Return the gradients themselves, or copies of those that must not change."""
        tensors: list[Any] = list(pending.gradients)
        for slot in pending.unused:
            gradient = tensors[slot]
            copy = torch.zeros_like(bucket.parameters[slot]) if gradient is None else gradient.clone()
            tensors[slot] = pending.copies[slot] = copy.detach()
        for slot, tensor in enumerate(tensors):
            if tensor is None or tensor.layout is not torch.strided:
                self._check(bucket, slot, pending)
        # Averaging an average changes nothing, but summing a sum does: with a divisor, nothing may be reduced
        # in place before all has been copied.
        if self._share_memory(tensors) or (self._overlap and self.divisor is not None):
            for other in self._pending.values():
                for work in other.works:
                    work.wait()
            pending.copies = {slot: tensor.detach().clone() for slot, tensor in enumerate(tensors)}
            tensors = list(pending.copies.values())
        torch.autograd.graph.increment_version(tensors)
        return tensors

    def _share_memory(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether any of these overlaps another gradient of this round."""
        spans = self._spans
        if len(self._pending) == 1:
            spans.clear()
        for tensor in tensors:
            spans.append((tensor.data_ptr(), tensor.nbytes))
        spans.sort()
        end = 0
        for start, nbytes in spans:
            if start < end:
                return True
            end = start + nbytes
        return False

    def _check(self, bucket: Bucket, index: int, pending: _PendingBucket) -> torch.Tensor:
        """Return a gradient; raise an error if there is none, or it is not dense."""
        gradient, name = pending.gradients[index], self._names[bucket.indices[index]]
        if gradient is None:
            raise GradientReductionError(
                f"the gradient of parameter {name!r} was removed before it was averaged: no hook on the"
                " parameter may set its .grad to None"
            )
        if gradient.layout is not torch.strided:
            raise InvalidArgumentError(
                f"parameter {name!r} received a sparse gradient ({gradient.layout}), and a dense one was"
                " expected: only those of nn.Embedding and nn.EmbeddingBag with sparse=True may be sparse"
            )
        return gradient

    def _sparse_gradient(self, bucket: Bucket, pending: _PendingBucket) -> torch.Tensor:
        gradient, name = pending.gradients[0], self._names[bucket.indices[0]]
        if gradient is None and pending.unused:
            return empty_like_sparse(bucket.parameters[0])
        if gradient is None or gradient.layout is not torch.sparse_coo:
            got = "none" if gradient is None else f"one with layout {gradient.layout}"
            raise GradientReductionError(
                f"parameter {name!r} is of a module with sparse=True, so a sparse gradient was expected, but"
                f" it received {got}; create the module with sparse=False"
            )
        return gradient.detach()

    def _copy_graph(self, bucket: Bucket, pending: _PendingBucket) -> None:
        """Replace gradients that are part of a graph by copies that are not."""
        for index, gradient in enumerate(pending.gradients):
            if gradient is not None and gradient.requires_grad:
                copy = gradient.detach().clone()
                pending.gradients[index] = copy
                self._store.put(bucket.parameters[index], copy)

    # -- the end

    def complete(self, bucket: Bucket) -> SpanTimes:
        """Wait for a bucket's averages, or sums; return when it was under way."""
        pending = self._pending[bucket.number]
        began = _now()
        if pending.future is not None:
            self._take_from_hook(bucket, pending)
        elif pending.works:
            for work in pending.works:
                work.wait()
        elif pending.tensors:
            self._reduce(bucket, pending, async_op=False)
        ended = _now()
        self._counters.wait_ns += ended - began
        return "bucket", pending.began, ended, bucket.number, bucket.nbytes

    def write_back(self, bucket: Bucket, used: Sequence[int]) -> None:
        """Make the averages of a completed bucket the gradients of its parameters.

        Args:
            used: for each parameter, the number of ranks that have used it; read for those unused here.
        """
        pending = self._pending.pop(bucket.number)
        is_done = bucket.flat is None and not (bucket.sparse or pending.copies or self.divisor)
        if pending.shadow or is_done:
            return
        began = _now()
        with torch.no_grad():
            if self.divisor is not None and pending.future is None:
                for tensor in [pending.copies[0]] if bucket.sparse else pending.tensors:
                    tensor.div_(self.divisor)
            if bucket.sparse:
                if not pending.unused or used[bucket.indices[0]]:
                    self._store.put(bucket.parameters[0], pending.copies[0])
            else:
                if bucket.flat is not None and not self._as_views:
                    self._copy_out(bucket, pending)
                for slot, copy in pending.copies.items():
                    if slot not in pending.unused:
                        self._check(bucket, slot, pending).copy_(copy)
                for slot in pending.unused:
                    self._write_back_unused(bucket, slot, pending, used[bucket.indices[slot]] > 0)
        self._counters.copy_ns += _now() - began

    def _take_from_hook(self, bucket: Bucket, pending: _PendingBucket) -> None:
        assert pending.future is not None
        expected = empty_like_sparse(bucket.parameters[0]) if bucket.flat is None else bucket.flat
        result = wait_for_hook(pending.future, expected, self._communicator.timeout_s)
        if pending.shadow:
            return
        if bucket.sparse:
            pending.copies[0] = result
        elif result.data_ptr() != expected.data_ptr() or result.dtype is not expected.dtype:
            with torch.no_grad():
                expected.copy_(result.view(-1))

    @staticmethod
    def _copy_out(bucket: Bucket, pending: _PendingBucket) -> None:
        """Copy the averages from the bucket's memory into the gradients that were used here."""
        gradients: list[Any] = pending.gradients
        slots = [slot for slot in range(len(gradients)) if slot not in pending.unused]
        if slots:
            torch._foreach_copy_([gradients[slot] for slot in slots], [bucket.views[slot] for slot in slots])

    def _write_back_unused(self, bucket: Bucket, slot: int, pending: _PendingBucket, used: bool) -> None:
        """Give a parameter that was not used here the average, if another rank has used it."""
        parameter, gradient = bucket.parameters[slot], pending.gradients[slot]
        if not used:
            if slot in pending.saved:
                bucket.views[slot].copy_(pending.saved[slot])
            return
        average = pending.copies[slot] if bucket.flat is None else bucket.views[slot]
        if self._as_views or gradient is None:
            is_own = self._as_views or bucket.flat is None
            self._store.put(parameter, average if is_own else average.clone())
        else:
            gradient.copy_(average)
