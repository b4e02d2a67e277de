"""The protocol of engines: an engine runs the operations of a group on one rank.

There are five: of ranks that share an arena (local.py), of ranks on several hosts (multihost/engine.py), of
tensors of a device (device/engine.py), of a world whose other ranks do not exist (fake.py), and of groups of
registered backends (compat/registered.py). Code that holds an engine asks for its properties, never for its
class.

An engine takes contiguous tensors that have been checked, runs one collective at a time, in the order in
which it is called, and returns when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from torchestra.engine.entry_layout import State
from torchestra.engine.operations import Collective
from torchestra.errors import InvalidArgumentError
from torchestra.types import ReduceOp

if TYPE_CHECKING:
    from torchestra.engine.hosts import Hosts
    from torchestra.engine.recorder.flight_entries import SpanTimes
    from torchestra.engine.recorder.flight_record import FlightRecord


Ended = Callable[[Any], None]
"""Called at the end of a message with its transfer, which has ``error`` and ``source``."""


Prepared = Callable[..., None]
"""Runs a collective on the tensors that it was prepared for; takes ``timeout_s`` and ``site``."""


def _missing(engine: Engine, name: str) -> NoReturn:
    raise NotImplementedError(f"{type(engine).__name__} has no {name}()")


class Engine(Protocol):
    """One rank's engine. Classes derive from this, to inherit its defaults.

    Attributes:
        rank, size: this rank's number in the group, and how many there are.
        kernels: the compiled kernels (local.py), for entries; None without.
        context: this rank's context in the arena of its host; None without one.
        hosts: which ranks are on which host; None if all are on one.
        hierarchy, bridge_kind: with several hosts, the steps between them (multihost/hierarchy.py), and the
            kind of bridge.
        state: the words that entries check (engine/entry_layout.py); None where there can be no entries.
        is_fake: the other ranks do not exist, so tensors need no memory, and nothing waits.
        delegates: arguments are neither checked nor prepared for it: :meth:`delegate` takes whole calls.
    """

    rank: int
    size: int
    kernels: Any = None
    state: State | None = None
    context: Any = None
    hosts: Hosts | None = None
    hierarchy: Any = None
    bridge_kind: str = ""
    is_fake: bool = False
    delegates: bool = False

    # -- collectives

    def plan(
        self, row: Collective, dtype: torch.dtype, op: ReduceOp | None = None, root: int | None = None
    ) -> Any:
        """Return the plan for :meth:`collective`: the constants of an operation on a dtype."""

    def collective(
        self,
        plan: Any,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        timeout_s: float,
        site: str | None = None,
    ) -> None:
        """Run a collective; return when it is done.

        Args:
            plan: from :meth:`plan`.
            inputs, outputs: the tensors to read and those to fill: those of a list one by one, none where
                only the root gives them. Of an operation in place both are the same.
            timeout_s: how long it may wait for the other ranks.
            site: the calling line where that is not on the thread's stack (asynchronous operations).
        """

    def prepare(self, plan: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Prepared:
        """Return a callable that runs :meth:`collective` with these arguments, repeatedly and in few steps.

        Only a caller that may call :meth:`collective` may call this. The tensors must not be moved
        afterwards.
        """
        return partial(self.collective, plan, inputs, outputs)

    def barrier(self, timeout_s: float, site: str | None = None) -> None:
        """Return when all ranks have called."""
        _missing(self, "barrier")

    def delegate(
        self,
        row: Collective,
        output: Any,
        input: Any,  # noqa: A002 - the row's word
        op: ReduceOp | None,
        root: int | None,
        splits: tuple[Any, Any],
        async_op: bool,
        timeout_s: float,
    ) -> Any:
        """Run a whole call, if the engine :attr:`delegates`; return its Work, or None if it is done."""
        return None

    # -- operations in the background

    @property
    def operations_sent(self) -> int:
        """The number of operations of which this host has begun to send something to other hosts."""
        return 0

    def await_sending(self, operations_sent: int) -> None:
        """Where ranks share cores, wait until a background operation has begun to send, or 20 ms.

        Otherwise the ranks of the host that have not reached the operation yet, and the threads that send it,
        would have to wait for this thread's core, and the network for them. This rank loses nothing, for it
        would wait for the same ranks later.

        Args:
            operations_sent: what :attr:`operations_sent` was before the operation was begun.
        """
        return

    # -- messages

    def send(self, tensor: torch.Tensor, rank: int, tag: int, timeout_s: float) -> None:
        """Send a message; the tensor may be changed afterwards, though the message may not have arrived."""
        _missing(self, "send")

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int, timeout_s: float) -> int:
        """Receive a message from a rank, or from any (None); return the rank that sent it."""
        _missing(self, "receive")

    def begin_send(self, tensor: torch.Tensor, rank: int, tag: int, timeout_s: float, done: Ended) -> Any:
        """Begin :meth:`send` and return the transfer. ``done`` is called at its end."""
        _missing(self, "begin_send")

    def begin_receive(
        self, tensor: torch.Tensor, rank: int | None, tag: int, timeout_s: float, done: Ended
    ) -> Any:
        """Begin :meth:`receive` and return the transfer. ``done`` is called at its end."""
        _missing(self, "begin_receive")

    def complete(self, transfer: Any) -> object:
        """Work for a transfer until it has ended."""
        _missing(self, "complete")

    # -- one-sided writes into memory of ranks on other hosts

    @property
    def serves_puts(self) -> bool:
        """Return whether there are :meth:`expose` and :meth:`begin_put`, for ranks on other hosts."""
        return False

    def expose(self, window: int, tensor: torch.Tensor | None) -> None:
        """Let ranks on other hosts write into a contiguous tensor, by a window's number; None: no more.

        The caller keeps the tensor, a view of what it exposes.
        """
        return

    def begin_put(
        self, tensor: torch.Tensor, rank: int, window: int, offset: int, timeout_s: float, done: Ended
    ) -> Any:
        """Begin to write into what a rank on another host has exposed, and return the transfer.

        Args:
            tensor: what to write; it must not be changed any more, even when this has ended.
            rank: whose program takes no part in it; what is sent to it later arrives later.
            window: under which it has exposed a tensor of this dtype.
            offset: in bytes, where to begin; the caller has checked that all of it fits.
            timeout_s: how long it may take.
            done: called when it is there.
        """
        _missing(self, "begin_put")

    # -- what belongs to it

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor, in the memory that the engine moves fastest."""
        return torch.empty(shape, dtype=dtype)

    def is_in_heap(self, address: int) -> bool:
        """Return whether an address is in the memory that :meth:`empty` gives out and that ranks share."""
        return False

    def heap_of(self, rank: int) -> int | None:
        """Return where the memory that a rank's :meth:`empty` gives out begins in this process.

        None if this rank cannot address it.
        """
        return None

    def shared(self, rank: int, offset: int, length: int) -> torch.Tensor:
        """Return bytes of the memory that a rank's :meth:`empty` gives out.

        Raises:
            InvalidArgumentError: they are not there, or this rank cannot address them.
        """
        raise InvalidArgumentError(f"rank {rank} has no memory that this rank can address")

    def combine(self, target: torch.Tensor, sources: Sequence[torch.Tensor], op: ReduceOp) -> None:
        """Reduce tensors of this rank, in the same order and with the same rounding as those of several."""

    def scale(self, tensor: torch.Tensor, factor: float) -> None:
        """Multiply a contiguous tensor of this rank by a factor, in place."""
        tensor.mul_(factor)

    # -- its state

    def sequence_number(self) -> int:
        """Return how many operations of the whole group this rank has begun; 0 if it does not count."""
        return 0

    def record_spans(self, step: int, spans: Sequence[SpanTimes]) -> None:
        """Write parts of a training step that have ended into the flight record; without one, do nothing."""
        return

    def flight_record(self) -> FlightRecord | None:
        """Return the record of what the ranks did last; None if nothing is recorded."""
        return None

    @property
    def is_aborted(self) -> bool:
        """Return whether the group can no longer be used, and all ranks can know that."""
        return False

    def abort(self, why: str, failed: Sequence[int] = ()) -> None:
        """Make operations under way on all ranks, and later ones, fail at once.

        Args:
            why: what the errors say.
            failed: the ranks that have died, if that is why.
        """

    def name_ranks(self, global_ranks: Sequence[int]) -> None:
        """Take note of the global ranks, by rank in the group, which errors name besides the group's own."""
        return

    def check_messages(self) -> None:
        """Make messages under way check now whether the group was aborted."""
        return

    def close(self) -> None:
        """Leave the group. Peers that wait for this rank get an error."""
