"""Hooks on autograd, which do not keep alive what they call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch

from torchestra.process_group import ProcessGroup

queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Calls a function at the end of the backward that is running on this thread."""


def on_backward(output: torch.Tensor, hook: Callable[[object], None]) -> None:
    """Have a backward that reaches this output of a module call a hook first; see Tensor.register_hook().

    As a hook of the node, which takes half as long to register.
    """
    if output.grad_fn is not None:
        output.grad_fn.register_prehook(hook)


def weak_method(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method but does not keep its object alive."""
    assert isinstance(method, MethodType)
    function, reference = method.__func__, weakref.ref[Any](method.__self__)

    def call(*args: Any) -> None:
        if (owner := reference()) is not None:
            function(owner, *args)

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


class GradientHooks:
    """Hooks that autograd calls when the gradients of parameters are ready, to be averaged over a group.

    They are removed by :meth:`remove`, when this object dies, and when hooks for another group are registered
    on one of the parameters after this group has ended. A step that failed may have left gradients expected,
    and an exception or the program may still refer to the wrapper of that step when the module is wrapped
    anew. The former wrapper's hooks would take part in the new one's backward. Those that were removed for
    this reason are registered again when the former wrapper goes on in another group.

    Args:
        group: the group over which the gradients are averaged.
        parameters: the parameters.
        hooks: for each parameter, the function to call; it must not refer to this object.
    """

    def __init__(
        self,
        group: ProcessGroup,
        parameters: Sequence[torch.Tensor],
        hooks: Sequence[Callable[[torch.Tensor], None]],
    ) -> None:
        self._communicator = group.communicator.met()
        self._hooks = list(zip(parameters, hooks, strict=True))
        self._parameters = frozenset(map(id, parameters))
        self._displaced = False
        self._register()

    def _register(self) -> None:
        self._displace_ended()
        handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter, hook in self._hooks]
        self._finalizer = weakref.finalize(self, _remove_all, handles)
        self._finalizer.atexit = False
        with _lock:
            _registered.add(self)

    def _displace_ended(self) -> None:
        """Remove other hooks on these parameters whose group has ended."""
        with _lock:
            others = [each for each in _registered if each is not self]
        for each in others:
            if each._parameters & self._parameters and each._has_ended() and each._finalizer.alive:
                each.remove()
                each._displaced = True

    def _has_ended(self) -> bool:
        # Not of the group: one that is reconfigured has another communicator then.
        return self._communicator.closed or self._communicator.engine.is_aborted

    def update_process_group(self, group: ProcessGroup) -> None:
        """Average over another group from now on."""
        self._communicator = group.communicator.met()
        if self._displaced:
            self._displaced = False
            self._register()
        else:
            self._displace_ended()

    def remove(self) -> None:
        """Remove the hooks, for good. Can be called again."""
        self._displaced = False
        self._finalizer()


_lock = threading.Lock()
_registered: weakref.WeakSet[GradientHooks] = weakref.WeakSet()


def _remove_all(handles: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
