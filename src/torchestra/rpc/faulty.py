"""A worker that loses and delays messages that it sends, to test how programs cope with that.

Options say which kinds of messages (``MESSAGES``, by torch's names) are lost and which are late. A lost call
ends at once with a time-out, like a call that is not answered. Messages about remote references are sent
until they arrive, so they only come later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.futures import Future
from torch.jit._builtins import _find_builtin

from torchestra.errors import CallLostError, InvalidArgumentError, WorkerFailedError
from torchestra.rpc import rref_context
from torchestra.rpc.agent import Agent
from torchestra.rpc.calls import name_of
from torchestra.rpc.headers import Reference
from torchestra.rpc.messages import CALL, PLAIN_CALL, TENSOR_CALL, Encoded
from torchestra.rpc.options import RpcBackendOptions
from torchestra.rpc.router import Endpoint, Parts, Router
from torchestra.rpc.workers import Workers
from torchestra.system.kept_errors import fail_future

_REPEATED = {
    rref_context._list: "RREF_FORK_REQUEST",
    rref_context._accept: "RREF_CHILD_ACCEPT",
    rref_context._remove_fork: "RREF_USER_DELETE",
}
_FETCHES = ("PYTHON_RREF_FETCH_CALL", "SCRIPT_RREF_FETCH_CALL")
MESSAGES = (
    *_REPEATED.values(),
    "CLEANUP_AUTOGRAD_CONTEXT_REQ",
    "PYTHON_CALL",
    "PYTHON_REMOTE_CALL",
    "SCRIPT_CALL",
    "SCRIPT_REMOTE_CALL",
    *_FETCHES,
)
"""The kinds of messages: calls of Python's functions, of torch's and TorchScript's ("SCRIPT"), calls by
``remote``, ``to_here()``, requests to list, accept and remove forks of references, and the end of
autograd contexts (which is never lost)."""
_REPEAT_SECONDS = 0.01


class FaultyRpcBackendOptions(RpcBackendOptions):
    """Options with which ``init_rpc`` makes this worker a :class:`FaultyAgent`.

    Args:
        messages_to_fail: kinds of messages that are lost.
        messages_to_delay: by kind of message, how many seconds later it is sent.
        num_fail_sends: how often each message of a kind that is repeated is lost before it arrives. Messages
            of other kinds are not repeated, and are lost if this is not 0.
        options: as for :class:`RpcBackendOptions`.

    Raises:
        InvalidArgumentError: there is no such kind, or a number is negative.
    """

    def __init__(
        self,
        *,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends
        unknown = {*self.messages_to_fail, *self.messages_to_delay} - {*MESSAGES}
        if unknown:
            raise InvalidArgumentError(
                f"No mapping to a kind of message exists for {min(unknown)}; there are {', '.join(MESSAGES)}"
            )
        if num_fail_sends < 0 or any(seconds < 0 for seconds in self.messages_to_delay.values()):
            raise InvalidArgumentError(
                "num_fail_sends and the seconds of messages_to_delay must not be negative, got"
                f" {num_fail_sends} and {self.messages_to_delay}"
            )

    @property
    def _agent_class(self) -> type[FaultyAgent]:
        return FaultyAgent


class FaultyAgent(Agent):
    """A worker whose messages to others and to itself are lost or late, as its options say."""

    def __init__(
        self, router: Router, workers: Workers, options: FaultyRpcBackendOptions, rref_class: type[Reference]
    ) -> None:
        super().__init__(router, workers, options, rref_class)
        self._lost_kinds = frozenset(options.messages_to_fail if options.num_fail_sends else ())
        self._late = options.messages_to_delay
        self._repeats = options.num_fail_sends
        self._of_thread = threading.local()
        self._timers: set[threading.Timer] = set()
        if self.endpoint is not None:
            self.endpoint = _LateEndpoint(self.endpoint, self)

    def call(self, to: int, function: Any, *args: Any, **options: Any) -> Any:
        """Do as :meth:`Agent.call`, unless the call is lost or sent later."""
        kinds = _kinds(function, remote=options.get("creates") is not None)
        delay = next((self._late[kind] for kind in kinds if kind in self._late), 0.0)
        if self._lost_kinds & {*kinds}:
            if function not in _REPEATED:
                return self._lost_call(to, function)
            delay += self._repeats * _REPEAT_SECONDS
        self._of_thread.delay = delay
        try:
            return super().call(to, function, *args, **options)
        finally:
            self._of_thread.delay = 0.0

    def _lost_call(self, to: int, function: Any) -> Future[Any]:
        future: Future[Any] = Future()
        fail_future(
            future,
            CallLostError(
                f"the call of {name_of(function)} on worker {self.workers[to].name!r} was lost on purpose"
                " (messages_to_fail), so no answer comes"
            ),
        )
        return future

    def _send_to_self(self, kind: int, call_id: int, encoded: Encoded) -> None:
        self.send_late(kind, lambda: Agent._send_to_self(self, kind, call_id, encoded))

    def send_late(self, kind: int, send: Callable[[], None]) -> None:
        """Send a message now, or a call later, if the thread is to delay it."""
        is_call = kind in (CALL, PLAIN_CALL, TENSOR_CALL)
        delay = getattr(self._of_thread, "delay", 0.0) if is_call else 0.0
        if not delay:
            send()
            return

        def send_now() -> None:
            self._timers.discard(timer)
            if not self.closed:
                send()

        timer = threading.Timer(delay, send_now)
        timer.daemon = True
        self._timers.add(timer)
        timer.start()

    def close(self, failure: WorkerFailedError | None = None) -> None:
        """Do as :meth:`Agent.close`; messages still to be sent are not sent."""
        for timer in tuple(self._timers):
            timer.cancel()
        super().close(failure)


class _LateEndpoint:
    """An endpoint that sends calls as late as the worker says."""

    def __init__(self, endpoint: Endpoint, agent: FaultyAgent) -> None:
        self._endpoint = endpoint
        self._agent = agent

    def send(
        self, peer: int, kind: int, tag: int, parts: Parts, keep: object = None, sending: Any = None
    ) -> None:
        self._agent.send_late(kind, partial(self._endpoint.send, peer, kind, tag, parts, keep))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)


def _kinds(function: Any, *, remote: bool) -> tuple[str, ...]:
    if function is rref_context.fetch:
        return _FETCHES
    if function in _REPEATED:
        return (_REPEATED[function],)
    is_script = isinstance(function, torch.jit.ScriptFunction) or _find_builtin(function) is not None
    return (f"{'SCRIPT' if is_script else 'PYTHON'}_{'REMOTE_' if remote else ''}CALL",)
