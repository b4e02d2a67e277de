"""The gradients of a context: how they are added up, and how autograd passes them on."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch

from torchestra.rpc.thread_state import thread_state

# The references to a gradient's tensor when autograd passes it on and nothing else uses it: a list of
# autograd's own, and the Python object.
_OWN_USES = 2
_MARK = "torchestra: gradients may accumulate in a context"


class Gradients:
    """Gradients by parameter. They are added out of place: tensors returned before do not change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor, *, shared: bool) -> None:
        """Add a gradient of a parameter.

        Args:
            shared: whether other tensors may use its memory too.
        """
        with self._lock:
            before = self._gradients.get(parameter)
            if before is None:
                self._gradients[parameter] = _own(gradient, shared)
            elif before.is_sparse and not gradient.is_sparse:
                self._gradients[parameter] = gradient + before
            else:
                self._gradients[parameter] = before + gradient

    def get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of a parameter, if it has one."""
        return self._gradients.get(parameter)

    def put(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Make a tensor the gradient of a parameter; with None, it has none."""
        with self._lock:
            if gradient is None:
                self._gradients.pop(parameter, None)
            else:
                self._gradients[parameter] = gradient

    def own_views(self) -> None:
        """Copy gradients that are views of other tensors, which are still in use."""
        with self._lock:
            for parameter, gradient in self._gradients.items():
                if gradient._is_view():
                    self._gradients[parameter] = gradient.clone()

    def all(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return all gradients, by parameter."""
        with self._lock:
            return dict(self._gradients)


def _own(gradient: torch.Tensor, shared: bool) -> torch.Tensor:
    """Return the gradient, contiguous and in memory of its own."""
    gradient = gradient.detach()
    if gradient.is_sparse:
        plain = gradient._indices().is_contiguous() and gradient._values().is_contiguous()
        return gradient if plain and not shared else gradient.clone()
    plain = gradient.is_contiguous() or gradient.is_contiguous(memory_format=torch.channels_last)
    return gradient if plain and not shared else gradient.clone(memory_format=torch.contiguous_format)


def accumulate_in_contexts(node: Any) -> None:
    """Accumulate the gradients of a parameter in a context, in backward passes that run for one.

    Args:
        node: the parameter's node in the graph.
    """
    if _MARK not in node.metadata:
        node.register_prehook(partial(_accumulate, node.variable))
        node.metadata[_MARK] = True


def _accumulate(parameter: torch.Tensor, gradients: tuple[torch.Tensor | None, ...]) -> tuple[None] | None:
    """Add a gradient to this thread's context, if any, instead of ``.grad``: a hook on parameters' nodes."""
    task = thread_state.graph_task
    if task is None:
        return None
    gradient = gradients[0]
    if gradient is not None:
        uses: int = gradient._use_count()  # type: ignore[attr-defined]
        shared = not task.is_first_use_of(gradient) or uses > _OWN_USES
        task.context.gradients.add(parameter, gradient, shared=shared)
    return (None,)
