"""The engine of a group whose ranks are on several hosts: what :class:`LocalEngine` offers, in two levels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from torchestra.engine.local import LocalEngine, _uneven
from torchestra.engine.multihost import broadcast_gather
from torchestra.engine.multihost.all_to_all import Ranges, exchange
from torchestra.engine.multihost.hierarchy import Call, Hierarchy
from torchestra.engine.multihost.p2p_request import P2PRequest
from torchestra.engine.multihost.point_to_point import Messages
from torchestra.engine.multihost.reduction import Reducer
from torchestra.engine.multihost.remote_records import put_together
from torchestra.engine.operations import Kind, pack
from torchestra.engine.p2p import Transfer
from torchestra.engine.recorder.flight_record import FlightRecord
from torchestra.engine.recorder.recorder import close_multihost_entry, open_multihost_entry
from torchestra.errors import CollectiveMismatchError
from torchestra.types import ReduceOp

__all__ = ["MultiHostEngine"]


class HostsPlan(NamedTuple):
    """What the engine needs to know of a kind of operation on a dtype.

    Attributes:
        meta: the fingerprint's.
        dtype, op, root: of the operation.
    """

    meta: int
    dtype: torch.dtype
    op: ReduceOp | None
    root: int | None


class MultiHostEngine:
    """One rank's engine in a group on several hosts. Its methods are those of :class:`LocalEngine`.

    Args:
        hierarchy: the means to cross.
        messages: what sends and receives messages.
    """

    combine = staticmethod(LocalEngine.combine)
    scale = staticmethod(LocalEngine.scale)
    kind_of_message = staticmethod(LocalEngine.kind_of_message)
    reduces = staticmethod(LocalEngine.reduces)
    moves = staticmethod(LocalEngine.moves)

    def __init__(self, hierarchy: Hierarchy, messages: Messages) -> None:
        self.hierarchy = hierarchy
        self.member = hierarchy.member
        self.size = len(hierarchy.hosts.host_of)
        self.rank = hierarchy.rank
        self.mailbox = messages
        self._reducers: dict[tuple[torch.dtype, str], Reducer] = {}

    def plan(
        self, kind: Kind, dtype: torch.dtype, op: ReduceOp | None = None, root: int | None = None
    ) -> HostsPlan:
        """What the engine needs to know of an operation on a dtype."""
        return HostsPlan(pack(kind, dtype, op, root), dtype, op, root)

    def all_reduce(
        self, tensor: torch.Tensor, plan: HostsPlan, seconds: float, site: str | None = None
    ) -> None:
        """Replace the tensor by the reduction of all ranks' tensors (or the root's, by the plan)."""
        keeps = plan.root is not None and plan.root != self.rank
        with self._call(plan, tensor.numel(), tensor.nbytes, seconds, site) as call:
            target = torch.empty_like(tensor) if keeps else tensor
            self._reducer(plan).all_reduce([tensor], [target], call)

    def all_reduce_iovec(
        self, tensors: Sequence[torch.Tensor], plan: HostsPlan, seconds: float, site: str | None = None
    ) -> None:
        """:meth:`all_reduce` of several tensors as if they were one: their elements, one after the other."""
        count = sum(tensor.numel() for tensor in tensors)
        with self._call(plan, count, sum(tensor.nbytes for tensor in tensors), seconds, site) as call:
            self._reducer(plan).all_reduce(tensors, tensors, call)

    def broadcast(
        self, tensor: torch.Tensor, plan: HostsPlan, seconds: float, site: str | None = None
    ) -> None:
        """Replace every rank's tensor by the root's."""
        assert plan.root is not None
        with self._call(plan, tensor.numel(), tensor.nbytes, seconds, site) as call:
            broadcast_gather.broadcast(self.hierarchy, tensor, plan.root, call)

    def all_gather_flat(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        plan: HostsPlan,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Put every rank's tensor, one after the other, into the output."""
        with self._call(plan, tensor.numel(), output.nbytes, seconds, site) as call:
            outputs = output.view(-1).split(tensor.numel()) if tensor.numel() else [output] * self.size
            broadcast_gather.all_gather(self.hierarchy, outputs, tensor, call)

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        plan: HostsPlan,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Put every rank's tensor into an output of its own; sizes may differ between ranks."""
        lengths = [output.nbytes for output in outputs]
        with self._call(plan, tensor.numel(), sum(lengths), seconds, site, lengths) as call:
            broadcast_gather.all_gather(self.hierarchy, outputs, tensor, call)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        plan: HostsPlan,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Put every rank's tensor into an output of the root; ``outputs`` is None on the others."""
        assert plan.root is not None
        sends = [(0, 0)] * self.size
        sends[plan.root] = (tensor.data_ptr(), tensor.nbytes)
        receives = [(0, 0)] * self.size
        if outputs is not None:
            receives = [(output.data_ptr(), output.nbytes) for output in outputs]
        with self._call(
            plan, tensor.numel(), max(tensor.nbytes, sum(nbytes for _, nbytes in receives)), seconds, site
        ) as call:
            exchange(self.hierarchy, sends, receives, call)

    def reduce_scatter_flat(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        plan: HostsPlan,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Reduce the tensors of all ranks, and give each rank its piece of the result."""
        with self._call(plan, output.numel(), tensor.nbytes, seconds, site) as call:
            pieces = tensor.view(-1).split(output.numel()) if output.numel() else [output] * self.size
            self._reducer(plan).reduce_scatter(output, pieces, call)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        plan: HostsPlan,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Reduce, for each rank, the tensors that all ranks have for it; sizes may differ between them."""
        lengths = [tensor.nbytes for tensor in tensors]
        with self._call(plan, output.numel(), sum(lengths), seconds, site, lengths) as call:
            self._reducer(plan).reduce_scatter(output, tensors, call)

    def all_to_all_flat(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        plan: HostsPlan,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Send piece p of the tensor to rank p, and receive its piece for this rank; all equally long."""
        length = tensor.nbytes // self.size
        sends = [(tensor.data_ptr() + length * rank, length) for rank in range(self.size)]
        receives = [(output.data_ptr() + length * rank, length) for rank in range(self.size)]
        self.exchange(plan, sends, receives, seconds, site)

    def exchange(
        self, plan: HostsPlan, sends: Ranges, receives: Ranges, seconds: float, site: str | None = None
    ) -> None:
        """Send to and receive from each rank what (address, bytes) say: all_to_all and scatter."""
        with self._call(
            plan, -1, max(sum(nbytes for _, nbytes in ranges) for ranges in (sends, receives)), seconds, site
        ) as call:
            exchange(self.hierarchy, sends, receives, call)

    def barrier(self, seconds: float, site: str | None = None) -> None:
        """Return when all ranks have called."""
        plan = HostsPlan(pack(Kind.barrier), torch.uint8, None, None)
        with self._call(plan, 0, 0, seconds, site) as call:
            self.hierarchy.agree(call)

    def send(self, tensor: torch.Tensor, rank: int, tag: int, seconds: float) -> None:
        """Send a message; the tensor may be changed afterwards, though the message may not have arrived."""
        self.mailbox.send(tensor, rank, tag, seconds)

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int, seconds: float) -> int:
        """Receive a message from a rank, or from any; the rank that sent it."""
        return self.mailbox.receive(tensor, rank, tag, seconds)

    def begin_send(
        self, tensor: torch.Tensor, rank: int, tag: int, seconds: float, done: Callable[[Transfer], None]
    ) -> Transfer | P2PRequest:
        """:meth:`send` in the background; ``done`` is called at its end and keeps the tensor alive."""
        return self.mailbox.begin_send(tensor, rank, tag, seconds, done)

    def begin_receive(
        self,
        tensor: torch.Tensor,
        rank: int | None,
        tag: int,
        seconds: float,
        done: Callable[[Transfer], None],
    ) -> Transfer | P2PRequest:
        """:meth:`receive` in the background; ``done`` is called at its end and keeps the tensor alive."""
        return self.mailbox.begin_receive(tensor, rank, tag, seconds, done)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in the arena of this host."""
        return self.hierarchy.local.empty(shape, dtype)

    def sequence_number(self) -> int:
        """How many operations this rank has begun."""
        return self.hierarchy.sequence

    def flight_record(self) -> FlightRecord:
        """What the ranks of all hosts did last; takes some seconds if a host does not answer."""
        hierarchy = self.hierarchy
        answers = {} if self.member.closed else hierarchy.detector.ask_what_they_did()
        return put_together(hierarchy.local.flight_record(), hierarchy.host, answers, hierarchy.hosts)

    def close(self) -> None:
        """Leave the group. Peers that wait for this rank get an error."""
        hierarchy = self.hierarchy
        self.mailbox.close()
        hierarchy.local.close()
        if hierarchy.bridge is not None:
            hierarchy.bridge.close()
        hierarchy.detector.leave()

    def _reducer(self, plan: HostsPlan) -> Reducer:
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
        seconds: float,
        site: str | None,
        lengths: Sequence[int] = (),
    ) -> Iterator[Call]:
        """An operation, recorded; one that is left halfway cannot be taken back, so the group is aborted."""
        told = ""
        if len(set(lengths)) > 1:
            count = _uneven(lengths)
            told = f" of {[length // plan.dtype.itemsize for length in lengths]} elements by rank"
        call = Call(plan.meta, count, seconds, site, told)
        context = self.member.address
        well = False
        self.hierarchy.sequence += 1
        try:
            open_multihost_entry(context, self.hierarchy.sequence, plan.meta, count, nbytes)
            yield call
            well = True
        except CollectiveMismatchError:
            raise
        except BaseException as error:
            member = self.member
            if not member.is_aborted:
                who = self.hierarchy.hosts.describe(self.rank)
                member.abort(f"{who} left {call} with {type(error).__name__}: {error}")
            raise
        finally:
            close_multihost_entry(context, well)
