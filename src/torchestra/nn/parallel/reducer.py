"""Averages gradients over the ranks of a group while backward computes them.

A hook on every parameter notes that its gradient is there. When all of a bucket's are, the bucket is started
(averaging.py); backward goes on meanwhile. Buckets start in their order on every rank, because the ranks of a
group must call the same operations in the same order, and gradients need not arrive in the same order
everywhere. At the end of backward autograd calls ``Reducer._backward_ended``, which waits for the averages
and hands them out. Hooks on the outputs of the forward pass ask for that call: where reentrant checkpointing
runs a backward within the backward, the end of the outer one is meant. (Where outputs hide their tensors, the
parameter's hook that fills the last bucket asks for it.)

A *round* is one such reduction of all gradients. ``_state`` has a number for each parameter:

========= =================================================================================
READY     its gradient has come
EXPECTED  it has not come in this round; greater numbers: it comes so often (static graph)
UNUSED    it will not come
IDLE      there is no round, so a gradient that comes is none of the reducer's business
RECORDING expected, and it is to be noted in which order they come
COUNTING  the first round of a static graph: how often each comes is counted, and reduction
          begins when backward has ended
========= =================================================================================

A forward pass that is to be reduced begins a round. If a second backward runs through the same or another
such forward pass after the round is over, hooks on the outputs begin the next.

After the first round the ranks take rank 0's order of arrival, and the next forward pass makes new buckets
after it. Not where unused parameters are looked for: there every round may have an order of its own.

Hooks run on the thread that runs backward; for CPU tensors autograd does that on the calling thread. They
hold the reducer weakly and are removed when it dies, so the module can outlive it.
"""

from __future__ import annotations

import array
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from torchestra.engine.algorithms import spare_cores
from torchestra.errors import GradientReductionError, InvalidArgumentError
from torchestra.nn.parallel import messages
from torchestra.nn.parallel.averaging import Averager
from torchestra.nn.parallel.buckets import (
    BUCKET_CAP_MB,
    FIRST_BUCKET_BYTES,
    Bucket,
    compute_bucket_assignment_by_size,
    make_bucket,
)
from torchestra.nn.parallel.comm_hooks import BuiltinCommHookType, CommHook, builtin_hook
from torchestra.nn.parallel.outputs import tensors_in, unused_parameters
from torchestra.nn.parallel.sink import GradAttribute, GradientSink
from torchestra.nn.parallel.statistics import Counters
from torchestra.process_group import ProcessGroup
from torchestra.types import ReduceOp

__all__ = ["Reducer"]

READY, EXPECTED, UNUSED, IDLE, RECORDING, COUNTING = 0, 1, -1, -2, -3, -4

_CAP_BYTES = int(BUCKET_CAP_MB * (1 << 20))
_HOOKED_TWICE = "register_comm_hook or register_builtin_comm_hook can only be called once."
_now = time.perf_counter_ns


class Reducer:
    """Averages the gradients of some parameters over the ranks of a group.

    Args:
        params: which; all of them on the CPU, and requiring gradients.
        bucket_indices: the indices of the parameters in each bucket, in the order in which buckets are
            expected to be complete; a bucket is of one dtype.
        per_bucket_size_limits: the bytes at which each bucket was closed; for logging.
        process_group: whose ranks have the same parameters and the same buckets.
        expect_sparse_gradients: by parameter, whether its gradients are sparse; then it is alone in a bucket.
        bucket_bytes_cap, first_bucket_bytes_cap: the limits of buckets that are made after the first round.
        find_unused_parameters: look for parameters that the outputs do not depend on, in every forward.
        gradient_as_bucket_view: let gradients be parts of the buckets, instead of copies of them.
        param_to_name_mapping: by index, what to call parameters in messages.
        skip_all_reduce_unused_params: do not reduce buckets of which all parameters are unused; all ranks
            must find the same ones.
        bucket_size_limits_for_rebuilding: instead of the two caps.
        sink: where gradients are; default: in ``.grad``.
        counters: where to count what was done.

    Raises:
        InvalidArgumentError: there is no parameter, or the buckets do not name each once, mix dtypes or have
            a sparse gradient beside others.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: ProcessGroup,
        expect_sparse_gradients: Sequence[bool] = (),
        bucket_bytes_cap: int = _CAP_BYTES,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        param_to_name_mapping: Mapping[int, str] | None = None,
        first_bucket_bytes_cap: int = FIRST_BUCKET_BYTES,
        skip_all_reduce_unused_params: bool = False,
        bucket_size_limits_for_rebuilding: Sequence[int] = (),
        *,
        sink: GradientSink | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.parameters = tuple(params)
        count = len(self.parameters)
        names = param_to_name_mapping or {}
        self.names = [names.get(index, str(index)) for index in range(count)]
        self._sparse = list(expect_sparse_gradients) or [False] * count
        _check_plan(bucket_indices, self.parameters, self._sparse)
        self._group = process_group
        self._find_unused = find_unused_parameters
        self._skip_unused = skip_all_reduce_unused_params
        self._limits = list(bucket_size_limits_for_rebuilding) or [first_bucket_bytes_cap, bucket_bytes_cap]
        self.counters = counters or Counters()
        self._as_views = gradient_as_bucket_view
        self._sink = sink or GradAttribute()
        self._averager = self._make_averager()

        self._state = array.array("i", [IDLE]) * count
        self._all_idle = array.array("i", [IDLE]) * count
        self._template = array.array("i", [EXPECTED]) * count
        self._recording = array.array("i", [RECORDING]) * count
        # 1 for each parameter that has had a gradient since the last round ended, reduced or not.
        self._used = array.array("i", [0]) * count
        self._used_by = torch.zeros(count, dtype=torch.int32)
        self._bucket_of = array.array("i", [0]) * count
        self._missing: list[int] = []
        self._lay_out(bucket_indices, per_bucket_size_limits)

        self.iterations = 0
        self.order: list[int] = []
        self.rebuilt: tuple[tuple[int, ...], ...] | None = None
        self.graph_is_static = True
        self.record_order = True
        self._agreed_order: list[int] | None = None
        self._static = False
        self._counts: array.array[int] | None = None
        self._open = False
        self._next = 0
        self._unused: Sequence[int] = ()
        self.last_unused: Sequence[int] = ()
        self._unused_before: Sequence[int] | None = None
        self._failure: BaseException | None = None
        self._futures: list[torch.futures.Future[Any]] = []

        myself = weakref.ref(self)
        handles = [
            parameter.register_post_accumulate_grad_hook(self._hook_for(index, myself))
            for index, parameter in enumerate(self.parameters)
        ]
        self._remove_hooks = weakref.finalize(self, _remove_all, handles)
        self._remove_hooks.atexit = False

    def _make_averager(self) -> Averager:
        return Averager(
            self._group,
            self._sink,
            self.names,
            self.counters,
            as_views=self._as_views,
            overlap=spare_cores(self._group.size()) > 0,
        )

    def _lay_out(self, plan: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        """Make the buckets, and their memory."""
        limits = [*limits, *[0] * (len(plan) - len(limits))]
        self.buckets: list[Bucket] = []
        for number, indices in enumerate(plan):
            bucket = make_bucket(
                number,
                indices,
                self.parameters,
                self._group,
                whole=self._averager.whole,
                sparse=self._sparse[indices[0]],
                limit=limits[number],
            )
            self.buckets.append(bucket)
            for index in indices:
                self._bucket_of[index] = number
        self._sizes = [len(bucket.indices) for bucket in self.buckets]
        self._missing[:] = self._sizes
        self.counters.buckets = len(self.buckets)
        self._bytes = sum(bucket.nbytes for bucket in self.buckets)

    # -- what surrounds a round

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` average the gradients. Only once, and between rounds.

        Raises:
            GradientReductionError: there is a hook already, or a round has begun.
        """
        if self._averager.has_hook:
            raise GradientReductionError(_HOOKED_TWICE)
        if self._open and self._has_begun():
            raise GradientReductionError(
                "a DDP communication hook should be registered before calling backward, not while gradients"
                " are being reduced"
            )
        self._averager.set_hook(hook, state)
        self._lay_out([bucket.indices for bucket in self.buckets], [each.limit for each in self.buckets])

    def register_builtin_comm_hook(self, kind: BuiltinCommHookType) -> None:
        """:meth:`register_comm_hook` with a hook of a built-in kind."""
        self.register_comm_hook(None, builtin_hook(kind, self._group))

    def set_static_graph(self) -> None:
        """Take it that every round uses the same parameters, equally often, as the first one.

        Raises:
            GradientReductionError: training has begun.
        """
        if self.iterations:
            raise GradientReductionError(
                "set_static_graph() should be called before training loop starts and after"
                " DistributedDataParallel is constructed."
            )
        self._static = True

    def remove_autograd_hooks(self) -> None:
        """Have no part in backward any more."""
        self._remove_hooks()

    def install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Wait for these at the end of the next round."""
        self._futures += futures

    def update_process_group(self, group: ProcessGroup) -> None:
        """Forget a round that was not finished, and average over another group from now on."""
        self._averager.reset()
        self._group = group
        hook, divisor = self._averager._hook, self._averager.divisor
        self._averager = self._make_averager()
        self._averager.divisor = divisor
        if hook is not None:
            self._averager.set_hook(*hook)
        self._close()
        self._failure = None
        self.rebuilt = None
        self._agreed_order = None
        self._lay_out([bucket.indices for bucket in self.buckets], [each.limit for each in self.buckets])

    @property
    def local_used_map(self) -> torch.Tensor:
        """For each parameter, how many ranks have used it in the last round; where that is looked for."""
        return self._used_by

    # -- the round

    def prepare_for_forward(self) -> None:
        """To be called before a forward pass whose gradients are to be reduced.

        Raises:
            GradientReductionError: the round before has not ended.
        """
        self.check_finished()
        if self._agreed_order is not None:
            self._rebuild()
        self.iterations += 1
        self.counters.forward_started = _now()

    def check_finished(self) -> None:
        """Raise a GradientReductionError if a round has begun and not ended, or a reduction has failed."""
        rank = self._group.rank()
        if self._failure is not None:
            raise GradientReductionError(
                f"the reduction of gradients failed on rank {rank} ({type(self._failure).__name__}:"
                f" {str(self._failure).partition(chr(10))[0]}); make a new group and wrap the module again"
            ) from self._failure
        if self._open and self._has_begun():
            missing = [index for index, state in enumerate(self._state) if state > READY or state < IDLE]
            raise GradientReductionError(
                messages.unfinished(
                    missing, self.names, rank, finds_unused=self._find_unused, static=self._static
                )
            )

    def _has_begun(self) -> bool:
        """Whether gradients have come in the current round."""
        if self._next:
            return True
        unused = len(self._unused)
        return sum(self._missing) + unused != len(self.parameters)

    def prepare_for_backward(self, outputs: Any) -> None:
        """To be called with what such a forward pass has returned: from here on gradients are expected."""
        found = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        unused: Sequence[int] = ()
        if self._find_unused and not self._static:
            unused = unused_parameters(found, self.parameters)
            self.graph_is_static = self.graph_is_static and self._unused_before in (None, unused)
            self._unused_before = unused
            if self._open:
                # Of several forward passes before a backward, each may use what the others do not.
                unused = [index for index in unused if index in self._unused]
        self._begin(unused)
        self.counters.backward_started = 0
        for output in found:
            if output.grad_fn is not None:
                output.register_hook(partial(self._backward_reached, unused))

    def _begin(self, unused: Sequence[int]) -> None:
        self._open = True
        self._next = 0
        self._missing[:] = self._sizes
        if self._static:
            if self._counts is None:
                self._state[:] = array.array("i", [COUNTING]) * len(self._state)
                self._came = [0] * len(self._state)
            else:
                self._state[:] = self._counts
                unused = self._static_unused
        elif self.record_order:
            self._state[:] = self._recording
        else:
            self._state[:] = self._template
        if self.record_order:
            self.order = []
        self._unused = unused
        for index in unused:
            self._state[index] = UNUSED
            self._missing[self._bucket_of[index]] -= 1

    def _backward_reached(self, unused: Sequence[int], _: torch.Tensor) -> None:
        """Hook on the outputs of a forward pass: backward has begun to go through it."""
        counters = self.counters
        if not counters.backward_started:
            counters.backward_started = _now()
        _queue_callback(self._backward_ended)
        if not self._open:
            self._begin(unused)

    def _hook_for(self, index: int, reducer: weakref.ref[Reducer]) -> Callable[[torch.Tensor], None]:
        """What to do when a parameter's gradient is there. Short: it runs for every parameter and step."""
        state, used, missing, bucket_of = self._state, self._used, self._missing, self._bucket_of

        def gradient_is_there(_: torch.Tensor) -> None:
            used[index] = 1
            if state[index] != EXPECTED:
                if (owner := reducer()) is not None:
                    owner._came_otherwise(index)
                return
            state[index] = READY
            bucket = bucket_of[index]
            missing[bucket] -= 1
            if not missing[bucket] and (owner := reducer()) is not None:
                owner._start_complete_buckets()

        return gradient_is_there

    def gradient_is_there(self, index: int) -> None:
        """Note that a parameter's gradient is there, where autograd does not call the hook on it."""
        self._used[index] = 1
        if self._state[index] == EXPECTED:
            self._mark_ready(index)
        else:
            self._came_otherwise(index)

    def _mark_ready(self, index: int) -> None:
        self._state[index] = READY
        self._missing[self._bucket_of[index]] -= 1
        self._start_complete_buckets()

    def _came_otherwise(self, index: int) -> None:
        """A gradient came that is not simply the expected one."""
        state = self._state[index]
        if state == IDLE:
            return
        if state == COUNTING:
            self._came[index] += 1
            self.order.append(index)
        elif state == RECORDING:
            self.order.append(index)
            self._mark_ready(index)
        elif state > EXPECTED:
            self._state[index] = state - 1
        else:
            name, rank = self.names[index], self._group.rank()
            if self._static:
                raise GradientReductionError(messages.graph_changed(name, index, rank))
            if state == READY:
                raise GradientReductionError(messages.marked_twice(name, index, rank))
            raise GradientReductionError(messages.not_unused(name, index, rank))

    def _start_complete_buckets(self) -> None:
        buckets, counters = self.buckets, self.counters
        while self._next < len(buckets) and not self._missing[self._next]:
            bucket = buckets[self._next]
            is_last = self._next + 1 == len(buckets)
            if not self._next:
                counters.communication_started = _now()
            if is_last:
                counters.backward_ended = _now()
            if self._find_unused:
                self._see_undefined(bucket)
            unused = self._unused_in(bucket)
            if not self._skips(unused, bucket):
                self._averager.start(bucket, unused, is_last)
            self._next += 1
            if is_last and not counters.backward_started:
                _queue_callback(self._backward_ended)

    def _see_undefined(self, bucket: Bucket) -> None:
        """Autograd also calls hooks for gradients that are undefined: such parameters were not used."""
        gradients = self._sink.take(bucket.parameters)
        for index, gradient in zip(bucket.indices, gradients, strict=True):
            if gradient is None and self._state[index] == READY:
                self._state[index] = UNUSED
                self._used[index] = 0
                self._unused = [*self._unused, index]

    def _unused_in(self, bucket: Bucket) -> Sequence[int]:
        if not self._unused:
            return ()
        return [place for place, index in enumerate(bucket.indices) if self._state[index] == UNUSED]

    def _skips(self, unused: Sequence[int], bucket: Bucket) -> bool:
        return self._skip_unused and len(unused) == len(bucket.indices)

    # -- the end of a round

    def _backward_ended(self) -> None:
        """At the end of a backward: finish the round, unless gradients are still to come from another one."""
        if not self._open:
            return
        if self._static and self._counts is None:
            self._count_is_over()
        elif self._find_unused and not self._static:
            # What has not come by now is not part of the loss.
            self._expect_no_more(
                [index for index, state in enumerate(self._state) if state not in (READY, UNUSED)]
            )
        if self._next == len(self.buckets):
            self._finish()
        elif self.counters.backward_started:
            self.counters.backward_ns += _now() - self.counters.backward_started
            self.counters.backward_started = 0

    def _expect_no_more(self, late: Sequence[int]) -> None:
        if late:
            self._unused = [*self._unused, *late]
            for index in late:
                self._state[index] = UNUSED
                self._missing[self._bucket_of[index]] -= 1
        self._start_complete_buckets()

    def _count_is_over(self) -> None:
        """The first backward of a static graph has ended: now it is known what comes, and how often."""
        self._counts = array.array("i", self._came)
        self._static_unused = [index for index, count in enumerate(self._came) if not count]
        self._state[:] = array.array("i", [READY]) * len(self._state)
        self._missing[:] = [0] * len(self._missing)
        if self._static_unused:
            self._unused = self._static_unused
            for index in self._static_unused:
                self._state[index] = UNUSED
        last_place = {index: place for place, index in enumerate(self.order)}
        self.order = sorted(last_place, key=last_place.__getitem__)
        self._start_complete_buckets()

    def _finish(self) -> None:
        """Wait for the averages, hand them out, and close the round."""
        counters = self.counters
        first_of_static = self._static and self.rebuilt is None and self._agreed_order is None
        try:
            if (self._find_unused and not self._static) or first_of_static:
                self._used_by.copy_(torch.frombuffer(self._used, dtype=torch.int32))
                self._group.communicator.all_reduce(self._used_by, ReduceOp.SUM)
            used: Sequence[int] = self._used_by.tolist() if self._unused else ()
            counters.reduced = 0
            for bucket in self.buckets:
                if not self._skips(self._unused_in(bucket), bucket):
                    self._averager.finish(bucket, used)
                    counters.reduced += 1
            if (
                self.rebuilt is None
                and self._agreed_order is None
                and (self._static or not self._find_unused)
            ):
                self._agreed_order = self._agree_on_order()
            for future in self._futures:
                future.wait()
        except BaseException as error:
            self._failure = error
            raise
        ended = _now()
        counters.steps += 1
        counters.bytes_reduced += self._bytes
        counters.communication_ended = ended
        counters.communication_ns += ended - counters.communication_started
        if not counters.backward_started:
            counters.backward_started = counters.communication_started
        counters.backward_ns += ended - counters.backward_started
        self._close()

    def _close(self) -> None:
        self._futures.clear()
        self._open = False
        self._next = 0
        self.last_unused, self._unused = self._unused, ()
        self._state[:] = self._all_idle
        self._used[:] = array.array("i", [0]) * len(self._used)

    def _agree_on_order(self) -> list[int]:
        """Rank 0's order of arrival. What did not arrive there comes last."""
        order = self.order or [index for bucket in self.buckets for index in bucket.indices]
        arrived = set(order)
        order += [index for index in reversed(range(len(self.parameters))) if index not in arrived]
        agreed = torch.tensor(order)
        self._group.communicator.broadcast(agreed, 0)
        return [int(index) for index in agreed]

    def _rebuild(self) -> None:
        """Make new buckets, by the order in which gradients come."""
        order, self._agreed_order = self._agreed_order, None
        assert order is not None
        plan, limits = compute_bucket_assignment_by_size(
            [self.parameters[index] for index in order], self._limits, self._sparse, order
        )
        self.rebuilt = tuple(map(tuple, plan))
        if [set(indices) for indices in plan] != [set(bucket.indices) for bucket in self.buckets]:
            self._lay_out(plan, limits)


def _queue_callback(callback: Callable[[], None]) -> None:
    """Call it at the end of the backward that is running on this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _check_plan(
    plan: Sequence[Sequence[int]], parameters: Sequence[torch.Tensor], sparse: Sequence[bool]
) -> None:
    if not parameters:
        raise InvalidArgumentError("Reducer: Expected at least one parameter.")
    if len(sparse) != len(parameters):
        raise InvalidArgumentError(
            f"Reducer: `expect_sparse_gradients` must have an entry for each of {len(parameters)} parameters,"
            f" got {len(sparse)}"
        )
    named = sorted(index for indices in plan for index in indices)
    if named != list(range(len(parameters))) or not all(plan):
        raise InvalidArgumentError(
            f"Reducer: the buckets must name each of {len(parameters)} parameters once, and each name one"
            f" at least, got {plan}"
        )
    for number, indices in enumerate(plan):
        dtypes = {parameters[index].dtype for index in indices}
        if len(dtypes) > 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise InvalidArgumentError(
                f"Reducer: All parameters in a bucket must have the same dtype; bucket {number} has {names}"
            )
        if len(indices) > 1 and any(sparse[index] for index in indices):
            raise InvalidArgumentError(
                "Reducer: Buckets with more than one variable cannot include variables that expect a sparse"
                f" gradient; bucket {number} has {len(indices)}"
            )


def _remove_all(handles: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
