"""What happens to one bucket: its gradients are gathered, reduced over the ranks, and handed out again.

``start`` is called when all gradients of a bucket are there; in between other buckets are started. At the end
of backward ``complete`` is called for all buckets, then ``hand_out``. On every rank each is called for the
same buckets in the same order.

Gradients are reduced where they are, all of a bucket in one operation. Where a bucket has memory (buckets.py)
they are copied into it first.

Autograd may give two parameters gradients in the same memory: parts of one tensor that both were added into.
Such gradients are reduced in copies, since in place the second would be made of the first's average.

The gradient of a parameter that this rank has not used in the round is not to be touched before it is known,
at the end, whether another rank has used it. So such gradients are reduced in a copy.

Where the host has cores to spare, reductions run on the group's own thread while backward goes on. Where it
has none, they could only take turns with backward, which then finds its caches emptied, and waits for the
slowest rank once more for each of them; so they run at the end of backward. Ranks need not do the same: the
order of operations is.

Between hosts it is the network that is to be kept busy, so reductions always run beside backward, and the
first of a round is sent off before backward goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchestra.communicator.multihost import HostsCommunicator
from torchestra.communicator.work import Work
from torchestra.errors import GradientReductionError, InvalidArgumentError
from torchestra.nn.parallel.buckets import Bucket
from torchestra.nn.parallel.comm_hooks.interface import (
    CommHook,
    GradBucket,
    await_future,
    run_comm_hook,
    wait_for_hook,
)
from torchestra.nn.parallel.gradient_store import GradientSink
from torchestra.nn.parallel.rebuilding import follow
from torchestra.nn.parallel.sparse import empty_like_sparse, reduce_sparse
from torchestra.nn.parallel.statistics import Counters
from torchestra.process_group import ProcessGroup
from torchestra.types import ReduceOp

_INLINE_BYTES = 1 << 20
# The operations of a group that has failed end at once; a future of the program's own may never.
_HOOK_ENDS_SECONDS = 10.0
_AVG, _SUM = ReduceOp.AVG, ReduceOp.SUM
_now = time.perf_counter_ns


@dataclass(eq=False)
class _Flight:
    """A bucket between its start and its end.

    Attributes:
        gradients: of its parameters, None where there is none.
        unused: the places of parameters that this rank has not used.
        copies: by place, what is reduced in the stead of a gradient.
        kept: by place, a gradient that lies in the bucket's memory, and may have to be put back.
        tensors: what is reduced.
        work: the reduction, if it runs already.
        future: what the communication hook has returned.
        shadow: nothing is of this rank, and nothing is to be handed out.
    """

    gradients: list[torch.Tensor | None]
    unused: Collection[int] = ()
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)
    work: Work | None = None
    future: torch.futures.Future[torch.Tensor] | None = None
    shadow: bool = False


class Averager:
    """Averages the gradients of buckets over the ranks of a group.

    Args:
        group: the ranks.
        sink: where gradients are.
        names: what to call each parameter in messages.
        as_views: leave each gradient as a view of its bucket's memory, instead of a copy of it.
        overlap: run reductions on the group's thread, beside backward.
        counters: where to count what was done.

    Attributes:
        divisor: what sums are divided by; None for the number of ranks. The same on all ranks.
    """

    def __init__(
        self,
        group: ProcessGroup,
        sink: GradientSink,
        names: Sequence[str],
        counters: Counters,
        *,
        as_views: bool,
        overlap: bool,
    ) -> None:
        self._communicator = group.communicator
        self._sink = sink
        self._names = names
        self._counters = counters
        self._as_views = as_views
        self._overlap = overlap
        self._hook: tuple[CommHook, Any] | None = None
        self._flights: dict[int, _Flight] = {}
        # Where the gradients lie that have been started in this round: address and bytes, in ascending order.
        self._spans: list[tuple[int, int]] = []
        self.divisor: float | None = None

    @property
    def has_hook(self) -> bool:
        """Whether a communication hook averages, in the stead of all_reduce."""
        return self._hook is not None

    @property
    def begins_early(self) -> bool:
        """Whether the reduction of a bucket begins when it is started, while backward goes on."""
        return self._overlap or self.has_hook

    @property
    def whole(self) -> bool:
        """Whether each bucket must have memory for all its gradients."""
        return self._as_views or self.has_hook

    def set_hook(self, hook: CommHook, state: Any) -> None:
        """Let this hook average. Buckets must have memory from now on."""
        self._hook = hook, state

    def take_over(self, former: Averager, former_group: ProcessGroup, group: ProcessGroup) -> None:
        """Have the hook of another one, whose state refers to this one's group from now on."""
        if former._hook is not None:
            hook, state = former._hook
            self._hook = hook, follow(state, former_group, group)

    def reset(self) -> None:
        """Forget the buckets that were started, when what runs of them has ended."""
        for flight in self._flights.values():
            if flight.work is not None:
                flight.work.await_end()
            if flight.future is not None:
                # Callbacks of a hook may still write into its state. What it failed with is known.
                with contextlib.suppress(Exception):
                    await_future(flight.future, _HOOK_ENDS_SECONDS)
        self._flights.clear()

    # -- start

    def start(self, bucket: Bucket, unused: Collection[int], is_last: bool) -> None:
        """Gather a bucket's gradients and begin to reduce them.

        Args:
            unused: the places in the bucket of parameters that were not used here.
            is_last: no other bucket will be started in this round.

        Raises:
            GradientReductionError: a gradient is missing or not as expected.
        """
        began = _now()
        flight = self._flights[bucket.number] = _Flight(self._sink.take(bucket.parameters), unused)
        # With create_graph=True the gradients are part of a graph, and are left as they are.
        if torch.is_grad_enabled():
            self._copy_graph(bucket, flight)
        if bucket.sparse:
            flight.tensors = [self._sparse_gradient(bucket, flight)]
        elif bucket.flat is not None:
            self._fill(bucket, flight)
            flight.tensors = [bucket.flat]
        else:
            flight.tensors = self._in_place(bucket, flight)
        self._counters.copy_ns += _now() - began
        self._send(bucket, flight, is_last)

    def start_shadow(self, bucket: Bucket, is_last: bool) -> None:
        """Begin to reduce a bucket to which this rank contributes nothing; its gradients stay as they are."""
        flight = self._flights[bucket.number] = _Flight([], shadow=True)
        if bucket.sparse:
            flight.tensors = [empty_like_sparse(bucket.parameters[0])]
        else:
            numel = sum(parameter.numel() for parameter in bucket.parameters)
            first = bucket.parameters[0]
            flight.tensors = [torch.zeros(numel, dtype=first.dtype, device=first.device)]
        self._send(bucket, flight, is_last)

    def _send(self, bucket: Bucket, flight: _Flight, is_last: bool) -> None:
        """Begin to reduce, or leave it for the end."""
        if self._hook is not None:
            hook, state = self._hook
            grad_bucket = GradBucket(bucket.number, flight.tensors[0], bucket.parameters, is_last)
            flight.future = run_comm_hook(hook, state, grad_bucket)
        # After the last there is nothing left to overlap with, and another thread would take longer to begin.
        elif self._overlap and not (is_last and bucket.nbytes <= _INLINE_BYTES):
            communicator = self._communicator
            if isinstance(communicator, HostsCommunicator) and len(self._flights) == 1 and not is_last:
                before = communicator.sent_off
                self._reduce(bucket, flight, beside=True)
                communicator.await_sending(before)
            else:
                self._reduce(bucket, flight, beside=True)

    def _reduce(self, bucket: Bucket, flight: _Flight, *, beside: bool) -> None:
        """Reduce a bucket's tensors, ``beside`` what this thread does if it can be."""
        tensors, op = flight.tensors, self._op
        if bucket.sparse:
            flight.copies[0] = reduce_sparse(self._communicator, tensors[0], op)
            flight.tensors = []
        elif len(tensors) == 1:
            flight.work = self._communicator.all_reduce(tensors[0], op, async_op=beside)
        else:
            flight.work = self._communicator.all_reduce_list(tensors, op, async_op=beside)

    @property
    def _op(self) -> ReduceOp:
        return _AVG if self.divisor is None else _SUM

    def _fill(self, bucket: Bucket, flight: _Flight) -> None:
        """Copy the gradients into the bucket's memory."""
        views, gradients = bucket.views, flight.gradients
        for place in flight.unused:
            if gradients[place] is None:
                views[place].zero_()
            elif gradients[place] is views[place]:
                flight.kept[place] = views[place].clone()
        pairs: list[Any] = list(zip(views, gradients, strict=True))
        if flight.unused:
            absent = {place for place in flight.unused if gradients[place] is None}
            pairs = [pair for place, pair in enumerate(pairs) if place not in absent]
        if pairs:
            try:
                # Where a gradient is its view already, this does nothing.
                torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
            except (RuntimeError, TypeError):
                for place in range(len(views)):
                    if place not in flight.unused:
                        self._check(bucket, place, flight)
                raise
        if self._as_views:
            # Now, not when the average is there: the memory that this frees serves the next gradients.
            for place, view in enumerate(views):
                if gradients[place] is not view and place not in flight.unused:
                    self._sink.put(bucket.parameters[place], view)

    def _in_place(self, bucket: Bucket, flight: _Flight) -> list[torch.Tensor]:
        """The gradients themselves, or copies of those that must not be touched."""
        tensors: list[Any] = list(flight.gradients)
        for place in flight.unused:
            gradient = tensors[place]
            copy = torch.zeros_like(bucket.parameters[place]) if gradient is None else gradient.clone()
            tensors[place] = flight.copies[place] = copy.detach()
        for place, tensor in enumerate(tensors):
            if tensor is None or tensor.layout is not torch.strided:
                self._check(bucket, place, flight)
        # The average of an average is the same again, but not the sum of a sum: with a divisor, nothing may
        # be reduced in place before all has been copied.
        if self._share_memory(tensors) or (self._overlap and self.divisor is not None):
            for other in self._flights.values():
                if other.work is not None:
                    other.work.wait()
            flight.copies = {place: tensor.detach().clone() for place, tensor in enumerate(tensors)}
            tensors = list(flight.copies.values())
        torch.autograd.graph.increment_version(tensors)
        return tensors

    def _share_memory(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether any of these lies where another of this round does."""
        if len(self._flights) == 1:
            self._spans = []
        self._spans = sorted(self._spans + [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])
        end = 0
        for start, nbytes in self._spans:
            if start < end:
                return True
            end = start + nbytes
        return False

    def _check(self, bucket: Bucket, index: int, flight: _Flight) -> torch.Tensor:
        """The gradient, which must be there and dense."""
        gradient, name = flight.gradients[index], self._names[bucket.indices[index]]
        if gradient is None:
            raise GradientReductionError(
                f"the gradient of parameter {name!r} was taken away before it was averaged: no hook on the"
                " parameter may set its .grad to None"
            )
        if gradient.layout is not torch.strided:
            raise InvalidArgumentError(
                f"parameter {name!r} received a sparse gradient ({gradient.layout}), and a dense one was"
                " expected: only those of nn.Embedding and nn.EmbeddingBag with sparse=True may be sparse"
            )
        return gradient

    def _sparse_gradient(self, bucket: Bucket, flight: _Flight) -> torch.Tensor:
        gradient, name = flight.gradients[0], self._names[bucket.indices[0]]
        if gradient is None and flight.unused:
            return empty_like_sparse(bucket.parameters[0])
        if gradient is None or gradient.layout is not torch.sparse_coo:
            found = "none" if gradient is None else f"one with layout {gradient.layout}"
            raise GradientReductionError(
                f"parameter {name!r} is of a module with sparse=True, so a sparse gradient was expected, but"
                f" it received {found}; create the module with sparse=False"
            )
        return gradient.detach()

    def _copy_graph(self, bucket: Bucket, flight: _Flight) -> None:
        """Put copies that are no part of a graph in the place of gradients that are."""
        for index, gradient in enumerate(flight.gradients):
            if gradient is not None and gradient.requires_grad:
                copy = gradient.detach().clone()
                flight.gradients[index] = copy
                self._sink.put(bucket.parameters[index], copy)

    # -- the end

    def complete(self, bucket: Bucket) -> None:
        """Wait for a bucket's averages, or sums."""
        flight = self._flights[bucket.number]
        began = _now()
        if flight.future is not None:
            self._take_from_hook(bucket, flight)
        elif flight.work is not None:
            flight.work.wait()
        elif flight.tensors:
            self._reduce(bucket, flight, beside=False)
        self._counters.wait_ns += _now() - began

    def hand_out(self, bucket: Bucket, used: Sequence[int]) -> None:
        """Make the averages of a bucket that is complete the gradients of its parameters.

        Args:
            used: for each parameter, how many ranks have used it; only asked of those unused here.
        """
        flight = self._flights.pop(bucket.number)
        is_done = bucket.flat is None and not (bucket.sparse or flight.copies or self.divisor)
        if flight.shadow or is_done:
            return
        began = _now()
        with torch.no_grad():
            if self.divisor is not None and flight.future is None:
                for tensor in [flight.copies[0]] if bucket.sparse else flight.tensors:
                    tensor.div_(self.divisor)
            if bucket.sparse:
                if not flight.unused or used[bucket.indices[0]]:
                    self._sink.put(bucket.parameters[0], flight.copies[0])
            else:
                if bucket.flat is not None and not self._as_views:
                    self._copy_out(bucket, flight)
                for place, copy in flight.copies.items():
                    if place not in flight.unused:
                        self._check(bucket, place, flight).copy_(copy)
                for place in flight.unused:
                    self._settle_unused(bucket, place, flight, used[bucket.indices[place]] > 0)
        self._counters.copy_ns += _now() - began

    def _take_from_hook(self, bucket: Bucket, flight: _Flight) -> None:
        assert flight.future is not None
        expected = empty_like_sparse(bucket.parameters[0]) if bucket.flat is None else bucket.flat
        result = wait_for_hook(flight.future, expected, self._communicator.seconds)
        if flight.shadow:
            return
        if bucket.sparse:
            flight.copies[0] = result
        elif result.data_ptr() != expected.data_ptr() or result.dtype is not expected.dtype:
            with torch.no_grad():
                expected.copy_(result.view(-1))

    @staticmethod
    def _copy_out(bucket: Bucket, flight: _Flight) -> None:
        """Copy the averages from the bucket's memory into the gradients that were used here."""
        gradients: list[Any] = flight.gradients
        places = [place for place in range(len(gradients)) if place not in flight.unused]
        if places:
            torch._foreach_copy_(
                [gradients[place] for place in places], [bucket.views[place] for place in places]
            )

    def _settle_unused(self, bucket: Bucket, place: int, flight: _Flight, used: bool) -> None:
        """A parameter that was not used here gets the average if it was used elsewhere."""
        parameter, gradient = bucket.parameters[place], flight.gradients[place]
        if not used:
            if place in flight.kept:
                bucket.views[place].copy_(flight.kept[place])
            return
        average = flight.copies[place] if bucket.flat is None else bucket.views[place]
        if self._as_views or gradient is None:
            is_own = self._as_views or bucket.flat is None
            self._sink.put(parameter, average if is_own else average.clone())
        else:
            gradient.copy_(average)
