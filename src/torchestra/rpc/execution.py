"""Execution of the calls that come, and their answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch.futures import Future

from torchestra.engine import layout as at
from torchestra.rpc import plain, remote_errors, rref_context
from torchestra.rpc.call_scope import CallScope
from torchestra.rpc.calls import PendingCall, refuse_other_than_future
from torchestra.rpc.executed_calls import CallCounts
from torchestra.rpc.functions import MARK
from torchestra.rpc.headers import IncomingHeader, OutgoingHeader
from torchestra.rpc.messages import (
    ANSWER,
    FAILURE,
    PLAIN_ANSWER,
    PLAIN_CALL,
    TENSOR_ANSWER,
    TENSOR_CALL,
    Encoded,
    decode,
    encode,
    part_length,
)
from torchestra.rpc.package_functions import TAKES_AGENT
from torchestra.rpc.profiling import ProfiledResult, run_for_server_profiles, server_profiles
from torchestra.rpc.router import Endpoint, Router
from torchestra.rpc.rref_state import OwnerRRef
from torchestra.rpc.shared_buffers import SharedBufferPool
from torchestra.rpc.thread_state import thread_state
from torchestra.rpc.worker_info import WorkerInfo
from torchestra.transport.message import Message

_now = time.perf_counter_ns
_USES = 2  # of a storage that one tensor has, and what Python calls the storage


class Worker(rref_context.Worker, Protocol):
    """What the execution of calls asks of its worker, an :class:`~torchestra.rpc.agent.Agent`."""

    info: WorkerInfo
    router: Router
    endpoint: Endpoint | None
    checks: set[Callable[[], None]]
    pending: dict[int, PendingCall]
    calls_made: int
    sent_bytes: int

    def read(self, message: Message, header: IncomingHeader) -> Any:
        """Return the content of a message that has a header."""

    def send(self, to: int, kind: int, call_id: int, encoded: Encoded) -> None:
        """Send a message to a worker, which may be this one."""


class CallExecutor:
    """Executes the calls that come to a worker, on threads of its pool.

    Attributes:
        executed: what it has executed.
    """

    def __init__(self, agent: Worker) -> None:
        self._agent = agent
        self.executed = CallCounts(agent.router.context)
        agent.checks.add(self.executed.write)
        agent.checks.add(partial(_write_present, agent))

    def execute(self, message: Message, header: IncomingHeader | None) -> None:
        """Execute a call and answer it."""
        agent, source, call_id = self._agent, message.source, message.tag
        owned, scope = (None, None) if header is None else (header.owned, header.scope)
        thread_state.scope = scope
        try:
            try:
                kwargs: Any = None
                if message.kind == PLAIN_CALL:
                    function, args = plain.decode_call(message)
                elif message.kind == TENSOR_CALL:
                    router = agent.router
                    rank = router.local_rank_of.get(source, -1)
                    function, args = plain.decode_tensor_call(message, router.shared_buffers, rank)
                elif header is None:
                    function, args, kwargs = decode(message, None, agent.router.borrow)
                else:
                    function, args, kwargs = agent.read(message, header)
            except Exception as error:
                raise remote_errors.unreadable_call(error, agent.workers[source], agent.info) from error
            if getattr(function, TAKES_AGENT, None) is True:
                args = (agent, *args)
            began = _now()
            if server_profiles:
                result = run_for_server_profiles(function, args, kwargs)
            else:
                result = function(*args, **kwargs) if kwargs else function(*args)
            self.executed.note(source, function, _now() - began)
            if hasattr(function, MARK):
                refuse_other_than_future(result)
                result.then(partial(self._answer_later, source, call_id, owned, scope))
                return
        except BaseException as error:
            self._answer_failure(source, call_id, owned, error)
            return
        finally:
            thread_state.scope = None
        outcome = [result]
        del args, kwargs, result  # so that :meth:`_answer` can tell whether somebody else has the result
        self._answer(source, call_id, owned, scope, outcome)

    def _answer_later(
        self, source: int, call_id: int, owned: OwnerRRef | None, scope: CallScope | None, future: Future[Any]
    ) -> None:
        try:
            value = future.value()
        except BaseException as error:
            self._answer_failure(source, call_id, owned, error)
            return
        finally:
            del future  # as in PendingCall.wait
        self._answer(source, call_id, owned, scope, [value])

    def _answer(
        self, source: int, call_id: int, owned: OwnerRRef | None, scope: CallScope | None, outcome: list[Any]
    ) -> None:
        agent, result = self._agent, outcome.pop()
        if owned is not None:
            result = _leave_value(owned, result)
        encoded, kind = plain.encode_value(result), PLAIN_ANSWER
        if encoded is None:
            buffers, header = agent.router.buffers_to(source), None
            taken: dict[int, None] = {}
            try:
                if scope is None and plain.is_ordinary(result):
                    kind = TENSOR_ANSWER
                    if not result.requires_grad and buffers is not None:
                        result = result.detach()  # this function's own, whoever else has the result
                        encoded = self._encode_returned(source, result, buffers)
                    if encoded is None:
                        encoded = plain.encode_tensor(result, buffers, taken)
                if encoded is None:
                    kind = ANSWER
                    header = OutgoingHeader(agent.rrefs, source, buffers, scope, result, is_call=False)
                    encoded = header.encode(result)
            except BaseException as error:
                if header is not None:
                    header.withdraw()
                if buffers is not None:
                    buffers.withdraw(taken)
                self._answer_failure(source, call_id, None, error)
                return
        result = header = None  # before the answer comes: then the caller finds free the buffers that it lent
        if source == agent.number or agent.endpoint is None:
            agent.send(source, kind, call_id, encoded)
        else:
            agent.endpoint.send(source, kind, call_id, encoded.parts, encoded)
            agent.sent_bytes += sum(map(part_length, encoded.parts))

    def _encode_returned(
        self, source: int, result: torch.Tensor, buffers: SharedBufferPool
    ) -> Encoded | None:
        """Return an answer that is not copied, for a tensor in a buffer of the caller that nobody else has.

        None for other tensors. Only the caller of this function has this one, and shall not use it any more.
        """
        if not buffers.is_from(self._agent.router.local_rank_of[source], result.data_ptr()):
            return None
        storage = result.untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) > _USES:
            return None
        return plain.encode_returned(result, buffers.return_buffer(storage))

    def _answer_failure(
        self, source: int, call_id: int, owned: OwnerRRef | None, error: BaseException
    ) -> None:
        agent = self._agent
        described = remote_errors.describe(error, agent.info)
        if owned is not None:
            owned.fail(error)
        agent.send(source, FAILURE, call_id, encode(described))


def _leave_value(owned: OwnerRRef, result: Any) -> ProfiledResult | None:
    """Keep a result here, at its owner; return what the caller gets."""
    if type(result) is not ProfiledResult:
        owned.set(result)
        return None
    owned.set(result.value)
    return replace(result, value=None)


def _write_present(agent: Worker) -> None:
    """Write into the worker's flight record what it has sent, what it waits for, and its references."""
    context = agent.router.context
    record = context.arena.record(context.rank)
    owned, used = agent.rrefs.alive()
    for word, number in (
        (at.CALLS_IN_FLIGHT, len(agent.pending)),
        (at.REFERENCES_OWNED, owned),
        (at.REFERENCES_USED, used),
        (at.CALLS_MADE, agent.calls_made),
        (at.CALLS_SENT_BYTES, agent.sent_bytes + agent.router.shared_buffers.shared_bytes),
    ):
        context.arena.store_word(record + word, number)
