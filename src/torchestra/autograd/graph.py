"""Searches the autograd graph of one worker."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from torchestra.autograd.gradients import accumulate_in_contexts
from torchestra.autograd.send_recv import RecvNode, SendNode
from torchestra.errors import BackwardError

_Accumulate: type = type(torch.empty((), requires_grad=True).view(()).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
_REENTRANT = "CheckpointFunctionBackward"


def check_roots(roots: Sequence[torch.Tensor]) -> None:
    """Check what a backward pass is to begin from.

    Raises:
        BackwardError: it cannot.
    """
    if not roots:
        raise BackwardError("No tensors provided for gradient computation.")
    for context_id, root in enumerate(roots):
        if not root.requires_grad:
            raise BackwardError(f"requires_grad not set on root {context_id}")
        if root.numel() != 1:
            raise BackwardError(
                f"Root {context_id} is not a scalar, all roots need to be scalar; its shape is"
                f" {tuple(root.shape)}"
            )
        if root.grad_fn is None:
            raise BackwardError(f"Root {context_id} does not have a valid gradient function.")


class ReachableNodes(NamedTuple):
    """The nodes that backward will reach.

    Attributes:
        received: the nodes of received messages.
        reentrant: whether there is checkpointing that runs a backward within the backward.
    """

    received: set[Any]
    reentrant: bool


def prepare(starts: Iterable[Any], floor: int) -> ReachableNodes:
    """Visit all nodes reachable from some; make the gradients of parameters accumulate in contexts.

    Args:
        starts: nodes.
        floor: nodes that are ready run before any with a sequence number below this.
    """
    stack = [node for node in starts if node is not None]
    seen = set(stack)
    received = set()
    reentrant = False
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind is _Accumulate:
            accumulate_in_contexts(node)
            continue
        if kind is RecvNode:
            received.add(node)
            continue
        if kind.__name__ == _REENTRANT:
            reentrant = True
        if node._sequence_nr() < floor and kind is not SendNode:
            node._set_sequence_nr(floor)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return ReachableNodes(received, reentrant)


class ParameterTracker(TorchFunctionMode):
    """Makes the gradients of every parameter that is used while it is active accumulate in contexts.

    A checkpointed function runs again within the backward pass, in a new graph that :func:`prepare` has not
    visited. The leaves that checkpointing itself makes, in place of the function's inputs, do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._nodes: list[Any] = []  # kept: a parameter gets a new node when nothing holds the old one
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.autograd.backward:
            return self._backward(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            for each in (*args, *(kwargs or {}).values()):
                for tensor in each if isinstance(each, (tuple, list)) else (each,):
                    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.is_leaf:
                        self._track(tensor)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.requires_grad:
            self._made[id(result)] = weakref.ref(result)
        return result

    def _track(self, tensor: torch.Tensor) -> None:
        made = self._made.get(id(tensor))
        if made is None or made() is not tensor:
            node = torch.autograd.graph.get_gradient_edge(tensor).node
            accumulate_in_contexts(node)
            self._nodes.append(node)

    def _backward(self, tensors: Any, grad_tensors: Any = None, **options: Any) -> None:
        """Run backward with this mode on.

        The mode is off within the functions that it intercepts, and does not intercept a backward that begins
        at edges.
        """
        gradients = [None] * len(tensors) if grad_tensors is None else grad_tensors
        gradients = [
            torch.ones_like(tensor) if gradient is None and tensor.numel() == 1 else gradient
            for tensor, gradient in zip(tensors, gradients, strict=True)
        ]
        edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in tensors]
        with self:
            torch.autograd.backward(edges, gradients, **options)
