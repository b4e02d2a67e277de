"""Contexts: what one iteration of a program that spans workers has of autograd, on each of them.

A context comes to a worker with the first call within it, and goes when whoever made it tells so: every
worker passes that on to those it has called within the context.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchestra.autograd.gradients import Gradients
from torchestra.autograd.graph_task import Key, Part
from torchestra.autograd.send_recv import Receipt, Send, Sending, record_receipt, record_send
from torchestra.errors import RpcError

if TYPE_CHECKING:
    from torchestra.rpc.agent import Agent

_COUNT_BITS = 48
MAX_COUNT = (1 << _COUNT_BITS) - 1

# What workers tell each other; the number of the context and what concerns it follow.
RELEASE, BACKWARD = "release", "backward"


class Context:
    """A context on one worker.

    Attributes:
        number: the rank of the worker that made it, in the upper 16 of 64 bits, and how many it had made.
        gradients: those that have landed on this worker.
        called: the ranks that were called from here, within it.
        neighbours: these and those that have called.
        sends, receipts: by the number of the message, in the order in which they were made.
        parts: the backward passes that run here.
        released: it has ended.
        turn: held by who runs a pass that begins here.
    """

    def __init__(self, contexts: Contexts, number: int) -> None:
        self.contexts = contexts
        self.number = number
        self.gradients = Gradients()
        self.called: set[int] = set()
        self.neighbours: set[int] = set()
        self.sends: dict[int, Send] = {}
        self.receipts: dict[int, Receipt] = {}
        self.parts: dict[Key, Part] = {}
        self.finished: dict[Key, None] = {}
        self.released = False
        self.turn = threading.Lock()
        self.lock = threading.Lock()
        self.seen = 0

    # -- messages

    def outgoing(self, to: int, content: object, *, is_call: bool) -> Sending | None:
        """For the tensors in a message to a worker; None if the context is over."""
        with self.lock:
            if self.released:
                return None
            self.neighbours.add(to)
            if is_call and to != self.contexts.rank:
                self.called.add(to)
        return Sending(self, to, content, is_call)

    def note_send(self, to: int, tensors: Sequence[torch.Tensor]) -> int:
        """Tensors go to a worker: the number of the message."""
        message = self.contexts.new_message()
        with self.lock:
            order, self.seen = self.seen, self.seen + 1
        send = record_send(message, to, order, tensors)
        with self.lock:
            if not self.released:
                self.sends[message] = send
        return message

    def see_release(self, to: int) -> None:
        """A call has gone to a worker: if the context was released meanwhile, the worker must know."""
        if self.released:
            self.contexts.tell(to, RELEASE, self.number)

    def note_receipt(self, source: int, message: int, tensors: list[torch.Tensor]) -> None:
        """Tensors have come from a worker; none if they could not be read."""
        with self.lock:
            order, self.seen = self.seen, self.seen + 1
        if tensors:
            receipt = record_receipt(message, source, order, tensors)
        else:
            receipt = Receipt(message, source, order, None)
        with self.lock:
            if self.released:
                return
            self.receipts[message] = receipt
            self.neighbours.add(source)
            late = [*self.parts, *list(self.finished)[-1:]]
        for key in late:
            # Its sender may wait for its gradients already.
            self.contexts.tell(source, BACKWARD, self.number, key, "late", message)

    # -- backward passes

    def take_part(self, key: Key, retain: bool, engager: int) -> Part | None:
        """The part in a pass, which begins if it is new here; None if it is over."""
        with self.lock:
            part = self.parts.get(key)
            if part is not None:
                return part
            if key in self.finished or self.released:
                return None
            part = self.parts[key] = Part(self, key, retain, engager)
        if key[0] != self.contexts.rank:
            self.contexts.agent.crew.give(part.run_here)
        return part

    def leave_part(self, key: Key) -> Part | None:
        """A pass is over here; the part in it if it was running."""
        with self.lock:
            self.finished[key] = None
            return self.parts.pop(key, None)

    def retire(self, sends: Sequence[Send], receipts: Sequence[Receipt]) -> None:
        """The graph of these messages has been freed: they take no part in other passes."""
        with self.lock:
            for send in sends:
                self.sends.pop(send.message, None)
            for receipt in receipts:
                self.receipts.pop(receipt.message, None)

    def release(self) -> bool:
        """It is over; False if it was before."""
        with self.lock:
            if self.released:
                return False
            self.released = True
            parts = tuple(self.parts.values())
            sends = tuple(self.sends.values())
            self.sends.clear()
            self.receipts.clear()
            self.gradients = Gradients()
        for part in parts:
            part.fail(self.contexts.not_found(self.number))
        del sends
        return True

    # By these names torch.distributed's users look into contexts.

    def _context_id(self) -> int:
        return self.number

    def _known_worker_ids(self) -> set[int]:
        with self.lock:
            return set(self.called)

    def _send_functions(self) -> dict[int, Any]:
        with self.lock:
            return {message: send.token.grad_fn for message, send in self.sends.items()}

    def _recv_functions(self) -> dict[int, Any]:
        with self.lock:
            return {number: receipt.node for number, receipt in self.receipts.items() if receipt.node}


class Contexts:
    """All contexts of one worker."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.rank = agent.rank
        self._first = agent.rank << _COUNT_BITS
        self._numbers = itertools.count(self._first)
        self._messages = itertools.count(self._first)
        self._passes = itertools.count()
        self._all: dict[int, Context] = {}
        self._lock = threading.Lock()

    @property
    def max_number(self) -> int:
        """The greatest number that a context made here could have."""
        return self._first + MAX_COUNT

    def new(self) -> Context:
        """A context that begins here."""
        context = Context(self, next(self._numbers))
        self._all[context.number] = context
        return context

    def new_message(self) -> int:
        """A number for a message."""
        return next(self._messages)

    def new_pass(self) -> Key:
        """A name for a backward pass."""
        return (self.rank, next(self._passes))

    def find(self, number: int, _: int = -1) -> Context | None:
        """The context of a number, if it is here."""
        return self._all.get(number)

    def get(self, number: int) -> Context:
        """The context of a number.

        Raises:
            RpcError: it is not here.
        """
        context = self._all.get(number)
        if context is None:
            raise self.not_found(number)
        return context

    def not_found(self, number: int) -> RpcError:
        """There is no such context."""
        return RpcError(
            f"Could not find autograd context with id: {number} on worker {self.agent.info.name!r} (rank"
            f" {self.rank}): it was released, or no call within it has come here"
        )

    def enter(self, number: int, source: int) -> Context:
        """The context of a call that has come."""
        with self._lock:
            context = self._all.get(number)
            if context is None:
                context = self._all[number] = Context(self, number)
        context.neighbours.add(source)
        return context

    def read(self, inbound: Any, source: int) -> None:
        """A message within a context was unpickled, with the tensors that it has attached."""
        context, message = inbound.context, inbound.envelope.attached
        if message is None:
            return
        if context is not None and not context.released:
            context.note_receipt(source, message, inbound.attached)
        else:
            for tensor in inbound.attached:
                tensor.requires_grad_()

    def release(self, number: int) -> None:
        """End a context, here and wherever calls within it have come from here."""
        with self._lock:
            context = self._all.pop(number, None)
        if context is not None and context.release():
            for rank in context.called:
                self.tell(rank, RELEASE, number)

    # -- what workers tell each other

    def tell(self, to: int, *note: Any) -> None:
        """Tell a worker; nothing if it is gone."""
        agent = self.agent
        if not agent.closed and not agent.is_gone(to):
            agent.tell_autograd(to, note)

    def told(self, source: int, note: tuple[Any, ...]) -> None:
        """A worker has told something."""
        kind, number, *rest = note
        if kind == RELEASE:
            self.release(number)
            return
        context = self._all.get(number)
        key, what, *rest = rest
        if what in ("gradients", "start"):
            self._engage(source, number, context, key, *rest)
        elif context is not None and what == "abort":
            self._abort(context, source, key, *rest)
        elif context is not None and (part := context.parts.get(key)) is not None:
            if what == "done":
                part.peer_done(source, *rest)
            else:
                part.gradients_came(source, rest[0], None)

    def _engage(
        self,
        source: int,
        number: int,
        context: Context | None,
        key: Key,
        retain: bool,
        message: int | None = None,
        gradients: Any = None,
    ) -> None:
        if context is None:
            error = (self.rank, str(self.not_found(number)), None, "")
            self.tell(key[0], BACKWARD, number, key, "done", (), error)
            return
        part = context.take_part(key, retain, source)
        if part is not None and message is not None:
            part.gradients_came(source, message, gradients)

    def _abort(self, context: Context, source: int, key: Key, text: str) -> None:
        if key in context.finished:
            return
        part = context.leave_part(key)
        if part is not None:
            part.fail(RpcError(text))
        for rank in tuple(context.neighbours):
            if rank not in (source, self.rank):
                self.tell(rank, BACKWARD, context.number, key, "abort", text)

    # -- ends

    def lost(self, rank: int) -> None:
        """A worker is gone: so are the contexts that it made."""
        for number in tuple(self._all):
            if number >> _COUNT_BITS == rank:
                self.release(number)

    def close(self) -> None:
        """Forget everything."""
        for number in tuple(self._all):
            self.release(number)

    def counts(self) -> dict[str, int]:
        """How many contexts there are, and how many backward passes run, by torch.distributed's names."""
        contexts = tuple(self._all.values())
        return {
            "num_current_backward_passes": sum(len(context.parts) for context in contexts),
            "num_autograd_contexts": len(contexts),
        }
