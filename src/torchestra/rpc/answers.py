"""Completion of calls by the answers that come."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch

from torchestra.rpc import plain, remote_errors
from torchestra.rpc.calls import FutureCall, PendingCall
from torchestra.rpc.headers import IncomingHeader
from torchestra.rpc.leader_followers import ONCE, REPEATABLE, Job, LeaderFollowersPool
from torchestra.rpc.liveness import Liveness
from torchestra.rpc.messages import ANSWER, FAILURE, TENSOR_ANSWER, decode, open_shared
from torchestra.rpc.router import Router
from torchestra.rpc.shared_buffers import OpenedBuffers
from torchestra.rpc.worker_info import WorkerInfo
from torchestra.rpc.workers import Workers
from torchestra.transport.message import Message


class Worker(Protocol):
    """What the handling of answers asks of its worker, an :class:`~torchestra.rpc.agent.Agent`."""

    info: WorkerInfo
    workers: Workers
    router: Router
    pending: dict[int, PendingCall]
    pool: LeaderFollowersPool
    liveness: Liveness

    def read(self, message: Message, header: IncomingHeader, opened: OpenedBuffers | None = None) -> Any:
        """Return the content of a message that has a header."""

    def read_scope(self, message: Message, header: IncomingHeader) -> None:
        """Give the tensors in a message that has a header to the scope."""


class AnswerHandler:
    """Completes the calls of a worker whose answers come.

    All of this may be done again for a message if an interrupt came before it was over.
    """

    def __init__(self, agent: Worker) -> None:
        self._agent = agent

    def dispatch_plain(self, message: Message) -> tuple[int, Job | None]:
        """Do as :meth:`dispatch` for an answer that is a number or a text.

        Nothing of a program is called for a call that is no future, so the leader completes it at once.
        """
        call = self._agent.pending.get(message.tag)
        if call is None:
            return REPEATABLE, None
        if isinstance(call, FutureCall):
            kind = ONCE if call.has_callbacks else REPEATABLE
            return kind, partial(self._complete_plainly, message, call)
        self._complete_plainly(message, call)
        return REPEATABLE, None

    def dispatch(self, message: Message, header: IncomingHeader | None) -> tuple[int, Job | None]:
        """Return how the pool is to complete the call that a message answers, and the job."""
        call = self._agent.pending.get(message.tag)
        kind = ONCE if isinstance(call, FutureCall) and call.has_callbacks else REPEATABLE
        return kind, partial(self._complete, message, header, _Answer())

    def _complete_plainly(self, message: Message, call: PendingCall) -> None:
        # As is_settled_by(), whose call would cost as much as the rest.
        if call.__dict__.setdefault("settler", message) is not message:
            return  # it took too long
        value, error = None, None
        try:
            value = plain.decode_value(message)
        except Exception as unreadable:
            error = self._unreadable(unreadable, call)
        call.complete(value, error)
        self._agent.pending.pop(message.tag, None)

    def _complete(self, message: Message, header: IncomingHeader | None, answer: _Answer) -> None:
        agent = self._agent
        call = agent.pending.get(message.tag)
        if answer.finished:
            return
        opened = answer.opened
        if opened is None:
            opened = answer.opened = {}
        if call is None or not call.is_settled_by(answer):  # it took too long
            try:
                self._discard(message, header, opened)
            except Exception as unreadable:
                agent.liveness.give_up(message.source, unreadable)
            answer.finished, answer.opened = True, None
            return
        if answer.result is None:
            value, error = None, None
            try:
                if message.kind == TENSOR_ANSWER:
                    value = self._tensor(message, opened)
                elif header is None:
                    value = decode(message, None, agent.router.borrow, opened)
                else:
                    value = agent.read(message, header, opened)
                if message.kind == FAILURE:
                    error = remote_errors.rebuild(*value)
            except Exception as unreadable:
                error = self._unreadable(unreadable, call)
            answer.result = value, error
        call.complete(*answer.result)
        answer.finished = True
        answer.result = answer.opened = None
        agent.pending.pop(message.tag, None)

    def _tensor(self, message: Message, opened: OpenedBuffers) -> torch.Tensor:
        router = self._agent.router
        rank = router.local_rank_of.get(message.source, -1)
        return plain.decode_tensor(message, router.shared_buffers, rank, opened)

    def _discard(self, message: Message, header: IncomingHeader | None, opened: OpenedBuffers) -> None:
        """Release what an answer refers to that nobody waits for any more."""
        if header is not None:
            self._agent.read_scope(message, header)
        if message.lost is not None:
            return
        if message.kind == TENSOR_ANSWER:
            self._tensor(message, opened)
        elif message.kind == ANSWER:
            open_shared(message, self._agent.router.borrow, opened)

    def _unreadable(self, error: Exception, call: PendingCall) -> Exception:
        agent = self._agent
        return remote_errors.unreadable_result(error, call, agent.workers[call.peer], agent.info)

    def fail(self, call_id: int, error: Exception) -> None:
        """End a call, if it is pending, with an error."""
        pending = self._agent.pending
        call = pending.get(call_id)
        if call is not None and call.is_settled_by(error):
            call.complete(None, error)
            pending.pop(call_id, None)


class _Answer:
    """The progress with an answer, for the next attempt if an interrupt stops this one.

    Attributes:
        result: the value and the error of the call.
        opened: see :meth:`SharedBufferPool.open`.
        finished: the call is done.
    """

    result: tuple[Any, BaseException | None] | None = None
    opened: OpenedBuffers | None = None
    finished = False
