"""What goes around the pickle of a call or an answer: the references within, and what they are to become."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchestra.rpc.encoding import being_read
from torchestra.rpc.rref_state import Entry, Number, User

if TYPE_CHECKING:
    from torchestra.autograd.contexts import Context
    from torchestra.autograd.send_recv import Sending
    from torchestra.rpc.rref import RRef
    from torchestra.rpc.rref_context import References


class Passed(NamedTuple):
    """A reference in a message: its number, owner, the fork made for it, and whether the owner lists that."""

    reference: Number
    owner: int
    fork: Number
    listed: bool


class Envelope(NamedTuple):
    """What goes around the pickle of a call or an answer, where there is any of it.

    Attributes:
        creates: the numbers of the reference that the result is kept under, and of its creator's fork.
        passed: the references within.
        context: the number of a distributed autograd context.
        attached: the number of the message in that context, if tensors in it are attached to its graph.
    """

    creates: tuple[Number, Number | None] | None
    passed: list[Passed]
    context: int | None
    attached: int | None


class Outbound:
    """The references in a message that is being pickled."""

    __slots__ = ("_creates", "_passed", "_references", "_sending", "_to", "reducers", "takes")

    def __init__(
        self,
        references: References,
        to: int,
        creates: tuple[Number, Number | None] | None,
        sending: Sending | None,
    ) -> None:
        self._references = references
        self._to = to
        self._creates = creates
        self._sending = sending
        self.takes = None if sending is None else sending.takes
        self._passed: list[Passed] = []
        self.reducers: dict[type, Callable[[Any], Any]] = {references.rref_class: self._pass}

    def envelope(self) -> tuple[Any, ...] | None:
        """What to send around the pickle."""
        context, attached = (None, None) if self._sending is None else self._sending.close()
        if self._passed or self._creates is not None or context is not None:
            return (self._creates, [tuple(each) for each in self._passed], context, attached)
        return None

    def _pass(self, rref: RRef) -> Any:
        self._passed.append(self._references.fork(rref, self._to))
        return _passed_reference, (len(self._passed) - 1,)

    def take_back(self) -> None:
        """The message will not be sent."""
        for each in self._passed:
            self._references.take_back(each)
        self._passed.clear()


def _passed_reference(number: int) -> Any:
    return being_read().rrefs[number]


class Inbound:
    """The references in a message that has come.

    Attributes:
        envelope: what it said.
        entry: what the result of the call is to be kept in, if so.
        rrefs: the references within.
        context: the distributed autograd context that it belongs to, if that is here.
        attached: the tensors within that are attached to the graph of that.
    """

    __slots__ = ("_job", "_lock", "_unconfirmed", "attached", "context", "entry", "envelope", "rrefs")

    def __init__(
        self, envelope: Envelope, entry: Entry | None, rrefs: list[RRef], unconfirmed: list[User]
    ) -> None:
        self.envelope = envelope
        self.entry = entry
        self.rrefs = rrefs
        self.context: Context | None = None
        self.attached: list[torch.Tensor] = []
        self._unconfirmed = len(unconfirmed)
        self._job: Callable[[], Any] | None = None
        self._lock = threading.Lock()
        for user in unconfirmed:
            user.inbound = self

    def defer(self, job: Callable[[], Any]) -> bool:
        """Have a job done when all references within are confirmed; False if they are, and it is not done."""
        with self._lock:
            if self._unconfirmed:
                self._job = job
            return bool(self._unconfirmed)

    def confirmed_one(self) -> None:
        """One of the references within is confirmed, or never will be."""
        with self._lock:
            self._unconfirmed -= 1
            if self._unconfirmed:
                return
            job, self._job = self._job, None  # which has this: what it refers to shall go with the call
        if job is not None:
            job()
