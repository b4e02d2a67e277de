"""Averages gradients over the ranks of a group while backward computes them.

A hook on every parameter records that its gradient is ready (ready_tracker.py). When all gradients of a
bucket are ready, the reducer starts the bucket (bucket_reducer.py), while backward goes on. Buckets start in
their order on every rank, because the ranks of a group must call the same operations in the same order, and
gradients need not arrive in the same order on all ranks. At the end of backward autograd calls
``Reducer._backward_ended``, which waits for the averages and writes them back. Hooks on the outputs of the
forward pass queue that call, so that it comes at the end of the outer backward where reentrant checkpointing
runs a backward within the backward. (Where the tensors in outputs cannot be found, the parameter's hook that
fills the last bucket queues it.)

A *round* is one such reduction of all gradients. A forward pass whose gradients are to be averaged begins a
round. If a second backward runs through the same or another such forward pass after the round is over, hooks
on the outputs begin the next.

After the first round the ranks take rank 0's order of arrival, and the next forward pass makes new buckets in
that order; not where unused parameters are looked for, since every round may have another order there.

Hooks run on the thread that runs backward: for CPU tensors the calling thread, for those of a GPU one of
autograd's own. They hold the reducer weakly and are removed when it dies, so the module can outlive it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from torchestra.communicator.queue import RAISED_BY_ALL
from torchestra.engine.kernels.selection import spare_cores
from torchestra.engine.recorder.flight_entries import SpanTimes
from torchestra.errors import GradientReductionError, InvalidArgumentTypeError
from torchestra.nn.parallel import messages
from torchestra.nn.parallel.autograd_hooks import GradientHooks, on_backward, one_at_a_time, queue_callback
from torchestra.nn.parallel.bucket_reducer import BucketReducer
from torchestra.nn.parallel.buckets import (
    BUCKET_CAP_MB,
    FIRST_BUCKET_BYTES,
    Bucket,
    check_plan,
    compute_bucket_assignment_by_size,
    make_bucket,
)
from torchestra.nn.parallel.comm_hooks.default_hooks import BUILTIN_HOOKS
from torchestra.nn.parallel.comm_hooks.interface import BuiltinCommHookType, CommHook, await_future
from torchestra.nn.parallel.gradient_memory import GradientMemory
from torchestra.nn.parallel.gradient_store import GradientStore, ThreadGradientStore
from torchestra.nn.parallel.outputs import requiring_gradients, unused_parameters
from torchestra.nn.parallel.ready_tracker import ReadyTracker
from torchestra.nn.parallel.reducer_names import TorchReducerNames
from torchestra.nn.parallel.sparse import empty_like_sparse
from torchestra.nn.parallel.statistics import Counters
from torchestra.process_group import ProcessGroup
from torchestra.types import ReduceOp

_CAP_BYTES = int(BUCKET_CAP_MB * (1 << 20))
_now = time.perf_counter_ns


class Reducer(TorchReducerNames):
    """Averages the gradients of some parameters over the ranks of a group.

    Args:
        params: the parameters; on the CPU or GPUs, and requiring gradients.
        bucket_indices: the indices of the parameters in each bucket, in the order in which buckets are
            expected to be complete; a bucket is of one dtype and on one device.
        per_bucket_size_limits: the bytes at which each bucket was closed; for logging.
        process_group: the group, whose ranks have the same parameters and the same buckets.
        expect_sparse_gradients: by parameter, whether its gradients are sparse; then it is alone in a bucket.
        bucket_bytes_cap, first_bucket_bytes_cap: the limits of the buckets made after the first round.
        find_unused_parameters: look for parameters that the outputs do not depend on, in every forward.
        gradient_as_bucket_view: let gradients be parts of the buckets, instead of copies of them.
        param_to_name_mapping: by index, the names of parameters in messages.
        skip_all_reduce_unused_params: do not reduce buckets of which all parameters are unused; these must be
            the same on all ranks.
        bucket_size_limits_for_rebuilding: instead of the two caps.
        gradient_store: holds the gradients; default: where backward leaves them.
        counters: count the work.
        may_be_empty: accept an empty ``params``; then rounds are counted, and nothing is sent in them.

    Raises:
        InvalidArgumentError: there is no parameter, though there must be, or the buckets do not name each
            once, mix dtypes or devices, or have a sparse gradient with others.

    Attributes:
        parameters, names, buckets, counters: as given, or made from the arguments.
        iterations: the number of forward passes that were to be reduced.
        rebuilt: the buckets made after the first round, by indices; None before.
        last_unused: the parameters that were not used here in the last round.
        graph_is_static: whether all rounds so far have left the same parameters unused.
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
        gradient_store: GradientStore | None = None,
        counters: Counters | None = None,
        may_be_empty: bool = False,
    ) -> None:
        self.parameters = tuple(params)
        count = len(self.parameters)
        self.names = [(param_to_name_mapping or {}).get(index, str(index)) for index in range(count)]
        self._sparse = list(expect_sparse_gradients) or [False] * count
        if params or not may_be_empty:
            check_plan(bucket_indices, self.parameters, self._sparse)
        self._group = process_group
        self._find_unused = self._finds_unused_each_round = find_unused_parameters
        self._skip_unused = skip_all_reduce_unused_params
        self._limits = list(bucket_size_limits_for_rebuilding) or [first_bucket_bytes_cap, bucket_bytes_cap]
        self.counters = counters or Counters()
        self._as_views = gradient_as_bucket_view
        self._store = gradient_store or ThreadGradientStore()
        self._bucket_reducer = self._make_bucket_reducer()
        self.tracker = ReadyTracker(self.names, self._group.rank(), self._start_ready_buckets)
        self._used_by = torch.zeros(count, dtype=torch.int32)
        self._first_plan = bucket_indices, per_bucket_size_limits
        self._make_buckets(*self._first_plan)
        self.iterations = 0
        self.rebuilt: tuple[tuple[int, ...], ...] | None = None
        self.graph_is_static = True
        self.last_unused: Sequence[int] = ()
        self._unused_before: Sequence[int] | None = None
        self._agreed_order: list[int] | None = None
        self._next, self._failure = 0, ""
        self._futures: list[torch.futures.Future[Any]] = []
        self._discarded: Sequence[torch.Tensor] = ()
        self._memory: GradientMemory | None = None  # for the backward that is expected
        self._hooks = self._register_autograd_hooks()

    def _register_autograd_hooks(self) -> GradientHooks:
        hooks = [self.tracker.hook_for(index) for index in range(len(self.parameters))]
        if len({parameter.device for parameter in self.parameters}) > 1:
            hooks = one_at_a_time(hooks)
        return GradientHooks(self._group, self.parameters, hooks)

    def _make_bucket_reducer(self) -> BucketReducer:
        hosts = self._group.communicator.engine.hosts
        return BucketReducer(
            self._group,
            self._store,
            self.names,
            self.counters,
            as_views=self._as_views,
            # A network transfers by itself; copies in memory need a core.
            overlap=hosts is not None or spare_cores(self._group.size()) > 0,
            memory=GradientMemory.of(self._group, self.parameters, self._sparse),
        )

    def _make_buckets(self, plan: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        """Make the buckets, and their memory."""
        limits = [*limits, *[0] * (len(plan) - len(limits))]
        self.buckets = [
            make_bucket(
                number,
                indices,
                self.parameters,
                self._group,
                with_flat=self._bucket_reducer.needs_flat,
                sparse=self._sparse[indices[0]],
                limit=limits[number],
            )
            for number, indices in enumerate(plan)
        ]
        self.tracker.set_buckets(plan)
        self.counters.buckets = len(self.buckets)
        self._bytes = sum(bucket.nbytes for bucket in self.buckets)

    # -- outside of rounds

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` average the gradients. Can be called once only, and between rounds.

        Raises:
            GradientReductionError: there is a hook already, or a round has begun.
        """
        if self._bucket_reducer.has_hook:
            raise GradientReductionError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        if self._has_begun():
            raise GradientReductionError(
                "a DDP communication hook should be registered before calling backward, not while gradients"
                " are being reduced"
            )
        self._bucket_reducer.set_hook(hook, state)
        self._make_buckets([bucket.indices for bucket in self.buckets], [each.limit for each in self.buckets])

    def register_builtin_comm_hook(self, kind: BuiltinCommHookType) -> None:
        """Let a hook of a built-in kind average the gradients; see :meth:`register_comm_hook`."""
        if not isinstance(kind, BuiltinCommHookType):
            raise InvalidArgumentTypeError(
                f"comm_hook_type must be a torchestra.BuiltinCommHookType, got {kind!r}"
            )
        self.register_comm_hook(self._group, BUILTIN_HOOKS[kind])

    def set_static_graph(self) -> None:
        """Assume that every round uses the same parameters as the first one, equally often.

        Raises:
            GradientReductionError: training has begun.
        """
        if self.iterations:
            raise GradientReductionError(
                "set_static_graph() should be called before training loop starts and after"
                " DistributedDataParallel is constructed."
            )
        self.tracker.static = True
        self._finds_unused_each_round = False

    def set_divisor(self, divisor: float | None) -> None:
        """Divide sums by this, instead of the number of ranks (None). All ranks must do the same."""
        self._bucket_reducer.divisor = divisor

    def remove_autograd_hooks(self) -> None:
        """Take no part in backward any more."""
        self._hooks.remove()

    def discard_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Remove the gradients of these parameters after each round: an optimizer has used them already."""
        self._discarded = list(parameters)

    def install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Wait for these futures at the end of the next round."""
        self._futures += futures

    def update_process_group(self, group: ProcessGroup) -> None:
        """Forget a round that was not finished, and average over another group from now on."""
        self._bucket_reducer.reset()
        former_group, self._group = self._group, group
        self._hooks.update_process_group(group)
        former, self._bucket_reducer = self._bucket_reducer, self._make_bucket_reducer()
        self._bucket_reducer.adopt_hook(former, former_group, group)
        self._end_round()
        self.tracker.restart(group.rank())
        self._failure = ""
        self._agreed_order = self.rebuilt = self._unused_before = None
        self.last_unused, self.graph_is_static = (), True
        # Some ranks may not have made new buckets, so only the first ones are certain to be the same.
        self._make_buckets(*self._first_plan)

    @property
    def local_used_map(self) -> torch.Tensor:
        """For each parameter, how many ranks used it in the last round, where unused ones are looked for."""
        return self._used_by

    # -- the round

    def prepare_for_forward(self) -> None:
        """Count a forward pass that begins, and whose gradients are to be reduced.

        Raises:
            GradientReductionError: the previous round has not ended, or the group was reconfigured.
        """
        self._bucket_reducer.check_group()
        self.check_finished()
        if self._agreed_order is not None:
            self._rebuild()
        self.iterations += 1
        self.counters.forward_started = _now()

    def record_spans(self, spans: Sequence[SpanTimes]) -> None:
        """Write parts of the current step, which have ended, into the group's flight record."""
        self._group.communicator.engine.record_spans(self.iterations, spans)

    def check_finished(self) -> None:
        """Raise a GradientReductionError if a round has begun and not ended, or a reduction has failed."""
        rank = self._group.rank()
        if self._failure:
            raise GradientReductionError(
                f"the reduction of gradients failed on rank {rank} ({self._failure}); make a new group"
                " and wrap the module again, or shrink the group and rebuild() the wrapper"
            )
        if self._has_begun():
            missing, static = self.tracker.outstanding(), self.tracker.static
            raise GradientReductionError(
                messages.unfinished(missing, self.names, rank, finds_unused=self._find_unused, static=static)
            )

    def _record_failure(self, error: BaseException) -> None:
        if not isinstance(error, RAISED_BY_ALL):
            self._group.communicator.queue.leave(
                "the reduction of gradients", error
            )  # the others wait for it
        # As text: the error's traceback would keep this reducer alive, and with it its hooks.
        self._failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        # A backward through the module alone may follow; its gradients are not those of this round.
        self.tracker.end()

    def _has_begun(self) -> bool:
        return self._next > 0 or self.tracker.has_begun

    def prepare_for_backward(self, outputs: Any) -> None:
        """Begin a round, with the outputs of a counted forward pass: gradients are expected from here on."""
        tracker = self.tracker
        tensors = requiring_gradients(outputs)
        self._memory = self._bucket_reducer.memory
        if self._memory is not None:
            self._memory.prepare()
        unused: Sequence[int] = ()
        if self._finds_unused_each_round:
            unused = unused_parameters(tensors, self.parameters)
            self.graph_is_static = self.graph_is_static and self._unused_before in (None, unused)
            self._unused_before = unused
            if tracker.is_open:
                # Of several forward passes before a backward, each may use other parameters.
                unused = [index for index in unused if index in tracker.unused]
        self._begin(unused)
        for output in tensors:
            on_backward(output, partial(self._backward_reached, unused))

    def watch(self, outputs: Any) -> None:
        """Expect a backward from a forward pass's outputs whose gradients are not to be reduced."""
        if (memory := self._bucket_reducer.memory) is not None:
            memory.watch(requiring_gradients(outputs))

    def _begin(self, unused: Sequence[int]) -> None:
        self._next = 0
        self.tracker.begin(unused)
        self.counters.backward_started = 0

    def _backward_reached(self, unused: Sequence[int], _: object) -> None:
        """Record that a backward has reached the outputs of a forward pass, as the hook on them."""
        queue_callback(self._backward_ended)
        if self._memory is not None:
            self._memory.serve()
        if not self.tracker.is_open:
            self._begin(unused)
        if not self.counters.backward_started:
            self.counters.backward_started = _now()

    def _start_ready_buckets(self) -> None:
        """Start the buckets whose gradients are all ready, in their order."""
        buckets, counters, tracker = self.buckets, self.counters, self.tracker
        while self._next < len(buckets) and not tracker.missing[self._next]:
            bucket = buckets[self._next]
            is_last = self._next + 1 == len(buckets)
            if not self._next:
                counters.communication_started = _now() if self._bucket_reducer.begins_early else 0
            if is_last:
                counters.backward_ended = _now()
            if self._find_unused:
                tracker.mark_undefined(bucket.indices, self._store.take(bucket.parameters))
            unused = tracker.unused_slots(bucket.indices) if tracker.unused else ()
            if not (self._skip_unused and len(unused) == len(bucket.indices)):
                try:
                    self._bucket_reducer.start(bucket, unused, is_last)
                except BaseException as error:
                    self._record_failure(error)
                    raise
            self._next += 1
            if is_last and not counters.backward_started:
                queue_callback(self._backward_ended)

    # -- the end of a round

    def _backward_ended(self) -> None:
        """Finish the round at the end of a backward; if gradients are missing, leave it to another one."""
        tracker, counters = self.tracker, self.counters
        if self._memory is not None:
            self._memory.stop()
        if not tracker.is_open:
            return
        if tracker.static and tracker.is_counting:
            tracker.finish_counting()
        elif self._finds_unused_each_round:
            # A gradient that has not arrived by now is not part of the loss.
            tracker.mark_unused(tracker.outstanding())
        # Where no gradient arrived, nothing has started the buckets of unused parameters.
        if self._next < len(self.buckets):
            self._start_ready_buckets()
        if self._next == len(self.buckets):
            self._finish()
        elif counters.backward_started:
            counters.backward_ns += _now() - counters.backward_started
            counters.backward_started = 0

    def _finish(self) -> None:
        """Wait for the averages, write them back, and end the round."""
        counters, tracker, bucket_reducer = self.counters, self.tracker, self._bucket_reducer
        counters.communication_started = counters.communication_started or _now()
        try:
            reduced = self._used_buckets() if self._skip_unused else self.buckets
            counters.reduced = len(reduced)
            began = _now()
            spans = [bucket_reducer.complete(bucket) for bucket in reduced]
            spans.append(("wait", began, _now(), -1, 0))
            if self._finds_unused_each_round or tracker.static:
                self._share_usage(tracker.used())
            used: Sequence[int] = self._used_by.tolist() if tracker.unused else ()
            for bucket in reduced:
                bucket_reducer.write_back(bucket, used)
            if self.rebuilt is None:
                self._agree_on_order()
            for future in self._futures:
                await_future(future, self._group.communicator.timeout_s)
        except BaseException as error:
            self._record_failure(error)
            raise
        ended = _now()
        counters.steps += 1
        counters.bytes_reduced += self._bytes
        counters.communication_ended = ended
        counters.communication_ns += ended - counters.communication_started
        if not counters.backward_started:
            counters.backward_started = counters.communication_started
        counters.backward_ns += ended - counters.backward_started
        spans.append(("backward", counters.backward_started, ended, -1, 0))
        self._group.communicator.engine.record_spans(self.iterations, spans)
        self._end_round()

    def _used_buckets(self) -> list[Bucket]:
        """Return the buckets with a parameter that was used."""
        return [each for each in self.buckets if not self.tracker.is_unused(each.indices)]

    def _end_round(self) -> None:
        self._futures.clear()
        for parameter in self._discarded:
            self._store.put(parameter, None)
        self._next = 0
        self.last_unused = self.tracker.unused
        self.tracker.end()

    @property
    def _is_first_round(self) -> bool:
        return self.rebuilt is None and self._agreed_order is None

    def _share_usage(self, used: torch.Tensor) -> None:
        """Count for each parameter the ranks that have used it, in rounds where that may change."""
        if self.buckets and (self._finds_unused_each_round or (self.tracker.static and self._is_first_round)):
            self._used_by.copy_(used)
            self._group.communicator.all_reduce(self._used_by, ReduceOp.SUM)

    def _agree_on_order(self) -> None:
        """Take rank 0's order of arrival, after the first round; parameters without a gradient come last."""
        if self._finds_unused_each_round or not self._is_first_round or not self.buckets:
            return
        # A dict keeps the first occurrence of each index.
        order = dict.fromkeys([*self.tracker.order, *(i for bucket in self.buckets for i in bucket.indices)])
        agreed = torch.tensor(list(order))
        self._group.communicator.broadcast(agreed, 0)
        self._agreed_order = agreed.tolist()

    def _rebuild(self) -> None:
        """Make new buckets, in the agreed order of arrival."""
        order, self._agreed_order = self._agreed_order, None
        assert order is not None
        plan, limits = compute_bucket_assignment_by_size(
            [self.parameters[index] for index in order], self._limits, self._sparse, order
        )
        self.rebuilt = tuple(map(tuple, plan))
        if [set(indices) for indices in plan] != [set(bucket.indices) for bucket in self.buckets]:
            self._make_buckets(plan, limits)

    def shadow_round(self, write_back: bool = False) -> None:
        """Take part in a round of the other ranks, contributing zeros.

        Args:
            write_back: make the averages this rank's gradients too; if not, its gradients do not change.
        """
        self.prepare_for_forward()
        before = self._store.take(self.parameters)
        skipped = set(self.last_unused if self._skip_unused else ())
        reduced = [bucket for bucket in self.buckets if not skipped.issuperset(bucket.indices)]
        try:
            for bucket in reduced:
                if write_back:
                    zeros = empty_like_sparse if bucket.sparse else torch.zeros_like
                    for parameter in bucket.parameters:
                        self._store.put(parameter, zeros(parameter))
                    self._bucket_reducer.start(bucket, (), bucket is self.buckets[-1])
                else:
                    self._bucket_reducer.start_shadow(bucket, bucket is self.buckets[-1])
            for bucket in reduced:
                self._bucket_reducer.complete(bucket)
            self._share_usage(torch.zeros_like(self._used_by))
            for bucket in reduced:
                self._bucket_reducer.write_back(bucket, ())
            if write_back and (self._finds_unused_each_round or self.tracker.static):
                for index, ranks in enumerate(self._used_by.tolist()):
                    if not ranks:
                        self._store.put(self.parameters[index], before[index])
            self._agree_on_order()
        except BaseException as error:
            self._record_failure(error)
            raise
