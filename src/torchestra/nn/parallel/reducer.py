"""Averages gradients over the ranks of a group while backward computes them.

A hook on every parameter notes that its gradient is there. When all of a bucket's are, they are copied into
the bucket and its all_reduce is started; backward goes on meanwhile. Buckets start in their order on every
rank, because the ranks of a group must call the same operations in the same order, and gradients need not
arrive in the same order everywhere. At the end of backward autograd calls ``Reducer._backward_ended``, which
waits for the reductions and puts the averages into ``.grad``. Hooks on the outputs of the forward pass ask
for that call: where reentrant checkpointing runs a backward within the backward, the end of the outer one
is meant. (Where outputs hide their tensors, the parameter's hook that fills the last bucket asks for it.)

The last bucket, if it is small, is reduced by that call itself: there is nothing left to overlap with, and
another thread would take longer to begin than the reduction takes. Which buckets are treated so depends on
sizes only, so it is the same on every rank.

A *round* is one such reduction of all gradients. ``_state`` has a byte for each parameter:

======== =================================================================================
EXPECTED its gradient has not come in this round
READY    it has
UNUSED   it will not come: no output of the forward pass depends on the parameter
IDLE     there is no round, so a gradient that comes is none of the reducer's business
======== =================================================================================

A forward pass that is to be reduced begins a round. If a second backward runs through the same or another
such forward pass after the round is over, hooks on the outputs begin the next.

Hooks run on the thread that runs backward; for CPU tensors autograd does that on the calling thread. They
hold the reducer weakly and are removed when it dies, so the module can outlive it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from torchestra.errors import GradientReductionError, InvalidArgumentError
from torchestra.nn.parallel.buckets import Bucket, make_bucket
from torchestra.nn.parallel.outputs import tensors_in, unused_parameters
from torchestra.nn.parallel.statistics import Counters
from torchestra.process_group import ProcessGroup
from torchestra.types import ReduceOp
from torchestra.work import Work

EXPECTED, READY, UNUSED, IDLE = range(4)

_INLINE_BYTES = 1 << 20
_AVG = ReduceOp.AVG
_now = time.perf_counter


class Reducer:
    """Averages the gradients of some parameters over the ranks of a group.

    Args:
        parameters: which; all of them dense, on the CPU, and requiring gradients.
        names: what to call each in messages.
        plan: the indices of the parameters in each bucket; each in one bucket, and a bucket of one dtype.
        group: whose ranks have the same parameters and the same plan.
        find_unused_parameters: look for parameters that the outputs do not depend on, in every forward.
        gradient_as_bucket_view: let ``.grad`` be a part of the bucket, instead of a copy of it.
        counters: where to count what was done.

    Raises:
        InvalidArgumentError: the plan does not name each parameter once, or mixes dtypes in a bucket.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        plan: Sequence[tuple[int, ...]],
        group: ProcessGroup,
        *,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        counters: Counters | None = None,
    ) -> None:
        _check_plan(plan, parameters)
        self._parameters = tuple(parameters)
        self._names = tuple(names)
        self._communicator = group.communicator
        self._rank = group.rank()
        self._find_unused = find_unused_parameters
        self._as_views = gradient_as_bucket_view
        self._counters = counters or Counters()
        self._buckets = [make_bucket(indices, parameters, group) for indices in plan]
        self._sizes = [len(bucket.indices) for bucket in self._buckets]
        self._counters.buckets = len(self._buckets)
        self._bytes = sum(bucket.flat.nbytes for bucket in self._buckets)

        count = len(self._parameters)
        self._state = bytearray([IDLE]) * count
        self._all_expected = bytes([EXPECTED]) * count
        self._all_idle = bytes([IDLE]) * count
        # 1 for each parameter that has had a gradient since the last round ended, reduced or not.
        self._used = bytearray(count)
        self._used_tensor = torch.frombuffer(self._used, dtype=torch.uint8)
        self._missing = list(self._sizes)
        self._next = 0
        self._works: list[Work] = []
        self._kept: dict[int, torch.Tensor] = {}
        self._failure: BaseException | None = None
        self._backward_started: float | None = None
        self._reduction_started: float | None = None

        handles = []
        bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket.indices}
        myself = weakref.ref(self)
        for index, parameter in enumerate(self._parameters):
            hook = _hook(myself, index, bucket_of[index], self._state, self._used, self._missing)
            handles.append(parameter.register_post_accumulate_grad_hook(hook))
        weakref.finalize(self, _remove_all, handles).atexit = False

    def prepare_for_forward(self) -> None:
        """To be called before a forward pass whose gradients are to be reduced.

        Raises:
            GradientReductionError: the round before has not ended.
        """
        if self._failure is not None:
            raise GradientReductionError(
                f"the reduction of gradients failed on rank {self._rank} ({type(self._failure).__name__}:"
                f" {str(self._failure).partition(chr(10))[0]}); make a new group and wrap the module again"
            ) from self._failure
        if READY in self._state or self._next:
            raise GradientReductionError(self._unfinished())

    def prepare_for_backward(self, outputs: Any) -> None:
        """To be called with what such a forward pass has returned: from here on gradients are expected."""
        found = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        unused = unused_parameters(found, self._parameters) if self._find_unused else []
        self._begin(unused)
        self._backward_started = None
        for output in found:
            if output.grad_fn is not None:
                output.register_hook(partial(self._backward_reached, unused))

    def _begin(self, unused: Sequence[int]) -> None:
        self._state[:] = self._all_expected
        self._missing[:] = self._sizes
        self._next = 0
        if unused:
            for index in unused:
                self._state[index] = UNUSED
            for number, bucket in enumerate(self._buckets):
                self._missing[number] -= sum(self._state[index] == UNUSED for index in bucket.indices)

    def _backward_reached(self, unused: Sequence[int], _: torch.Tensor) -> None:
        """Hook on the outputs of a forward pass: backward has begun to go through it."""
        if self._backward_started is None:
            self._backward_started = _now()
        _queue_callback(self._backward_ended)
        if IDLE in self._state:
            self._begin(unused)
        if len(unused) == len(self._parameters):
            self._start_full_buckets()  # No gradient will come to do it.

    def _start_full_buckets(self) -> None:
        while self._next < len(self._buckets) and not self._missing[self._next]:
            bucket = self._buckets[self._next]
            began = _now()
            self._fill(bucket)
            filled = _now()
            self._counters.copy_seconds += filled - began
            if self._reduction_started is None:
                self._reduction_started = filled
            self._next += 1
            is_last = self._next == len(self._buckets)
            if not is_last or bucket.flat.nbytes > _INLINE_BYTES:
                work = self._communicator.all_reduce(bucket.flat, _AVG, async_op=True)
                assert work is not None
                self._works.append(work)
            if is_last and self._backward_started is None:
                _queue_callback(self._backward_ended)

    def _fill(self, bucket: Bucket) -> None:
        """Copy the gradients of a bucket's parameters into it; zeros where there is none."""
        views: Any = bucket.views
        gradients: Any = [parameter.grad for parameter in bucket.parameters]
        if self._find_unused:
            for index, gradient, view in zip(bucket.indices, gradients, views, strict=True):
                if gradient is None:
                    view.zero_()
                elif gradient is view and self._state[index] == UNUSED:
                    self._kept[index] = view.clone()
            views = [view for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
            gradients = [gradient for gradient in gradients if gradient is not None]
            if not gradients:
                return
        with torch.no_grad():
            try:
                # Where a gradient is a view already, this does nothing.
                torch._foreach_copy_(views, gradients)
            except (RuntimeError, TypeError):
                self._refuse(bucket)
                raise
        if self._as_views:
            # Now, not when the average is there: the memory that this frees serves the next gradients.
            for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
                if self._state[index] != UNUSED and parameter.grad is not view:
                    parameter.grad = view

    def _backward_ended(self) -> None:
        """At the end of a backward: finish the round, unless gradients are still to come from another one."""
        if self._next == len(self._buckets):
            self._finish()
        elif self._backward_started is not None:
            self._counters.backward_seconds += _now() - self._backward_started
            self._backward_started = None

    def _finish(self) -> None:
        """Wait for the reductions, and hand the averages out."""
        counters = self._counters
        time_before = _now()
        try:
            if self._find_unused:
                self._communicator.all_reduce(self._used_tensor, ReduceOp.MAX)
            for number, bucket in enumerate(self._buckets):
                if number < len(self._works):
                    self._works[number].wait()
                else:
                    self._communicator.all_reduce(bucket.flat, _AVG)
                reduced = _now()
                self._hand_out(bucket)
                counters.wait_seconds += reduced - time_before
                time_before = _now()
                counters.copy_seconds += time_before - reduced
        except BaseException as error:
            self._failure = error
            raise
        counters.steps += 1
        counters.bytes_reduced += self._bytes
        if self._reduction_started is not None:
            counters.communication_seconds += reduced - self._reduction_started
            counters.backward_seconds += time_before - (self._backward_started or self._reduction_started)
        self._reduction_started = self._backward_started = None
        self._works.clear()
        self._kept.clear()
        self._next = 0
        self._state[:] = self._all_idle
        self._used[:] = bytes(len(self._used))

    def _hand_out(self, bucket: Bucket) -> None:
        """Put a bucket's averages into ``.grad``."""
        if self._find_unused:
            self._hand_out_used(bucket)
        elif not self._as_views:
            with torch.no_grad():
                gradients: Any = [parameter.grad for parameter in bucket.parameters]
                torch._foreach_copy_(gradients, bucket.views)

    def _hand_out_used(self, bucket: Bucket) -> None:
        """The same, but leave the gradients of parameters alone that no rank has used."""
        with torch.no_grad():
            for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
                gradient = parameter.grad
                if not self._used[index]:
                    if index in self._kept:
                        view.copy_(self._kept[index])
                elif gradient is view:
                    continue
                elif self._as_views:
                    parameter.grad = view
                elif gradient is None:
                    parameter.grad = view.clone()
                else:
                    gradient.copy_(view)

    def _unexpected(self, index: int) -> None:
        """A gradient came of a parameter that none is expected of."""
        state = self._state[index]
        if state == IDLE:
            return
        if state == READY:
            raise GradientReductionError(
                "Expected to mark a variable ready only once: the gradient of parameter"
                f" {self._names[index]!r} was computed twice before all others were computed once (rank"
                f" {self._rank}). Is it shared between parts that reentrant checkpointing runs (then use"
                " use_reentrant=False), or was backward run twice through a part of the module?"
            )
        raise GradientReductionError(
            f"parameter {self._names[index]!r} received a gradient on rank {self._rank}, though no tensor in"
            " what forward returned depends on it: return lists, tuples, dicts or dataclasses of tensors,"
            " and use use_reentrant=False where activations are checkpointed"
        )

    def _unfinished(self) -> str:
        missing = [self._names[index] for index, state in enumerate(self._state) if state == EXPECTED]
        opening = "Expected to have finished reduction in the prior iteration before starting a new one"
        if not missing:
            return (
                f"{opening}: on rank {self._rank} backward raised an error before it ended; wrap the module"
                " again on all ranks"
            )
        shown = ", ".join(map(repr, missing[:10]))
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        remedy = (
            "let every output of forward take part in the loss"
            if self._find_unused
            else "pass find_unused_parameters=True, or let every output of forward take part in the loss"
        )
        return (
            f"{opening}: on rank {self._rank} these parameters did not receive a gradient: {shown}{more}. If"
            f" the loss does not depend on them, {remedy}; if backward raised an error, wrap the module again"
            " on all ranks"
        )

    def _refuse(self, bucket: Bucket) -> None:
        """Say what is wrong with a gradient that cannot be copied, where that is known."""
        for index, parameter in zip(bucket.indices, bucket.parameters, strict=True):
            if parameter.grad is None:
                raise GradientReductionError(
                    f"the gradient of parameter {self._names[index]!r} was taken away before it was averaged:"
                    " no hook on the parameter may set its .grad to None"
                )
            if parameter.grad.layout is not torch.strided:
                raise InvalidArgumentError(
                    f"parameter {self._names[index]!r} received a sparse gradient ({parameter.grad.layout}),"
                    " and only dense ones are reduced; create its module with sparse=False"
                )


def _queue_callback(callback: Callable[[], None]) -> None:
    """Call it at the end of the backward that is running on this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _hook(
    reducer: weakref.ref[Reducer],
    index: int,
    bucket: int,
    state: bytearray,
    used: bytearray,
    missing: list[int],
) -> Callable[[torch.Tensor], None]:
    """What to do when a parameter's gradient is there: once per parameter and backward, so it is short."""

    def gradient_is_there(_: torch.Tensor) -> None:
        used[index] = 1
        if state[index]:
            if (owner := reducer()) is not None:
                owner._unexpected(index)
            return
        state[index] = READY
        missing[bucket] -= 1
        if not missing[bucket] and (owner := reducer()) is not None:
            owner._start_full_buckets()

    return gradient_is_there


def _check_plan(plan: Sequence[tuple[int, ...]], parameters: Sequence[torch.Tensor]) -> None:
    named = sorted(index for indices in plan for index in indices)
    if named != list(range(len(parameters))) or not plan or not all(plan):
        raise InvalidArgumentError(
            f"Reducer: the buckets must name each of {len(parameters)} parameters once, and each name one"
            f" at least, got {plan}"
        )
    for number, indices in enumerate(plan):
        dtypes = {parameters[index].dtype for index in indices}
        if len(dtypes) > 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise InvalidArgumentError(f"Reducer: bucket {number} must be of one dtype, got {names}")


def _remove_all(handles: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
