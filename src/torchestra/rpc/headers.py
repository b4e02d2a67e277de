"""What a call takes while it is made, and the header of a call or an answer: references, and the scope."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from torchestra.rpc.call_scope import CallScope
from torchestra.rpc.messages import PLAIN_CALL, Encoded, encode, registered_reducers
from torchestra.rpc.rref_state import GlobalId, OwnerRRef, UserRRef
from torchestra.rpc.shared_buffers import SharedBufferPool
from torchestra.tensors.serialization import Reducer, deserialization_context

Creation = tuple[GlobalId, "GlobalId | None"]
"""The numbers of the reference that the result of a call is kept under, and of its creator's fork."""


class ForkData(NamedTuple):
    """A reference in a message: its number, owner, the fork made for it, and whether the owner lists it."""

    rref_id: GlobalId
    owner: int
    fork_id: GlobalId
    listed: bool


class Reference(Protocol):
    """A reference in a message: an :class:`~torchestra.rpc.RRef`."""

    _state: OwnerRRef | UserRRef

    @classmethod
    def _of(cls, agent: Any, state: OwnerRRef | UserRRef | None) -> Reference:
        """Return a reference of a worker; one without a state is given it before anybody else sees it."""

    def _check_not_deleted(self, doing: str) -> None:
        """Refuse a reference that was deleted when its worker shut down."""


class Forks(Protocol):
    """Makes the forks of references in messages: an RRefContext."""

    @property
    def rref_class(self) -> type:
        """Return the class of references."""

    def fork(self, rref: Any, to: int, forks: list[ForkData]) -> None:
        """Make a fork for a worker, and add it to those of its message."""

    def withdraw_fork(self, fork: ForkData) -> None:
        """Undo :meth:`fork`, for a message that is not sent."""


class OutgoingHeader:
    """The header of a message that is being pickled: (creation, references within, mark of the scope).

    Args:
        rrefs: makes the forks of references in the message.
        to: the worker that it is for.
        buffers: the buffers that share large memory with that worker, if any.
        scope: the scope that the message belongs to, if any.
        content: what the scope is told of the message.
        creation: see :data:`Creation`; a call's.
        is_call: whether it is a call, or an answer.

    Attributes:
        recorder: of the scope.
    """

    __slots__ = (
        "_buffers",
        "_creation",
        "_forks",
        "_rrefs",
        "_taken",
        "_to",
        "recorder",
        "reducers",
        "takes",
    )

    def __init__(
        self,
        rrefs: Forks,
        to: int,
        buffers: SharedBufferPool | None,
        scope: CallScope | None,
        content: object,
        creation: Creation | None = None,
        *,
        is_call: bool = True,
    ) -> None:
        self._buffers = buffers
        self._taken: dict[int, None] = {}
        self._rrefs = rrefs
        self._to = to
        self._creation = creation
        self.recorder = None if scope is None else scope.outgoing(to, content, is_call=is_call)
        self.takes = None if self.recorder is None else self.recorder.takes
        self._forks: list[ForkData] = []
        self.reducers: dict[type, Reducer] = {**registered_reducers(), rrefs.rref_class: self._reduce_rref}

    def encode(self, item: object) -> Encoded:
        """Serialize the content of the message, and this header with it.

        Raises:
            Exception: what pickling raised; then nothing is to be sent.
        """
        share = None if self._buffers is None else self._buffers.sharer(self._taken)
        return encode(item, reducers=self.reducers, takes=self.takes, header=self.content, share=share)

    def content(self) -> tuple[Any, ...] | None:
        """Return the header's content, or None if it has none."""
        mark = None if self.recorder is None else self.recorder.close()
        if self._forks or self._creation is not None or mark is not None:
            return (self._creation, [tuple(each) for each in self._forks], mark)
        return None

    def _reduce_rref(self, rref: Reference) -> Any:
        self._rrefs.fork(rref, self._to, self._forks)
        return _rref_of_message, (len(self._forks) - 1,)

    def withdraw(self) -> None:
        """Undo this header: the message will not be sent."""
        for each in self._forks:
            self._rrefs.withdraw_fork(each)
        if self._buffers is not None:
            self._buffers.withdraw(self._taken)


class OutgoingCall:
    """What a call that is being made has taken, in case it cannot be sent.

    Attributes:
        kind: of its message.
        header: of its message, if that has one.
        taken: the shared buffers that a message without a header takes.
    """

    kind = PLAIN_CALL
    header: OutgoingHeader | None = None
    taken: Collection[int] = ()


def _rref_of_message(index: int) -> Any:
    return deserialization_context().rrefs[index]


@dataclass(slots=True, eq=False)
class IncomingHeader:
    """The header of a message that has come.

    Attributes:
        owned: the reference in which to keep the result of the call, if any.
        rrefs: the references within, by their numbers.
        mark: what the scope of the sender says.
        unconfirmed: how many of the references are not confirmed.
        scope: the scope that the message belongs to, if that is here.
        attached: the tensors within that the sender's scope has recorded.
    """

    owned: OwnerRRef | None = None
    rrefs: dict[int, Reference] = field(default_factory=dict)
    mark: Any = None
    unconfirmed: int = 0
    scope: CallScope | None = None
    attached: list[torch.Tensor] = field(default_factory=list)
    _is_deferred: bool = False
    _job: Callable[[], Any] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def defer(self, job: Callable[[], Any]) -> bool:
        """Do a job when all references within are confirmed; if they are now, return False instead."""
        with self._lock:
            if self.unconfirmed and not self._is_deferred:
                self._is_deferred = True
                self._job = job
            return self._is_deferred

    def confirmed_one(self) -> None:
        """Note that one of the references within is confirmed, or never will be."""
        with self._lock:
            self.unconfirmed -= 1
            if self.unconfirmed:
                return
            job, self._job = self._job, None  # which has this: what it refers to shall go with the call
        if job is not None:
            job()
