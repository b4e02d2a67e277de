"""The engine of a group whose ranks share an arena: a collective becomes a call of a compiled kernel.

:data:`ALGORITHMS` says, by a row's algorithm, which kernel runs it with which arguments. Calling a kernel
costs 0.15 µs, a query of a tensor 0.04, a Python call 0.06; entries/collectives.py calls small ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchestra.engine import layout as at
from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.entry_layout import State
from torchestra.engine.failure.liveness import PeerThreads
from torchestra.engine.interface import Engine, Prepared
from torchestra.engine.kernels import exchange, move, prefix, reduce, shared_words
from torchestra.engine.kernels.reductions import combine_tensors, reduction, scale, supports
from torchestra.engine.kernels.selection import Choices
from torchestra.engine.membership.message_waiter import MessageWaiter
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.memory.heap import bytes_of_heap
from torchestra.engine.native.kernel import Kernel, entry_point
from torchestra.engine.operations import BARRIER, DTYPE_NAMES, UNEVEN, Collective, Kind, pack
from torchestra.engine.p2p.mailbox import Mailbox, weak_rank_name
from torchestra.engine.p2p.transfer import Transfer
from torchestra.engine.prepared import PreparedKernel
from torchestra.engine.reclaiming import reclaim
from torchestra.engine.recorder.flight_entries import SPAN_KINDS, SpanTimes
from torchestra.engine.recorder.flight_record import FlightRecord, read_flight_record
from torchestra.engine.recorder.spans import record_span
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.system.forking import forget_in_children, refusal
from torchestra.types import ReduceOp

Tensors = Sequence[torch.Tensor]
Arguments = tuple[int, ...]
Algorithm = Callable[["LocalEngine", "LocalPlan", Tensors, Tensors], tuple[Kernel, Arguments]]
"""Of an engine, a plan, inputs and outputs: the kernel to call, and with what."""


class LocalPlan:
    """Hold the constants of a collective on a dtype, in words that kernels read (entry_layout.py).

    Attributes:
        row: the collective.
        address: of those words.
        unit: bytes per element.
        root: the root, -1 if there is none.
    """

    __slots__ = ("_words", "address", "root", "row", "unit")

    def __init__(
        self, context: int, meta: int, unit: int, function: int, root: int, row: Collective = BARRIER
    ) -> None:
        self._words: npt.NDArray[np.int64] = np.array([context, meta, unit, function, root], dtype=np.int64)
        self.address: int = self._words.ctypes.data
        self.unit = unit
        self.root = root
        self.row = row


def count_of(lengths: Sequence[int], count: int) -> int:
    """Return the count that ranks compare: that of elements, or of lengths that differ a hash of them."""
    return count if len(set(lengths)) == 1 else UNEVEN | (hash(tuple(lengths)) & (UNEVEN - 1))


def moves(dtype: torch.dtype) -> bool:
    """Return whether tensors of the dtype can be sent."""
    return dtype in DTYPE_CODE


KERNELS: dict[str, Any] = {
    "all_reduce": reduce.all_reduce,
    "all_reduce_iovec": reduce.all_reduce_iovec,
    "reduce_scatter": reduce.reduce_scatter,
    "reduce_scatter_even": reduce.reduce_scatter_even,
    "barrier": move.barrier,
    "broadcast": move.broadcast,
    "share": move.share,
    "gather": move.gather,
    "scatter": move.scatter,
    "all_gather": move.all_gather,
    "exchange": exchange.exchange,
    "all_to_all_even": exchange.all_to_all_even,
    "scan": prefix.scan,
}
"""The kernels of collectives, compiled when an engine is made."""

_WITH_TABLES = frozenset({"share", "gather", "scatter", "exchange", "reduce_scatter"})
"""The kernels that read the tables by peer, besides their arguments."""


class Kernels:
    """The entry points of the kernels, each an attribute. After an abort all of them raise.

    Entries (engine/entries/) call the kernels themselves; they are off as soon as another function replaces
    one.

    Args:
        state: tells the entries so.
    """

    all_reduce: Kernel
    all_reduce_iovec: Kernel
    reduce_scatter: Kernel
    reduce_scatter_even: Kernel
    barrier: Kernel
    broadcast: Kernel
    share: Kernel
    gather: Kernel
    scatter: Kernel
    all_gather: Kernel
    exchange: Kernel
    all_to_all_even: Kernel
    scan: Kernel
    _state: State

    def __init__(self, state: State) -> None:
        # A copy, as a thread that is another rank may put one of its own into the table meanwhile.
        made = {name: entry_point(kernel) for name, kernel in KERNELS.copy().items()}
        vars(self).update(made, _state=state)

    def __setattr__(self, name: str, kernel: Kernel) -> None:
        self._state.off = 1
        super().__setattr__(name, kernel)

    def replace(self, refuse: Kernel) -> None:
        """Replace every kernel by a function that raises."""
        for name in KERNELS.copy():
            setattr(self, name, refuse)


def _all_reduce(
    engine: LocalEngine, plan: LocalPlan, inputs: Tensors, outputs: Tensors
) -> tuple[Kernel, Arguments]:
    """Work in place; take several tensors as one, their elements one after the other."""
    if len(inputs) == 1:
        return engine.kernels.all_reduce, (plan.address, inputs[0].numel(), inputs[0].data_ptr())
    starts = [*accumulate((tensor.numel() for tensor in inputs), initial=0)]
    parts = engine.iovec = array("q", starts)
    parts.extend([tensor.data_ptr() for tensor in inputs])
    return engine.kernels.all_reduce_iovec, (plan.address, starts[-1], parts.buffer_info()[0], len(inputs))


def _broadcast(
    engine: LocalEngine, plan: LocalPlan, inputs: Tensors, outputs: Tensors
) -> tuple[Kernel, Arguments]:
    tensor = inputs[0]
    return engine.kernels.broadcast, (plan.address, tensor.numel(), tensor.data_ptr())


def _all_gather(
    engine: LocalEngine, plan: LocalPlan, inputs: Tensors, outputs: Tensors
) -> tuple[Kernel, Arguments]:
    lengths = [output.nbytes for output in outputs]
    count = count_of(lengths, inputs[0].numel())
    engine.context.set_table(at.TARGETS, [output.data_ptr() for output in outputs])
    engine.context.set_table(at.TARGET_BYTES, lengths)
    return engine.kernels.share, (plan.address, count, inputs[0].data_ptr())


def _all_gather_into_tensor(
    engine: LocalEngine, plan: LocalPlan, inputs: Tensors, outputs: Tensors
) -> tuple[Kernel, Arguments]:
    tensor, output = inputs[0], outputs[0]
    return engine.kernels.all_gather, (plan.address, tensor.numel(), tensor.data_ptr(), output.data_ptr())


def _gather(
    engine: LocalEngine, plan: LocalPlan, inputs: Tensors, outputs: Tensors
) -> tuple[Kernel, Arguments]:
    tensor = inputs[0]
    targets = [output.data_ptr() for output in outputs] or [0] * engine.size
    engine.context.set_table(at.TARGETS, targets)
    engine.context.set_table(at.TARGET_BYTES, [tensor.nbytes] * engine.size)
    return engine.kernels.gather, (plan.address, tensor.numel(), tensor.data_ptr())


def _reduce_scatter(
    engine: LocalEngine, plan: LocalPlan, inputs: Tensors, outputs: Tensors
) -> tuple[Kernel, Arguments]:
    lengths, output = [tensor.nbytes for tensor in inputs], outputs[0]
    engine.context.set_table(at.SOURCES, [tensor.data_ptr() for tensor in inputs])
    engine.context.set_table(at.SOURCE_BYTES, lengths)
    count = count_of(lengths, output.numel())
    longest = max(lengths) // plan.unit
    return engine.kernels.reduce_scatter, (plan.address, count, output.data_ptr(), longest)


def _reduce_scatter_tensor(
    engine: LocalEngine, plan: LocalPlan, inputs: Tensors, outputs: Tensors
) -> tuple[Kernel, Arguments]:
    output = outputs[0]
    arguments = (plan.address, output.numel(), inputs[0].data_ptr(), output.data_ptr())
    return engine.kernels.reduce_scatter_even, arguments


def _all_to_all(
    engine: LocalEngine, plan: LocalPlan, inputs: Tensors, outputs: Tensors
) -> tuple[Kernel, Arguments]:
    """Take one tensor for and from each rank, or one for all, of which each rank has an equal part."""
    if len(inputs) == 1 and inputs[0].nbytes == outputs[0].nbytes:
        length = inputs[0].numel() * plan.unit // engine.size
        arguments = (plan.address, length, inputs[0].data_ptr(), outputs[0].data_ptr())
        return engine.kernels.all_to_all_even, arguments
    return engine.exchanging(plan, _ranges(inputs), _ranges(outputs))


def _scatter(
    engine: LocalEngine, plan: LocalPlan, inputs: Tensors, outputs: Tensors
) -> tuple[Kernel, Arguments]:
    receives = [(0, 0)] * engine.size
    receives[plan.root] = (outputs[0].data_ptr(), outputs[0].nbytes)
    engine.exchanging(plan, _ranges(inputs) or [(0, 0)] * engine.size, receives)
    return engine.kernels.scatter, (plan.address, outputs[0].numel(), outputs[0].data_ptr())


def _scan(
    engine: LocalEngine, plan: LocalPlan, inputs: Tensors, outputs: Tensors
) -> tuple[Kernel, Arguments]:
    inclusive = int(plan.row.kind == Kind.scan)
    return engine.kernels.scan, (plan.address, inputs[0].numel(), inputs[0].data_ptr(), inclusive)


def _barrier(
    engine: LocalEngine, plan: LocalPlan, inputs: Tensors, outputs: Tensors
) -> tuple[Kernel, Arguments]:
    return engine.kernels.barrier, (plan.address, 0)


def _ranges(tensors: Tensors) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]


ALGORITHMS: dict[str, Algorithm] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "scan": _scan,
    "exscan": _scan,
    "barrier": _barrier,
}
"""By the ``algorithm`` of a row: how ranks that share an arena run it."""


class LocalEngine(Engine):
    """One rank's engine in a group whose ranks share an arena."""

    context: RankContext
    state: State

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.size, self.rank = context.size, context.rank
        self.mailbox = Mailbox(
            context.address,
            context.arena.address + context.arena.layout.channels,
            context.rank,
            context.size,
            context.name,
            kind_name=DTYPE_NAMES.__getitem__,
            rank_name=weak_rank_name(context.describe),
            peers_are_threads=current_thread_rank() is not None,
        )
        threads = isinstance(context.peers, PeerThreads)
        self.state = State(context=context.address, releases=int(threads))
        if threads:
            context.store_word(at.READER, at.BY_ADDRESS)
        self.kernels = Kernels(self.state)
        self.iovec = array("q")  # the tables of the last operation on several tensors
        self._context = context.address
        self.barrier_plan = LocalPlan(context.address, pack(Kind.barrier), 0, 0, -1)
        self._plans: dict[tuple[str, int, torch.dtype, str, int | None], LocalPlan] = {}
        self._waiter = MessageWaiter(context, 0.0)  # the last one: most calls want the same
        self.choices = context.arena.choices
        forget_in_children(self)

    def forget(self) -> None:
        """Run no kernel in a forked child, which has no place in the arena."""
        self.mailbox.forget()
        self.kernels.replace(partial(_refuse_in_child, self.context))
        self.context.store_word(at.OWN_TOKEN, 0)
        # An operation that the parent is in is not the child's to abort.
        self.context.store_word(at.RESUME, 0)

    @property
    def choices(self) -> Choices:
        """The thresholds between algorithms. All ranks of the group must have the same, or operations fail.

        Set between two operations only. InvalidArgumentError: a threshold is out of its bounds.
        """
        return self._choices

    @choices.setter
    def choices(self, choices: Choices) -> None:
        choices.check(self.context.arena.buffer_bytes)
        self._choices = choices
        self.context.store_word(at.THRESHOLDS, choices.digest << at.DIGEST_BIT)
        self.context.store_word(at.DIRECT, choices.direct)
        self.context.store_word(at.CHUNK, choices.chunk)
        self.context.store_word(at.SHARE, choices.share)
        self.context.store_word(at.PEER_CHUNK, choices.part(self.size))
        self.context.store_word(at.EAGER_BYTES, choices.eager)
        self.context.store_word(at.SINGLE_COPY, choices.single_copy)
        self.context.store_word(at.STREAM_ABOVE, choices.stream_above)

    def plan(
        self, row: Collective, dtype: torch.dtype, op: ReduceOp | None = None, root: int | None = None
    ) -> LocalPlan:
        key = (row.name, row.kind, dtype, "" if op is None else op.name, root)
        plan = self._plans.get(key)
        if plan is None:
            function = 0 if op is None else reduction(dtype, op)
            meta = pack(row.kind, dtype, op, root)
            plan = LocalPlan(self._context, meta, dtype.itemsize, function, -1 if root is None else root, row)
            self._plans[key] = plan
        return plan

    def collective(
        self,
        plan: LocalPlan,
        inputs: Tensors,
        outputs: Tensors,
        timeout_s: float,
        site: str | None = None,
    ) -> None:
        kernel, arguments = ALGORITHMS[plan.row.algorithm](self, plan, inputs, outputs)
        try:  # as call() does it, in one frame less
            if code := kernel(*arguments):
                self.context.finish(code, kernel, arguments, timeout_s, site)
        except BaseException as error:
            try:
                self.abandon_operation(error, (inputs, outputs))
            finally:
                if not self.state.off and self.is_unfinished:  # an interrupt in its first lines
                    self.abandon_operation(error, (inputs, outputs))
            raise

    def prepare(self, plan: LocalPlan, inputs: Tensors, outputs: Tensors) -> Prepared:
        kernel, arguments = ALGORITHMS[plan.row.algorithm](self, plan, inputs, outputs)
        name = next(name for name, each in vars(self.kernels).items() if each is kernel)
        return PreparedKernel(self, name, arguments, self.context.tables() if name in _WITH_TABLES else None)

    def call(self, kernel: Kernel, arguments: Arguments, timeout_s: float, site: str | None = None) -> None:
        """Call a kernel until it is done, on tensors that its caller keeps."""
        try:
            if code := kernel(*arguments):
                self.context.finish(code, kernel, arguments, timeout_s, site)
        except BaseException as error:
            try:
                self.abandon_operation(error)
            finally:
                if not self.state.off and self.is_unfinished:  # an interrupt in its first lines
                    self.abandon_operation(error)
            raise

    def exchanging(
        self, plan: LocalPlan, sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]]
    ) -> tuple[Kernel, Arguments]:
        """Return the kernel, and its arguments, that exchanges these ranges, (address, bytes), by rank."""
        context = self.context
        context.set_table(at.SOURCES, [address for address, _ in sends])
        context.set_table(at.SOURCE_BYTES, [length for _, length in sends])
        context.set_table(at.TARGETS, [address for address, _ in receives])
        context.set_table(at.TARGET_BYTES, [length for _, length in receives])
        return self.kernels.exchange, (plan.address, at.UNKNOWN)

    def barrier(self, timeout_s: float, site: str | None = None) -> None:
        self.call(self.kernels.barrier, (self.barrier_plan.address, 0), timeout_s, site)

    def agree(self, plan: LocalPlan, count: int, timeout_s: float, site: str | None = None) -> None:
        """Return when all ranks have called, with the same kind of operation and the same count."""
        self.call(self.kernels.barrier, (plan.address, count), timeout_s, site)

    def send(self, tensor: torch.Tensor, rank: int, tag: int, timeout_s: float) -> None:
        kind, waiter = DTYPE_CODE[tensor.dtype], self.waiter(timeout_s)
        self.mailbox.send(tensor.data_ptr(), tensor.nbytes, kind, rank, tag, waiter)

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int, timeout_s: float) -> int:
        kind, waiter = DTYPE_CODE[tensor.dtype], self.waiter(timeout_s)
        return self.mailbox.recv(tensor.data_ptr(), tensor.nbytes, kind, rank, tag, waiter)

    def begin_send(
        self, tensor: torch.Tensor, rank: int, tag: int, timeout_s: float, done: Callable[[Transfer], None]
    ) -> Transfer:
        kind, waiter = DTYPE_CODE[tensor.dtype], self.waiter(timeout_s)
        return self.mailbox.isend(tensor.data_ptr(), tensor.nbytes, kind, rank, tag, waiter, done)

    def begin_receive(
        self,
        tensor: torch.Tensor,
        rank: int | None,
        tag: int,
        timeout_s: float,
        done: Callable[[Transfer], None],
    ) -> Transfer:
        kind, waiter = DTYPE_CODE[tensor.dtype], self.waiter(timeout_s)
        return self.mailbox.irecv(tensor.data_ptr(), tensor.nbytes, kind, rank, tag, waiter, done)

    def complete(self, transfer: Transfer) -> int:
        return self.mailbox.wait(transfer)

    def check_messages(self) -> None:
        self.mailbox.check()

    def waiter(self, timeout_s: float) -> MessageWaiter:
        """Return the waiter for messages with this time-out."""
        waiter = self._waiter  # which another thread may replace
        if timeout_s != waiter.timeout_s:
            waiter = self._waiter = MessageWaiter(self.context, timeout_s)
        return waiter

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.context.heap.empty(shape, dtype)

    def is_in_heap(self, address: int) -> bool:
        return self.context.heap.offset_of(address) != at.NOT_SHARED

    def heap_of(self, rank: int) -> int | None:
        return bytes_of_heap(self.context.arena, rank, 0, 1).data_ptr()

    def shared(self, rank: int, offset: int, length: int) -> torch.Tensor:
        return bytes_of_heap(self.context.arena, rank, offset, length)

    def combine(self, target: torch.Tensor, sources: Tensors, op: ReduceOp) -> None:
        combine_tensors(target, sources, op)

    def scale(self, tensor: torch.Tensor, factor: float) -> None:
        scale(tensor.dtype, tensor.data_ptr(), factor, tensor.numel())

    def sequence_number(self) -> int:
        return self.context.load_word(at.SEQUENCE)

    def record_spans(self, step: int, spans: Sequence[SpanTimes]) -> None:
        for kind, began_ns, ended_ns, index, nbytes in spans:
            record_span(self.context.address, SPAN_KINDS.index(kind), began_ns, ended_ns, step, index, nbytes)

    def flight_record(self) -> FlightRecord:
        return read_flight_record(self.context.arena)

    @property
    def is_aborted(self) -> bool:
        return self.context.is_aborted

    def name_ranks(self, global_ranks: Sequence[int]) -> None:
        self.context.global_ranks = tuple(global_ranks)

    @property
    def is_unfinished(self) -> bool:
        """Return whether a kernel has begun the current operation, and not ended it."""
        return self.context.load_word(at.RESUME) != 0

    def abort(self, why: str, failed: Sequence[int] = ()) -> None:
        self.context.abort(why, failed=tuple(failed))

    def close(self) -> None:
        self.mailbox.close()
        self.context.leave()

    def abandon_operation(self, error: BaseException, tensors: Sequence[Tensors] = ()) -> None:
        """After an exception, an interrupt at any point too, refuse operations if this one has not ended."""
        if not self.is_unfinished:
            self.context.note_failure()
            return
        try:
            self.context.note_failure()
            self.context.abandon_operation(error)
        finally:
            shared_words.mark_aborted(self._context)  # another interrupt may have come before that
            # Not a method of this object, which would then hold itself, and the arena, once it is closed.
            self.kernels.replace(partial(_refuse, self.context))
            reclaim(self.context, error, tensors)


reduces = supports


def _refuse(context: RankContext, *arguments: int) -> int:
    """Stand in for every kernel once the group cannot be used."""
    raise context.aborted()


def _refuse_in_child(context: RankContext, *arguments: int) -> int:
    """Stand in for every kernel in a forked child."""
    raise refusal(f"group {context.name!r} of rank {context.group_rank} cannot be used")
