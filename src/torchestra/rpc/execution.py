"""Execution of the calls that come, and their answers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

from torchestra.errors import RpcError
from torchestra.rpc import remote_errors
from torchestra.rpc.call_scope import CallScope
from torchestra.rpc.current import TAKES_AGENT
from torchestra.rpc.functions import MARK
from torchestra.rpc.headers import IncomingHeader, OutgoingHeader
from torchestra.rpc.messages import ANSWER, FAILURE, decode, encode, encode_plain_value
from torchestra.rpc.rref_state import OwnerRRef
from torchestra.rpc.thread_state import thread_state
from torchestra.transport.message import Message

if TYPE_CHECKING:
    from torchestra.rpc.agent import Agent


class CallExecutor:
    """Executes the calls that come to a worker, on threads of its pool."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def execute(self, message: Message, header: IncomingHeader | None) -> None:
        """Execute a call and answer it."""
        agent, source, call_id = self._agent, message.source, message.tag
        owned, scope = (None, None) if header is None else (header.owned, header.scope)
        thread_state.scope = scope
        try:
            try:
                content = (
                    decode(message, None, agent.router.borrow)
                    if header is None
                    else agent.read(message, header)
                )
                function, args, kwargs = content
            except Exception as error:
                raise remote_errors.unreadable_call(error, source, agent) from error
            if getattr(function, TAKES_AGENT, None) is True:
                args = (agent, *args)
            result = function(*args, **kwargs) if kwargs else function(*args)
            if hasattr(function, MARK):
                if not isinstance(result, torch._C.Future):
                    raise RpcError(
                        "Functions decorated with @rpc.async_function must return a torch.futures.Future"
                        f" object, but got {type(result)}"
                    )
                result.then(partial(self._answer_later, source, call_id, owned, scope))
                return
        except BaseException as error:
            self._answer_failure(source, call_id, owned, error)
            return
        finally:
            thread_state.scope = None
        self._answer(source, call_id, owned, scope, result)

    def _answer_later(
        self, source: int, call_id: int, owned: OwnerRRef | None, scope: CallScope | None, future: Future[Any]
    ) -> None:
        try:
            value = future.value()
        except BaseException as error:
            self._answer_failure(source, call_id, owned, error)
            return
        self._answer(source, call_id, owned, scope, value)

    def _answer(
        self, source: int, call_id: int, owned: OwnerRRef | None, scope: CallScope | None, result: Any
    ) -> None:
        agent = self._agent
        if owned is not None:
            owned.set(result)
            result = None
        encoded = encode_plain_value(result)
        if encoded is None:
            recorder = None if scope is None else scope.outgoing(source, result, is_call=False)
            header = OutgoingHeader(agent.rrefs, source, None, recorder, agent.router.buffers_to(source))
            try:
                encoded = header.encode(result)
            except BaseException as error:
                header.withdraw()
                self._answer_failure(source, call_id, None, error)
                return
        if source == agent.rank or agent.endpoint is None:
            agent.send(source, ANSWER, call_id, encoded)
        else:
            agent.endpoint.send(source, ANSWER, call_id, encoded.parts, encoded)

    def _answer_failure(
        self, source: int, call_id: int, owned: OwnerRRef | None, error: BaseException
    ) -> None:
        agent = self._agent
        described = remote_errors.describe(error, agent)
        if owned is not None:
            owned.fail(error)
        agent.send(source, FAILURE, call_id, encode(described))
