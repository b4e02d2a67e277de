"""The operations of a group on tensors, as one rank calls them: checks, then the queue, then the engine.

Ranks are the group's own. Every collective goes one of two ways:

* by an *entry*, a builtin function that replaces the method and serves plain calls if the engine has kernels
  (entries.py);
* the general way, :meth:`Communicator.collective`: the arguments are checked by the operation's row of the
  table (engine/operations.py, tensors/arguments.py), the queue decides when it runs (queue.py), and the
  engine runs it. Tensors that are not contiguous are copied before and back after (tensors/contiguity.py).
  Tensors on GPUs are copied through the host (host_staging.py), unless a communicator of their own serves
  them (device_routing.py); sparse tensors are summed in tensors/sparse.py.

Blocking messages have entries, too; otherwise messages are in point_to_point.py, and operations on several
tensors of each rank in multi_tensor.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchestra.communicator import point_to_point
from torchestra.communicator.comm_debug import count_collective, modes_on
from torchestra.communicator.device_routing import Delegation, any_device
from torchestra.communicator.entries import Entries
from torchestra.communicator.host_staging import on_cpu
from torchestra.communicator.queue import OperationQueue
from torchestra.communicator.work import Work
from torchestra.engine.hosts import Hosts
from torchestra.engine.interface import Engine
from torchestra.engine.operations import (
    ALL_GATHER,
    ALL_GATHER_INTO_TENSOR,
    ALL_REDUCE,
    ALL_REDUCE_LIST,
    ALL_TO_ALL,
    ALL_TO_ALL_SINGLE,
    BARRIER,
    BROADCAST,
    EXSCAN,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_TENSOR,
    SCAN,
    SCATTER,
    Collective,
)
from torchestra.system.forking import forget_in_children
from torchestra.tensors import checks, sparse
from torchestra.tensors.arguments import Call, check_call, check_in_place_list, pieces
from torchestra.tensors.contiguity import make_contiguous, write_back
from torchestra.tensors.override import OverriddenError
from torchestra.types import ReduceOp

_NO_SPLITS = (None, None)
_ONE_HOST = Hosts([[0]], [""])


class Communicator:
    """Run a group's operations on one rank. Every collective is to be called by all ranks, in the same order.

    Args:
        engine: runs the operations.
        name: of the group.
        timeout_s: how long an operation may wait for other ranks, if it has no time-out of its own.
        queue: the queue that orders the operations; default: one in the order of the program.

    Attributes:
        has_met: whether the ranks of the group have met.
        delegation: serves tensors of devices; None if these go through the host.
        messages: sends and receives tensors of the device that this communicator is for; else None.
    """

    has_met = True

    def __init__(
        self, engine: Engine, name: str, timeout_s: float, queue: OperationQueue | None = None
    ) -> None:
        self.engine = engine
        self.rank = engine.rank
        self.size = engine.size
        self.timeout_s = timeout_s
        self.queue = OperationQueue(engine, name) if queue is None else queue
        self.delegation: Delegation | None = None
        self.messages: point_to_point.Messages | None = None
        # As in the queue; read by persistent operations.
        self.lock, self.thread = self.queue.lock, self.queue.thread
        self.entries = Entries(self)
        forget_in_children(self)

    def forget(self) -> None:
        """Refuse everything: this is a forked child, which is not part of the group."""
        self.queue.forget()
        self.lock, self.thread = self.queue.lock, self.queue.thread
        self.delegation = None
        self.entries.close()

    @property
    def uses_device(self) -> bool:
        """Return whether operations have been run on a device; a barrier waits for those."""
        return bool(self.queue.state.uses_device)

    @uses_device.setter
    def uses_device(self, uses: bool) -> None:
        self.queue.state.uses_device = int(uses)

    @property
    def name(self) -> str:
        """The name of the group."""
        return self.queue.name

    @name.setter
    def name(self, name: str) -> None:
        self.queue.name = name

    def met(self) -> Communicator:
        """Return this communicator: its ranks have met."""
        return self

    @property
    def closed(self) -> bool:
        """Return whether this rank has left the group."""
        return self.queue.closed

    def limit(self, timeout_s: float | None) -> float:
        """Return how long an operation may wait, in seconds, by its own time-out if it has one."""
        return self.timeout_s if timeout_s is None else timeout_s

    def hosts_among(self, ranks: Sequence[int]) -> Hosts:
        """Return where some ranks of the group are; any one host will do if they are all on one."""
        return _ONE_HOST if self.engine.hosts is None else self.engine.hosts.among(ranks)

    # -- collectives

    @any_device
    def collective(
        self,
        row: Collective,
        output: Any = None,
        input: Any = None,  # noqa: A002 - the row's word
        op: ReduceOp | None = None,
        root: int | None = None,
        splits: tuple[Any, Any] = _NO_SPLITS,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Run any collective of the table.

        Args:
            row: the collective.
            output, input: the tensors that it fills and reads: one tensor, or a list with one for each rank.
                For an operation in place both are the same; None if only the root has them, or no rank.
            splits: the split sizes of output and input.
            async_op: return the operation's Work at once; else None is returned when it is done.
            timeout_s: how long it may wait for other ranks; default: the group's time-out.

        Raises:
            InvalidArgumentError: an argument is wrong; nothing was sent, and the group stays usable.
        """
        engine = self.engine
        if engine.delegates:
            self.queue.refuse_if_closed(row.name)
            return engine.delegate(  # type: ignore[no-any-return]
                row, output, input, op, root, splits, async_op, self.limit(timeout_s)
            )
        try:
            call = check_call(row, output, input, op, root, splits, self.rank, self.size, not engine.is_fake)
        except OverriddenError as overridden:
            handler, given = overridden.handler, (output, input, op, root, splits, async_op, timeout_s)
        else:
            work = self._run(row, call, op, root, async_op, timeout_s)
            if modes_on():
                count_collective(row.name)
            return work
        return handler(self, row, *given)  # type: ignore[no-any-return]

    def _run(
        self,
        row: Collective,
        call: Call,
        op: ReduceOp | None,
        root: int | None,
        async_op: bool,
        timeout_s: float | None,
        description: str = "",
    ) -> Work | None:
        """Run a call that has been checked, in the queue's order."""
        if self.queue.closed:
            self.queue.refuse_if_closed(row.name)
        engine = self.engine
        plan = engine.plan(row, call.dtype, op, root)
        writes = row.fills(root, self.rank)

        def operation(site: str | None) -> list[Any]:
            limit = self.timeout_s if timeout_s is None else timeout_s
            if engine.is_fake:
                inputs, outputs = pieces(call, call.inputs, call.outputs)
                engine.collective(plan, inputs, outputs, limit, site)
                return call.result
            if op is None or op.factor is None:
                inputs = [*map(make_contiguous, call.inputs)]
            else:
                inputs = [self._scaled(tensor, op.factor) for tensor in call.inputs]
            outputs = inputs if row.in_place else [*map(make_contiguous, call.outputs)]
            if call.splits is None:
                engine.collective(plan, inputs, outputs, limit, site)
            else:
                engine.collective(plan, *pieces(call, inputs, outputs), limit, site)
            if writes:
                write_back(call.outputs, outputs)
            return call.result

        name = f"{row.name}({op.name}{description})" if op is not None else row.name
        return self.queue.run(operation, name, async_op, reads=call.inputs or call.outputs)

    def _scaled(self, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        """Return a copy of the tensor, in contiguous memory, multiplied by a factor."""
        scaled = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())
        self.engine.scale(scaled, factor)
        return scaled

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp, async_op: bool = False, timeout_s: float | None = None
    ) -> Work | None:
        """Replace the tensor by the reduction of all ranks' tensors."""
        if getattr(tensor, "layout", None) is torch.sparse_coo:
            return self.all_reduce_sparse([tensor], op, async_op, timeout_s)
        return self.collective(ALL_REDUCE, tensor, tensor, op, async_op=async_op, timeout_s=timeout_s)

    @any_device
    def all_reduce_list(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Do :meth:`all_reduce` of each of some tensors of one dtype, as one operation; nothing is packed.

        The ranks' lists must have equally many elements in total; the tensors' sizes are not compared.
        """
        if self.engine.delegates:
            return self.engine.delegate(  # type: ignore[no-any-return]
                ALL_REDUCE_LIST, list(tensors), None, op, None, _NO_SPLITS, async_op, self.limit(timeout_s)
            )
        call = check_in_place_list(ALL_REDUCE, tensors, op, real=not self.engine.is_fake)
        work = self._run(ALL_REDUCE, call, op, None, async_op, timeout_s, f", {len(tensors)} tensors")
        if modes_on():
            count_collective(ALL_REDUCE.name)
        return work

    def all_reduce_sparse(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Replace each of some sparse COO tensors by the sum of all of them on all ranks (only SUM)."""
        engine, name = self.engine, "all_reduce"
        if engine.delegates:
            return engine.delegate(  # type: ignore[no-any-return]
                ALL_REDUCE, list(tensors), None, op, None, _NO_SPLITS, async_op, self.limit(timeout_s)
            )
        checked = sparse.check(on_cpu(tensors), checks.check_op(op, name), name)
        self.queue.refuse_if_closed(name)

        def operation(site: str | None) -> list[torch.Tensor]:
            if not engine.is_fake:
                sparse.all_reduce(engine, checked, self.limit(timeout_s), site)
            with torch.no_grad():
                for tensor, written in zip(tensors, checked, strict=True):
                    if tensor is not written:
                        tensor.copy_(written)  # not its detach(), which would get entries of its own
            return list(tensors)

        description = f"{name}({op.name}, sparse)"
        work = self.queue.run(operation, description, async_op, sparse.OPERATIONS, tensors)
        if modes_on():
            count_collective(name)
        return work

    def reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        root: int,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Replace the root's tensor by the reduction of all ranks' tensors."""
        return self.collective(REDUCE, tensor, tensor, op, root, async_op=async_op, timeout_s=timeout_s)

    def broadcast(
        self, tensor: torch.Tensor, root: int, async_op: bool = False, timeout_s: float | None = None
    ) -> Work | None:
        """Replace every rank's tensor by the root's."""
        return self.collective(BROADCAST, tensor, tensor, root=root, async_op=async_op, timeout_s=timeout_s)

    def all_gather(
        self, outputs: Any, tensor: torch.Tensor, async_op: bool = False, timeout_s: float | None = None
    ) -> Work | None:
        """Put every rank's tensor into one of the outputs, a list."""
        return self.collective(ALL_GATHER, outputs, tensor, async_op=async_op, timeout_s=timeout_s)

    def all_gather_into_tensor(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Put every rank's tensor into the output, one after the other."""
        return self.collective(ALL_GATHER_INTO_TENSOR, output, tensor, async_op=async_op, timeout_s=timeout_s)

    def gather(
        self,
        outputs: Any,
        tensor: torch.Tensor,
        root: int,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Put every rank's tensor into one of the root's outputs, a list; None on the other ranks."""
        return self.collective(GATHER, outputs, tensor, None, root, async_op=async_op, timeout_s=timeout_s)

    def scatter(
        self,
        output: torch.Tensor,
        tensors: Any,
        root: int,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Put one of the root's tensors, a list, into each rank's output; None on the other ranks."""
        return self.collective(SCATTER, output, tensors, None, root, async_op=async_op, timeout_s=timeout_s)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensors: Any,
        op: ReduceOp,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Reduce into this rank's output the tensors for it, one in the list of each rank."""
        return self.collective(REDUCE_SCATTER, output, tensors, op, async_op=async_op, timeout_s=timeout_s)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: ReduceOp,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Reduce the ranks' tensors, and put this rank's piece of the result into its output."""
        return self.collective(
            REDUCE_SCATTER_TENSOR, output, tensor, op, async_op=async_op, timeout_s=timeout_s
        )

    def all_to_all(
        self, outputs: Any, tensors: Any, async_op: bool = False, timeout_s: float | None = None
    ) -> Work | None:
        """Send each rank one tensor of a list, and receive one from each into those of another."""
        return self.collective(ALL_TO_ALL, outputs, tensors, async_op=async_op, timeout_s=timeout_s)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Send each rank a range of rows, and receive one from each; splits count rows, None means equal."""
        splits = (output_splits, input_splits)
        return self.collective(
            ALL_TO_ALL_SINGLE, output, tensor, splits=splits, async_op=async_op, timeout_s=timeout_s
        )

    def scan(
        self, tensor: torch.Tensor, op: ReduceOp, async_op: bool = False, timeout_s: float | None = None
    ) -> Work | None:
        """Replace the tensor by the reduction of the tensors of the ranks up to this one."""
        return self.collective(SCAN, tensor, tensor, op, async_op=async_op, timeout_s=timeout_s)

    def exscan(
        self, tensor: torch.Tensor, op: ReduceOp, async_op: bool = False, timeout_s: float | None = None
    ) -> Work | None:
        """Replace the tensor by the reduction of the tensors of the ranks before this one; rank 0's stays."""
        return self.collective(EXSCAN, tensor, tensor, op, async_op=async_op, timeout_s=timeout_s)

    def barrier(self, async_op: bool = False, timeout_s: float | None = None) -> Work | None:
        """Return (or complete) when every rank has called this and finished its earlier operations."""
        engine, delegation = self.engine, self.delegation
        if engine.delegates:
            return self.collective(BARRIER, async_op=async_op, timeout_s=timeout_s)

        def operation(site: str | None) -> list[torch.Tensor]:
            if delegation is not None and self.uses_device:
                delegation.finish()
            engine.barrier(self.limit(timeout_s), site)
            return []

        return self.queue.run(operation, "barrier", async_op)

    # -- messages: only the two ranks take part

    def send(self, tensor: torch.Tensor, rank: int, tag: int = 0, timeout_s: float | None = None) -> None:
        """Send a message to a rank; return when the tensor may be changed."""
        point_to_point.send(self, tensor, rank, tag, timeout_s)

    def recv(
        self, tensor: torch.Tensor, rank: int | None, tag: int = 0, timeout_s: float | None = None
    ) -> int:
        """Receive a message from a rank, or from any (None), into the tensor; return the sender's rank."""
        return point_to_point.recv(self, tensor, rank, tag, timeout_s)

    def isend(self, tensor: torch.Tensor, rank: int, tag: int = 0, timeout_s: float | None = None) -> Work:
        """Begin to send a message to a rank."""
        return point_to_point.isend(self, tensor, rank, tag, timeout_s)

    def irecv(
        self, tensor: torch.Tensor, rank: int | None, tag: int = 0, timeout_s: float | None = None
    ) -> Work:
        """Begin to receive a message from a rank, or from any (None), into the tensor."""
        return point_to_point.irecv(self, tensor, rank, tag, timeout_s)

    # -- the group

    def drain(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for queued operations, and have messages see an abort now."""
        if self.delegation is not None:
            self.delegation.drain(timeout_s)
        self.queue.end_all(timeout_s)
        self.engine.check_messages()

    def abort(self, why: str, failed: Sequence[int] = ()) -> None:
        """Have operations of the group, under way on any rank or called later, fail at once.

        Args:
            why: the reason, which the errors state.
            failed: the ranks that have died, if that is the reason.
        """
        self.queue.refuse_if_inherited("abort")
        self.engine.abort(why, failed)

    def close(self) -> None:
        """Run the queued operations, then leave the group."""
        self.entries.close()
        if self.delegation is not None:
            self.delegation.close()
        self.queue.close()
