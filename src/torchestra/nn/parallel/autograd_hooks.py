"""How a reducer hangs on autograd without being kept alive by it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch


def queue_callback(callback: Callable[[], None]) -> None:
    """Call it at the end of the backward that is running on this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """The method, without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (found := reference()) is not None:
            found()

    return call


def one_at_a_time(hooks: Sequence[Callable[[torch.Tensor], None]]) -> list[Callable[[torch.Tensor], None]]:
    """The same hooks, of which no two run at once: autograd has a thread for each device."""
    lock = threading.RLock()

    def guarded(hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def call(parameter: torch.Tensor) -> None:
            with lock:
                hook(parameter)

        return call

    return [guarded(hook) for hook in hooks]


def remove_all(handles: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
    """Remove the hooks that these are of."""
    for handle in handles:
        handle.remove()
