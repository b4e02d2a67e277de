"""The collectives among ranks of one host: arguments of a tensor operation become those of a kernel.

Every method takes contiguous CPU tensors that have been checked, returns when the operation is done, and
raises what :meth:`RankContext.finish` raises. ``seconds`` is how long it may wait for the other ranks,
``site`` the calling line where that is not on the thread's stack (asynchronous operations).

The methods of small operations are on the critical path: a call of a compiled kernel costs 0.15 µs, a
question to a tensor 0.04 µs, a Python call 0.06 µs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from torchestra.engine import layout as at
from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.kernels import move, reduce
from torchestra.engine.kernels.reductions import combine, reduction, scale, supports
from torchestra.engine.kernels.selection import Choices
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.native.compilation import Kernel, entry_point
from torchestra.engine.operations import DTYPE_NAMES, UNEVEN, Kind, pack
from torchestra.engine.p2p import Mailbox, Transfer
from torchestra.engine.reclaiming import reclaim
from torchestra.engine.recorder.flight_record import FlightRecord, read_flight_record
from torchestra.system.deadline import Deadline
from torchestra.system.forking import forget_in_children, refusal
from torchestra.types import ReduceOp


class Plan:
    """What the kernels need to know of a kind of operation on a dtype, in words that they read (layout.py).

    Attributes:
        address: of those words.
        unit: bytes per element.
    """

    __slots__ = ("_words", "address", "unit")

    def __init__(self, context: int, meta: int, unit: int, function: int, root: int) -> None:
        self._words: npt.NDArray[np.int64] = np.array([context, meta, unit, function, root], dtype=np.int64)
        self.address: int = self._words.ctypes.data
        self.unit = unit


def _uneven(lengths: Sequence[int]) -> int:
    """A count for lengths that differ between the ranks: all must mean the same ones."""
    return UNEVEN | (hash(tuple(lengths)) & (UNEVEN - 1))


class MessageWaiter:
    """How long messages may wait, for the mailbox."""

    __slots__ = ("_member", "timeout_s")

    def __init__(self, member: RankContext, timeout_s: float) -> None:
        self._member = member
        self.timeout_s = timeout_s

    def check(self, doing: str, blocked: int | None, deadline: Deadline, suspect: int | None) -> int | None:
        """Return and raise what :meth:`RankContext.check` does; a time-out leaves the group usable."""
        return self._member.check(doing, blocked, deadline, suspect, alone=True)

    def abort(self, reason: str) -> None:
        """A message was left halfway."""
        self._member.abort(reason)


class LocalEngine:
    """One rank's engine in a group whose ranks share an arena."""

    def __init__(self, member: RankContext) -> None:
        self.member = member
        self.size = member.size
        self.rank = member.rank
        self.mailbox = Mailbox(
            member.address,
            member.arena.address + member.arena.layout.channels,
            member.rank,
            member.size,
            member.name,
            kind_name=DTYPE_NAMES.__getitem__,
        )
        self._context = member.address
        self.all_reduce_kernel = entry_point(reduce.all_reduce)
        self._all_reduce_iovec = entry_point(reduce.all_reduce_iovec)
        self._reduce_scatter = entry_point(reduce.reduce_scatter)
        self._reduce_scatter_even = entry_point(reduce.reduce_scatter_even)
        self._barrier = entry_point(move.barrier)
        self._broadcast = entry_point(move.broadcast)
        self._share = entry_point(move.share)
        self._all_gather = entry_point(move.all_gather)
        self._exchange = entry_point(move.exchange)
        self._all_to_all_even = entry_point(move.all_to_all_even)
        self._barrier_plan = Plan(member.address, pack(Kind.barrier), 0, 0, -1)
        self._plans: dict[tuple[Kind, torch.dtype, str, int | None], Plan] = {}
        self._waiter = MessageWaiter(member, 0.0)  # the last one: most calls want the same
        self.choices = Choices.for_group(member.size, member.arena.layout.slot_bytes)
        forget_in_children(self)

    def forget(self) -> None:
        """In a forked child, which has no place in the arena: run no kernel."""
        self.mailbox.forget()
        self._replace_kernels(partial(_refuse_in_child, self.member))
        self.member.set_word(at.RESUME, 0)  # an operation that the parent is in is not the child's to abort

    @property
    def choices(self) -> Choices:
        """The thresholds between algorithms. All ranks of the group must have the same, or operations fail.

        Set between two operations only. InvalidArgumentError: a threshold is out of its bounds.
        """
        return self._choices

    @choices.setter
    def choices(self, choices: Choices) -> None:
        layout = self.member.arena.layout
        choices.check(min(layout.slot_bytes, layout.chunk_buffer_bytes))
        self._choices = choices
        self.member.set_word(at.THRESHOLDS, choices.digest << at.DIGEST_BIT)
        self.member.set_word(at.DIRECT, choices.direct)
        self.member.set_word(at.CHUNK, choices.chunk)
        self.member.set_word(at.SHARE, choices.share)
        self.member.set_word(at.PEER_CHUNK, choices.part(self.size))
        self.member.set_word(at.STREAM_ABOVE, choices.stream_above)

    def plan(
        self, kind: Kind, dtype: torch.dtype, op: ReduceOp | None = None, root: int | None = None
    ) -> Plan:
        """What the kernels need to know of an operation on a dtype; remembered."""
        key = (kind, dtype, "" if op is None else op.name, root)
        plan = self._plans.get(key)
        if plan is None:
            function = 0 if op is None else reduction(dtype, op)
            meta = pack(kind, dtype, op, root)
            plan = Plan(self._context, meta, dtype.itemsize, function, -1 if root is None else root)
            self._plans[key] = plan
        return plan

    def all_reduce(self, tensor: torch.Tensor, plan: Plan, seconds: float, site: str | None = None) -> None:
        """Replace the tensor by the reduction of all ranks' tensors (or the root's, by the plan)."""
        try:
            count, address = tensor.numel(), tensor.data_ptr()
            if code := self.all_reduce_kernel(plan.address, count, address):
                self.finish_all_reduce(code, plan, count, address, seconds, site)
        except BaseException as error:
            self.leave_halfway(error)
            raise

    def finish_all_reduce(
        self, code: int, plan: Plan, count: int, address: int, seconds: float, site: str | None = None
    ) -> None:
        """Bring an all_reduce to its end whose kernel has returned a code other than 0."""
        self.member.finish(code, self.all_reduce_kernel, (plan.address, count, address), seconds, site)

    def all_reduce_iovec(
        self, tensors: Sequence[torch.Tensor], plan: Plan, seconds: float, site: str | None = None
    ) -> None:
        """:meth:`all_reduce` of several tensors as if they were one: their elements, one after the other."""
        places = [*accumulate((tensor.numel() for tensor in tensors), initial=0)]
        parts = array("q", places)
        parts.extend([tensor.data_ptr() for tensor in tensors])
        address, _ = parts.buffer_info()
        self._run(self._all_reduce_iovec, (plan.address, places[-1], address, len(tensors)), seconds, site)

    def broadcast(self, tensor: torch.Tensor, plan: Plan, seconds: float, site: str | None = None) -> None:
        """Replace every rank's tensor by the root's."""
        self._run(self._broadcast, (plan.address, tensor.numel(), tensor.data_ptr()), seconds, site)

    def all_gather_flat(
        self, output: torch.Tensor, tensor: torch.Tensor, plan: Plan, seconds: float, site: str | None = None
    ) -> None:
        """Put every rank's tensor, one after the other, into the output."""
        arguments = (plan.address, tensor.numel(), tensor.data_ptr(), output.data_ptr())
        self._run(self._all_gather, arguments, seconds, site)

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        plan: Plan,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Put every rank's tensor into an output of its own; sizes may differ between ranks."""
        lengths = [output.nbytes for output in outputs]
        count = tensor.numel() if len(set(lengths)) == 1 else _uneven(lengths)
        targets = [output.data_ptr() for output in outputs]
        self._share_pieces(plan, count, tensor, lengths, targets, seconds, site)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        plan: Plan,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Put every rank's tensor into an output of the root; ``outputs`` is None on the others."""
        targets = [0] * self.size if outputs is None else [output.data_ptr() for output in outputs]
        lengths = [tensor.nbytes] * self.size
        self._share_pieces(plan, tensor.numel(), tensor, lengths, targets, seconds, site)

    def _share_pieces(
        self,
        plan: Plan,
        count: int,
        tensor: torch.Tensor,
        lengths: list[int],
        targets: list[int],
        seconds: float,
        site: str | None,
    ) -> None:
        self.member.set_table(at.TARGETS, targets)
        self.member.set_table(at.TARGET_BYTES, lengths)
        self._run(self._share, (plan.address, count, tensor.data_ptr()), seconds, site)

    def reduce_scatter_flat(
        self, output: torch.Tensor, tensor: torch.Tensor, plan: Plan, seconds: float, site: str | None = None
    ) -> None:
        """Reduce the tensors of all ranks, and give each rank its piece of the result."""
        arguments = (plan.address, output.numel(), tensor.data_ptr(), output.data_ptr())
        self._run(self._reduce_scatter_even, arguments, seconds, site)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        plan: Plan,
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Reduce, for each rank, the tensors that all ranks have for it; sizes may differ between them."""
        lengths = [tensor.nbytes for tensor in tensors]
        count = output.numel() if len(set(lengths)) == 1 else _uneven(lengths)
        self.member.set_table(at.SOURCES, [tensor.data_ptr() for tensor in tensors])
        self.member.set_table(at.SOURCE_BYTES, lengths)
        arguments = (plan.address, count, output.data_ptr(), max(lengths) // plan.unit)
        self._run(self._reduce_scatter, arguments, seconds, site)

    def all_to_all_flat(
        self, output: torch.Tensor, tensor: torch.Tensor, plan: Plan, seconds: float, site: str | None = None
    ) -> None:
        """Send piece p of the tensor to rank p, and receive its piece for this rank; all equally long."""
        length = tensor.numel() * plan.unit // self.size
        arguments = (plan.address, length, tensor.data_ptr(), output.data_ptr())
        self._run(self._all_to_all_even, arguments, seconds, site)

    def exchange(
        self,
        plan: Plan,
        sends: Sequence[tuple[int, int]],
        receives: Sequence[tuple[int, int]],
        seconds: float,
        site: str | None = None,
    ) -> None:
        """Send to and receive from each rank what (address, bytes) say: all_to_all and scatter."""
        member = self.member
        member.set_table(at.SOURCES, [address for address, _ in sends])
        member.set_table(at.SOURCE_BYTES, [length for _, length in sends])
        member.set_table(at.TARGETS, [address for address, _ in receives])
        member.set_table(at.TARGET_BYTES, [length for _, length in receives])
        self._run(self._exchange, (plan.address, at.UNKNOWN), seconds, site)

    def barrier(self, seconds: float, site: str | None = None) -> None:
        """Return when all ranks have called."""
        self._run(self._barrier, (self._barrier_plan.address, 0), seconds, site)

    def agree(self, plan: Plan, count: int, seconds: float, site: str | None = None) -> None:
        """Return when all ranks have called, with the same kind of operation and the same count."""
        self._run(self._barrier, (plan.address, count), seconds, site)

    def send(self, tensor: torch.Tensor, rank: int, tag: int, seconds: float) -> None:
        """Send a message; the tensor may be changed afterwards, though the message may not have arrived."""
        kind, waiter = self.kind_of_message(tensor.dtype), self.waiter(seconds)
        self.mailbox.send(tensor.data_ptr(), tensor.nbytes, kind, rank, tag, waiter)

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int, seconds: float) -> int:
        """Receive a message from a rank, or from any; the rank that sent it."""
        kind, waiter = self.kind_of_message(tensor.dtype), self.waiter(seconds)
        return self.mailbox.recv(tensor.data_ptr(), tensor.nbytes, kind, rank, tag, waiter)

    def begin_send(
        self, tensor: torch.Tensor, rank: int, tag: int, seconds: float, done: Callable[[Transfer], None]
    ) -> Transfer:
        """:meth:`send` in the background; ``done`` is called at its end and keeps the tensor alive."""
        kind, waiter = self.kind_of_message(tensor.dtype), self.waiter(seconds)
        return self.mailbox.isend(tensor.data_ptr(), tensor.nbytes, kind, rank, tag, waiter, done)

    def begin_receive(
        self,
        tensor: torch.Tensor,
        rank: int | None,
        tag: int,
        seconds: float,
        done: Callable[[Transfer], None],
    ) -> Transfer:
        """:meth:`receive` in the background; ``done`` is called at its end and keeps the tensor alive."""
        kind, waiter = self.kind_of_message(tensor.dtype), self.waiter(seconds)
        return self.mailbox.irecv(tensor.data_ptr(), tensor.nbytes, kind, rank, tag, waiter, done)

    def waiter(self, timeout_s: float) -> MessageWaiter:
        """Who ends the waits of messages that may wait for so long."""
        waiter = self._waiter  # which another thread may replace
        if timeout_s != waiter.timeout_s:
            waiter = self._waiter = MessageWaiter(self.member, timeout_s)
        return waiter

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in the arena."""
        return self.member.heap.empty(shape, dtype)

    def sequence_number(self) -> int:
        """How many operations this rank has begun."""
        return self.member.word(at.SEQUENCE)

    @staticmethod
    def combine(target: torch.Tensor, sources: Sequence[torch.Tensor], op: ReduceOp) -> None:
        """Reduce tensors of this rank, as the engine does those of several: same order, same rounding."""
        combine(
            target.dtype, op, target.data_ptr(), [source.data_ptr() for source in sources], target.numel()
        )

    @staticmethod
    def scale(tensor: torch.Tensor, factor: float) -> None:
        """Multiply a contiguous tensor of this rank by a factor, in place."""
        scale(tensor.dtype, tensor.data_ptr(), factor, tensor.numel())

    @staticmethod
    def kind_of_message(dtype: torch.dtype) -> int:
        """What the mailbox knows messages of a dtype by: both ends must name the same."""
        return DTYPE_CODE[dtype]

    @staticmethod
    def reduces(dtype: torch.dtype, op: ReduceOp) -> bool:
        """Whether tensors of the dtype can be reduced by the operation."""
        return supports(dtype, op)

    @staticmethod
    def moves(dtype: torch.dtype) -> bool:
        """Whether tensors of the dtype can be sent."""
        return dtype in DTYPE_CODE

    def flight_record(self) -> FlightRecord:
        """What all ranks did last. Concerns this rank only, and goes on when others have died."""
        return read_flight_record(self.member.arena)

    def close(self) -> None:
        """Leave the group. Peers that wait for this rank get an error."""
        self.mailbox.close()
        self.member.leave()

    def _run(self, kernel: Kernel, arguments: tuple[int, ...], seconds: float, site: str | None) -> None:
        try:
            code = kernel(*arguments)
            if code:
                self.member.finish(code, kernel, arguments, seconds, site)
        except BaseException as error:
            self.leave_halfway(error)
            raise

    def leave_halfway(self, error: BaseException) -> None:
        """After an exception: if the operation was not brought to its end, no other can be begun.

        The exception may be a KeyboardInterrupt at any point since the kernel was first called.
        """
        self.member.note_failure()
        if self.member.word(at.RESUME):
            try:
                self.member.leave_halfway(error)
            finally:
                # Not a method of this object, which would then hold itself, and the arena, once it is closed.
                self._replace_kernels(partial(_refuse, self.member))
                reclaim(self.member)

    def _replace_kernels(self, refuse: Kernel) -> None:
        self.all_reduce_kernel = self._all_reduce_iovec = refuse
        self._reduce_scatter = self._reduce_scatter_even = refuse
        self._barrier = self._broadcast = self._share = self._all_gather = refuse
        self._exchange = self._all_to_all_even = refuse


def _refuse(member: RankContext, *arguments: int) -> int:
    """In place of every kernel once the group cannot be used."""
    raise member.aborted()


def _refuse_in_child(member: RankContext, *arguments: int) -> int:
    """In place of every kernel in a forked child."""
    raise refusal(f"group {member.name!r} of rank {member.group_rank} cannot be used")
