"""What happens to one bucket: its gradients are gathered, reduced over the ranks, and handed out again.

``start`` is called when all gradients of a bucket are there, ``finish`` at the end of backward; in between
other buckets are started. On every rank both are called for the same buckets in the same order.

The gradient of a parameter that this rank has not used in the round is not to be touched before it is known,
at the end, whether another rank has used it. So such gradients are reduced in a copy.

Where the host has cores to spare, reductions run on the group's own thread while backward goes on. Where it
has none, they would only take turns with backward, and run at once where they are started. Ranks need not do
the same: the order of operations is.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from torchestra.errors import GradientReductionError, InvalidArgumentError
from torchestra.nn.parallel.buckets import Bucket, Piece
from torchestra.nn.parallel.comm_hooks import CommHook, GradBucket, run_comm_hook, wait_for_hook
from torchestra.nn.parallel.sink import GradientSink
from torchestra.nn.parallel.sparse import empty_like_sparse, reduce_sparse
from torchestra.nn.parallel.statistics import Counters
from torchestra.process_group import ProcessGroup
from torchestra.types import ReduceOp
from torchestra.work import Work

_INLINE_BYTES = 1 << 20
_AVG, _SUM = ReduceOp.AVG, ReduceOp.SUM
_now = time.perf_counter_ns


class _Flight(NamedTuple):
    """A bucket between its start and its finish.

    Attributes:
        gradients: of its parameters, None where there is none.
        unused: the places of parameters that this rank has not used.
        sources: by place, what is reduced in the stead of a gradient that must not be touched.
        kept: by place, a gradient that lies in the bucket's memory, and may have to be put back.
        pending: reductions that run, and tensors that are to be reduced at the end.
        future: what the communication hook has returned.
        shadow: nothing is of this rank, and nothing is to be handed out.
    """

    gradients: list[torch.Tensor | None]
    unused: Collection[int]
    sources: dict[int, torch.Tensor]
    kept: dict[int, torch.Tensor]
    pending: list[Work | torch.Tensor]
    future: torch.futures.Future[torch.Tensor] | None = None
    shadow: bool = False


class Averager:
    """Averages the gradients of buckets over the ranks of a group.

    Args:
        group: the ranks.
        sink: where gradients are.
        names: what to call each parameter in messages.
        as_views: leave each gradient as a view of its bucket's memory, instead of a copy of it.
        overlap: run reductions on the group's thread.
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
        self.divisor: float | None = None

    @property
    def has_hook(self) -> bool:
        """Whether a communication hook averages, in the stead of all_reduce."""
        return self._hook is not None

    @property
    def whole(self) -> bool:
        """Whether each bucket must be one piece."""
        return self._as_views or self.has_hook

    def set_hook(self, hook: CommHook, state: Any) -> None:
        """Let this hook average. Buckets must be whole from now on."""
        self._hook = hook, state

    def take_over(self, former: Averager) -> None:
        """Have the hook and the divisor of another one."""
        self._hook, self.divisor = former._hook, former.divisor

    def reset(self) -> None:
        """Forget the buckets that were started, when what runs of them has ended."""
        for flight in self._flights.values():
            for pending in flight.pending:
                if isinstance(pending, Work):
                    pending._done.wait()
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
        gradients = self._sink.take(bucket.parameters)
        flight = self._flights[bucket.number] = _Flight(gradients, unused, {}, {}, [])
        # With create_graph=True the gradients are part of a graph, and are left as they are.
        if torch.is_grad_enabled():
            self._copy_graph(bucket, flight)
        if bucket.sparse:
            tensors = [self._sparse_gradient(bucket, flight)]
        else:
            tensors = [self._gather(bucket, piece, flight) for piece in bucket.pieces]
        self._counters.copy_ns += _now() - began
        self._send(bucket, tensors, flight, is_last)

    def start_shadow(self, bucket: Bucket, is_last: bool) -> None:
        """Begin to reduce a bucket to which this rank contributes nothing; its gradients stay as they are."""
        flight = self._flights[bucket.number] = _Flight([], (), {}, {}, [], shadow=True)
        if bucket.sparse:
            tensors = [empty_like_sparse(bucket.parameters[0])]
        else:
            dtype = bucket.parameters[0].dtype
            sizes = [
                sum(parameter.numel() for parameter in bucket.parameters[piece.place])
                for piece in bucket.pieces
            ]
            tensors = [torch.zeros(size, dtype=dtype) for size in sizes]
        self._send(bucket, tensors, flight, is_last)

    def _send(self, bucket: Bucket, tensors: list[torch.Tensor], flight: _Flight, is_last: bool) -> None:
        """Begin to reduce these tensors."""
        if self._hook is not None:
            hook, state = self._hook
            grad_bucket = GradBucket(bucket.number, tensors[0], bucket.parameters, is_last)
            future = run_comm_hook(hook, state, grad_bucket)
            self._flights[bucket.number] = flight._replace(future=future)
            return
        for tensor in tensors:
            if is_last and tensor.layout is torch.strided and tensor.nbytes <= _INLINE_BYTES:
                # There is nothing left to overlap with, and another thread would take longer to begin.
                flight.pending.append(tensor)
            else:
                self._reduce(bucket, tensor, flight)

    def _reduce(self, bucket: Bucket, tensor: torch.Tensor, flight: _Flight) -> None:
        if bucket.sparse:
            flight.sources[0] = reduce_sparse(self._communicator, tensor, self._op)
        elif self._overlap:
            work = self._communicator.all_reduce(tensor, self._op, async_op=True)
            assert work is not None
            flight.pending.append(work)
        else:
            began = _now()
            self._communicator.all_reduce(tensor, self._op)
            self._counters.wait_ns += _now() - began

    @property
    def _op(self) -> ReduceOp:
        return _AVG if self.divisor is None else _SUM

    def _gather(self, bucket: Bucket, piece: Piece, flight: _Flight) -> torch.Tensor:
        """The tensor in which a piece is reduced, with the gradients in it."""
        place = piece.place
        if piece.flat is None:
            return self._alone(bucket, place.start, flight)
        views: list[torch.Tensor] = piece.views
        gradients: list[Any] = flight.gradients[place]
        if flight.unused:
            for index, (gradient, view) in enumerate(zip(gradients, views, strict=True), place.start):
                if index in flight.unused and gradient is None:
                    view.zero_()
                elif index in flight.unused and gradient is view:
                    flight.kept[index] = view.clone()
            pairs = [
                pair
                for index, pair in enumerate(zip(views, gradients, strict=True), place.start)
                if not (index in flight.unused and pair[1] is None)
            ]
            views, gradients = [view for view, _ in pairs], [gradient for _, gradient in pairs]
        if views:
            try:
                # Where a gradient is its view already, this does nothing.
                torch._foreach_copy_(views, gradients)
            except (RuntimeError, TypeError):
                for index in range(place.start, place.stop):
                    if index not in flight.unused:
                        self._check(bucket, index, flight)
                raise
        if self._as_views:
            # Now, not when the average is there: the memory that this frees serves the next gradients.
            for index, view in enumerate(piece.views, place.start):
                if flight.gradients[index] is not view and index not in flight.unused:
                    self._sink.put(bucket.parameters[index], view)
        return piece.flat

    def _alone(self, bucket: Bucket, index: int, flight: _Flight) -> torch.Tensor:
        """The gradient of a large parameter, or a copy of it if it must not be touched."""
        gradient = flight.gradients[index]
        if index in flight.unused:
            source = (
                torch.zeros_like(bucket.parameters[index]) if gradient is None else gradient.detach().clone()
            )
            flight.sources[index] = source
            return source.detach()
        gradient = self._check(bucket, index, flight)
        torch.autograd.graph.increment_version(gradient)
        return gradient.detach()

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

    # -- finish

    def finish(self, bucket: Bucket, used: Sequence[int]) -> None:
        """Wait for a bucket's averages, and hand them out.

        Args:
            used: for each parameter, how many ranks have used it; only asked of those unused here.
        """
        flight = self._flights.pop(bucket.number)
        began = _now()
        if flight.future is not None:
            self._take_from_hook(bucket, flight)
        for pending in flight.pending:
            if isinstance(pending, Work):
                pending.wait()
            else:
                self._communicator.all_reduce(pending, self._op)
        waited = _now()
        self._counters.wait_ns += waited - began
        if flight.shadow:
            return
        with torch.no_grad():
            if self.divisor is not None and flight.future is None:
                for tensor in self._reduced(bucket, flight):
                    tensor.div_(self.divisor)
            if bucket.sparse:
                if not flight.unused or used[bucket.indices[0]]:
                    self._sink.put(bucket.parameters[0], flight.sources[0])
            else:
                for piece in bucket.pieces:
                    self._hand_out(bucket, piece, flight, used)
        self._counters.copy_ns += _now() - waited

    def _reduced(self, bucket: Bucket, flight: _Flight) -> list[torch.Tensor]:
        """The tensors that a bucket was reduced in."""
        if bucket.sparse:
            return [flight.sources[0]]
        tensors: list[Any] = []
        for piece in bucket.pieces:
            first = piece.place.start
            tensors.append(
                flight.sources.get(first, flight.gradients[first]) if piece.flat is None else piece.flat
            )
        return [tensor.detach() for tensor in tensors]

    def _take_from_hook(self, bucket: Bucket, flight: _Flight) -> None:
        assert flight.future is not None
        expected = empty_like_sparse(bucket.parameters[0]) if bucket.sparse else bucket.flat
        result = wait_for_hook(flight.future, expected, self._communicator.seconds)
        if flight.shadow:
            return
        if bucket.sparse:
            flight.sources[0] = result
        elif result.data_ptr() != expected.data_ptr() or result.dtype is not expected.dtype:
            with torch.no_grad():
                expected.copy_(result.view(-1))

    def _hand_out(self, bucket: Bucket, piece: Piece, flight: _Flight, used: Sequence[int]) -> None:
        """Make a piece's averages the gradients of its parameters."""
        place, gradients = piece.place, flight.gradients
        if not flight.unused:
            if piece.flat is not None and not self._as_views:
                torch._foreach_copy_(gradients[place], piece.views)  # type: ignore[arg-type]
            return
        for index in range(place.start, place.stop):
            gradient, parameter = gradients[index], bucket.parameters[index]
            average = flight.sources.get(index) if piece.flat is None else piece.views[index - place.start]
            if index in flight.unused:
                if not used[bucket.indices[index]]:
                    if index in flight.kept:
                        piece.views[index - place.start].copy_(flight.kept[index])
                    continue
                assert average is not None
                if self._as_views:
                    self._sink.put(parameter, average)
                    continue
                if gradient is None:
                    self._sink.put(parameter, average if piece.flat is None else average.clone())
                    continue
            if gradient is not None and average is not None and not self._as_views:
                gradient.copy_(average)
