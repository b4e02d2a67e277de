"""What a thread is at: the context that its calls belong to, and where gradients that it computes land."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchestra.autograd.contexts import Context
    from torchestra.autograd.graph_task import Part


class _Here(threading.local):
    """Of each thread.

    Attributes:
        context: what calls that the thread makes belong to.
        part: the part in a backward pass that it is running; gradients of parameters land in its context.
    """

    context: Context | None = None
    part: Part | None = None


here = _Here()


def calling_context() -> Context | None:
    """The context that a call made now belongs to: none where autograd records nothing."""
    context = here.context
    return context if context is not None and torch.is_grad_enabled() else None


def in_same_context(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A callback that runs in the context that this thread is in now, on whichever thread it is called."""
    context = here.context
    if context is None:
        return callback

    def call(value: Any) -> Any:
        before, here.context = here.context, context
        try:
            return callback(value)
        finally:
            here.context = before

    return call


def aside(job: Callable[[], Any]) -> None:
    """Do something of others on this thread, which waits: as a thread would that is at nothing."""
    if here.context is None and here.part is None and torch.is_grad_enabled():
        job()
        return
    context, part = here.context, here.part
    here.context = here.part = None
    try:
        with torch.enable_grad():
            job()
    finally:
        here.context, here.part = context, part
