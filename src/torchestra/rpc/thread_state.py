"""The state of a thread: the scope that its calls belong to, and the backward pass that it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from torchestra.rpc.call_scope import CallScope

_set_grad_enabled = torch._C._set_grad_enabled


class _ThreadState(threading.local):
    """The state of a thread.

    Attributes:
        scope: what calls that the thread makes belong to: a distributed autograd context.
        graph_task: the part in a backward pass that it runs; gradients of parameters land in its context.
    """

    scope: CallScope | None = None
    graph_task: Any = None


thread_state = _ThreadState()


def calling_scope() -> CallScope | None:
    """Return the scope that a call made now belongs to: none where autograd records nothing."""
    scope = thread_state.scope
    return scope if scope is not None and torch.is_grad_enabled() else None


def in_same_scope(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a callback that runs in the scope this thread is in now, on any thread."""
    scope = thread_state.scope
    if scope is None:
        return callback

    def call(value: Any) -> Any:
        before, thread_state.scope = thread_state.scope, scope
        try:
            return callback(value)
        finally:
            thread_state.scope = before

    return call


def run_detached(job: Callable[[], Any]) -> None:
    """Do a job of others on this thread, which waits, as a thread without state would."""
    scope, graph_task = thread_state.scope, thread_state.graph_task
    has_grad = torch.is_grad_enabled()
    try:
        thread_state.scope = thread_state.graph_task = None
        _set_grad_enabled(True)
        job()
    finally:  # its first call is executed even if an interrupt comes
        thread_state.scope, thread_state.graph_task = scope, graph_task
        _set_grad_enabled(has_grad)
