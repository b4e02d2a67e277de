"""The engine of a group whose ranks are on several hosts: an arena within each, a bridge between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from torchestra.engine.interface import Engine
from torchestra.engine.kernels.reductions import combine_tensors
from torchestra.engine.kernels.selection import spare_cores
from torchestra.engine.local import LocalEngine, count_of
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.multihost import broadcast_gather
from torchestra.engine.multihost.all_to_all import exchange
from torchestra.engine.multihost.hierarchy import Call, Hierarchy
from torchestra.engine.multihost.p2p_request import P2PRequest
from torchestra.engine.multihost.point_to_point import PointToPoint
from torchestra.engine.multihost.reduction import Reducer
from torchestra.engine.multihost.remote_records import merge_records
from torchestra.engine.operations import BARRIER, Collective, Kind, Shape, even_parts, pack
from torchestra.engine.p2p.transfer import Transfer
from torchestra.engine.recorder.flight_entries import SpanTimes
from torchestra.engine.recorder.flight_record import FlightRecord
from torchestra.engine.recorder.recorder import close_multihost_entry, open_multihost_entry
from torchestra.errors import CollectiveMismatchError
from torchestra.types import ReduceOp

_POLL_SECONDS, _LONGEST_WAIT = 0.0005, 0.02

Tensors = Sequence[torch.Tensor]


class HostsPlan(NamedTuple):
    """A collective on a dtype, prepared for the engine."""

    row: Collective
    meta: int
    dtype: torch.dtype
    op: ReduceOp | None
    root: int | None


class MultiHostEngine(Engine):
    """One rank's engine in a group on several hosts.

    Args:
        hierarchy: the steps within the host and between hosts.
        messages: sends and receives messages.
    """

    context: RankContext
    scale = LocalEngine.scale

    def __init__(self, hierarchy: Hierarchy, messages: PointToPoint) -> None:
        self.hierarchy: Hierarchy = hierarchy
        self.context = hierarchy.context
        self.hosts = hierarchy.hosts
        self.size = len(hierarchy.hosts.host_of)
        self.rank = hierarchy.rank
        self.mailbox = messages
        self.bridge_kind = messages.bridge_kind
        self._reducers: dict[tuple[torch.dtype, str], Reducer] = {}

    def plan(
        self, row: Collective, dtype: torch.dtype, op: ReduceOp | None = None, root: int | None = None
    ) -> HostsPlan:
        return HostsPlan(row, pack(row.kind, dtype, op, root), dtype, op, root)

    def collective(
        self, plan: HostsPlan, inputs: Tensors, outputs: Tensors, timeout_s: float, site: str | None = None
    ) -> None:
        count, lengths = _count(plan, inputs, outputs)
        nbytes = max(sum(tensor.nbytes for tensor in tensors) for tensors in (inputs, outputs))
        with self._call(plan, count, nbytes, timeout_s, site, lengths) as call:
            ALGORITHMS[plan.row.algorithm](self, plan, inputs, outputs, call)

    def barrier(self, timeout_s: float, site: str | None = None) -> None:
        self.collective(
            self.plan(BARRIER, torch.uint8)._replace(meta=pack(BARRIER.kind)), (), (), timeout_s, site
        )

    def send(self, tensor: torch.Tensor, rank: int, tag: int, timeout_s: float) -> None:
        self.mailbox.send(tensor, rank, tag, timeout_s)

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int, timeout_s: float) -> int:
        return self.mailbox.receive(tensor, rank, tag, timeout_s)

    def begin_send(
        self, tensor: torch.Tensor, rank: int, tag: int, timeout_s: float, done: Callable[[Transfer], None]
    ) -> Transfer | P2PRequest:
        return self.mailbox.begin_send(tensor, rank, tag, timeout_s, done)

    def begin_receive(
        self,
        tensor: torch.Tensor,
        rank: int | None,
        tag: int,
        timeout_s: float,
        done: Callable[[Transfer], None],
    ) -> Transfer | P2PRequest:
        return self.mailbox.begin_receive(tensor, rank, tag, timeout_s, done)

    def complete(self, transfer: Transfer | P2PRequest) -> int:
        return self.mailbox.wait(transfer)

    def check_messages(self) -> None:
        self.mailbox.check()

    @property
    def serves_puts(self) -> bool:
        return True

    def expose(self, window: int, tensor: torch.Tensor | None) -> None:
        self.mailbox.exposed.expose(window, tensor)

    def begin_put(
        self,
        tensor: torch.Tensor,
        rank: int,
        window: int,
        offset: int,
        timeout_s: float,
        done: Callable[[Transfer], None],
    ) -> P2PRequest:
        return self.mailbox.begin_put(tensor, rank, window, offset, timeout_s, done)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.hierarchy.local.empty(shape, dtype)

    def is_in_heap(self, address: int) -> bool:
        return self.hierarchy.local.is_in_heap(address)

    def heap_of(self, rank: int) -> int | None:
        hosts = self.hierarchy.hosts
        if hosts.host_at(rank) != hosts.host_at(self.rank):
            return None
        return self.hierarchy.local.heap_of(hosts.local_rank_of[rank])

    def shared(self, rank: int, offset: int, length: int) -> torch.Tensor:
        if self.heap_of(rank) is None:
            return super().shared(rank, offset, length)
        return self.hierarchy.local.shared(self.hierarchy.hosts.local_rank_of[rank], offset, length)

    def combine(self, target: torch.Tensor, sources: Tensors, op: ReduceOp) -> None:
        combine_tensors(target, sources, op)

    def sequence_number(self) -> int:
        return self.hierarchy.sequence

    def record_spans(self, step: int, spans: Sequence[SpanTimes]) -> None:
        self.hierarchy.local.record_spans(step, spans)

    def flight_record(self) -> FlightRecord:
        """Return the records of the ranks of all hosts; takes some seconds if a host does not answer."""
        hierarchy = self.hierarchy
        answers = {} if self.context.closed else hierarchy.detector.ask_what_they_did()
        return merge_records(hierarchy.local.flight_record(), hierarchy.host, answers, hierarchy.hosts)

    @property
    def is_aborted(self) -> bool:
        return self.context.is_aborted

    def name_ranks(self, global_ranks: Sequence[int]) -> None:
        self.context.global_ranks = tuple(global_ranks)

    def abort(self, why: str, failed: Sequence[int] = ()) -> None:
        self.context.abort(why, failed=tuple(failed))

    @property
    def operations_sent(self) -> int:
        return self.hierarchy.sent_off

    def await_sending(self, operations_sent: int) -> None:
        if spare_cores(len(self.hierarchy.here)):
            return
        until = time.monotonic() + _LONGEST_WAIT
        while self.hierarchy.sent_off == operations_sent and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        hierarchy = self.hierarchy
        self.mailbox.close()
        hierarchy.local.close()
        if hierarchy.bridge is not None:
            hierarchy.bridge.close()
        hierarchy.detector.leave()
        self.mailbox.transport.close()

    def reducer(self, plan: HostsPlan) -> Reducer:
        """Return the reducer for the plan's dtype and operation."""
        assert plan.op is not None
        key = (plan.dtype, plan.op.name)
        reducer = self._reducers.get(key)
        if reducer is None:
            reducer = self._reducers[key] = Reducer(self.hierarchy, plan.dtype, plan.op)
        return reducer

    @contextmanager
    def _call(
        self,
        plan: HostsPlan,
        count: int,
        nbytes: int,
        timeout_s: float,
        site: str | None,
        lengths: Sequence[int],
    ) -> Iterator[Call]:
        """Record an operation; abort the group if it ends halfway, as it cannot be undone."""
        lengths_text = ""
        if len(set(lengths)) > 1:
            lengths_text = f" of {[length // plan.dtype.itemsize for length in lengths]} elements by rank"
        call = Call(plan.meta, count, timeout_s, site, lengths_text)
        context = self.context.address
        well = False
        self.hierarchy.sequence += 1
        try:
            open_multihost_entry(context, self.hierarchy.sequence, plan.meta, count, nbytes)
            yield call
            well = True
        except CollectiveMismatchError:
            raise
        except BaseException as error:
            member = self.context
            if not member.is_aborted:
                who = self.hierarchy.hosts.describe(self.rank)
                member.abort(f"{who} left {call} with {type(error).__name__}: {error}")
            raise
        finally:
            close_multihost_entry(context, well)


def _count(plan: HostsPlan, inputs: Tensors, outputs: Tensors) -> tuple[int, Sequence[int]]:
    """Return the count that ranks compare, and by rank the bytes where these may differ."""
    row = plan.row
    if row.shape is Shape.OWN:
        many, one = (inputs, outputs[0]) if row.reduces else (outputs, inputs[0])
        lengths = [tensor.nbytes for tensor in many]
        return count_of(lengths, one.numel()), lengths
    if row.shape in (Shape.PAIRS, Shape.ROWS) or (row.root and row.input is not None and row.input.on_root):
        return -1, ()
    if row.shape is Shape.INPUT_IS_WHOLE:
        return outputs[0].numel(), ()
    if row.shape is Shape.OUTPUT_IS_WHOLE or (row.output is not None and row.output.on_root):
        return inputs[0].numel(), ()
    return sum(tensor.numel() for tensor in inputs), ()


def _all_reduce(
    engine: MultiHostEngine, plan: HostsPlan, inputs: Tensors, outputs: Tensors, call: Call
) -> None:
    keeps = plan.root is not None and plan.root != engine.rank
    targets = [torch.empty_like(tensor) for tensor in inputs] if keeps else inputs
    engine.reducer(plan).all_reduce(inputs, targets, call)


def _broadcast(
    engine: MultiHostEngine, plan: HostsPlan, inputs: Tensors, outputs: Tensors, call: Call
) -> None:
    assert plan.root is not None
    broadcast_gather.broadcast(engine.hierarchy, inputs[0], plan.root, call)


def _all_gather(
    engine: MultiHostEngine, plan: HostsPlan, inputs: Tensors, outputs: Tensors, call: Call
) -> None:
    broadcast_gather.all_gather(engine.hierarchy, outputs, inputs[0], call)


def _all_gather_into_tensor(
    engine: MultiHostEngine, plan: HostsPlan, inputs: Tensors, outputs: Tensors, call: Call
) -> None:
    broadcast_gather.all_gather(
        engine.hierarchy, _pieces(outputs[0], inputs[0], engine.size), inputs[0], call
    )


def _pieces(whole: torch.Tensor, piece: torch.Tensor, size: int) -> Tensors:
    return whole.view(-1).split(piece.numel()) if piece.numel() else [piece] * size


def _reduce_scatter(
    engine: MultiHostEngine, plan: HostsPlan, inputs: Tensors, outputs: Tensors, call: Call
) -> None:
    engine.reducer(plan).reduce_scatter(outputs[0], inputs, call)


def _reduce_scatter_tensor(
    engine: MultiHostEngine, plan: HostsPlan, inputs: Tensors, outputs: Tensors, call: Call
) -> None:
    engine.reducer(plan).reduce_scatter(outputs[0], _pieces(inputs[0], outputs[0], engine.size), call)


def _exchange(
    engine: MultiHostEngine, plan: HostsPlan, inputs: Tensors, outputs: Tensors, call: Call
) -> None:
    """Send to and receive from each rank a tensor: all_to_all, and gather and scatter with one rank alone."""
    sends, receives = ([(each.data_ptr(), each.nbytes) for each in tensors] for tensors in (inputs, outputs))
    row, size = plan.row, engine.size
    if row.shape is Shape.ROWS and len(inputs) == 1:
        sends, receives = (even_parts(ranges[0], size) for ranges in (sends, receives))
    if plan.root is not None:
        one = sends if row.output is not None and row.output.on_root else receives
        alone = [(0, 0)] * size
        alone[plan.root] = one[0]
        if one is sends:
            sends, receives = alone, receives or [(0, 0)] * size
        else:
            sends, receives = sends or [(0, 0)] * size, alone
    exchange(engine.hierarchy, sends, receives, call)


def _scan(engine: MultiHostEngine, plan: HostsPlan, inputs: Tensors, outputs: Tensors, call: Call) -> None:
    """Gather the tensors of all ranks, and reduce those of the ranks up to this one."""
    assert plan.op is not None
    tensor, count = inputs[0], engine.rank + (plan.row.kind == Kind.scan)
    everybodys = tensor.new_empty((engine.size, tensor.numel()))
    broadcast_gather.all_gather(engine.hierarchy, list(everybodys), tensor, call)
    if count:
        engine.combine(tensor, list(everybodys[:count]), plan.op)


def _barrier(engine: MultiHostEngine, plan: HostsPlan, inputs: Tensors, outputs: Tensors, call: Call) -> None:
    engine.hierarchy.agree(call)


Algorithm = Callable[[MultiHostEngine, HostsPlan, Tensors, Tensors, Call], None]

ALGORITHMS: dict[str, Algorithm] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _exchange,
    "scatter": _exchange,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _exchange,
    "scan": _scan,
    "exscan": _scan,
    "barrier": _barrier,
}
"""By the ``algorithm`` of a row: how ranks on several hosts run it."""
