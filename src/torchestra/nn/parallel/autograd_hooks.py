"""A reducer's hooks on autograd, which do not keep it alive."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch

queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Calls a function at the end of the backward that is running on this thread."""


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a method but does not keep its object alive."""
    assert isinstance(method, MethodType)
    function, reference = method.__func__, weakref.ref[Any](method.__self__)

    def call() -> None:
        if (owner := reference()) is not None:
            function(owner)

    return call


def one_at_a_time(hooks: Sequence[Callable[[torch.Tensor], None]]) -> list[Callable[[torch.Tensor], None]]:
    """Wrap the hooks so that no two run at once: autograd has a thread for each device."""
    lock = threading.RLock()

    def guarded(hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def call(parameter: torch.Tensor) -> None:
            with lock:
                hook(parameter)

        return call

    return [guarded(hook) for hook in hooks]


def remove_all(handles: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
    """Remove the hooks of these handles."""
    for handle in handles:
        handle.remove()
