"""SendRpc and RecvRpc: the edges of the autograd graph from one worker to another.

For the tensors of one message that require gradients there is one node on each side, found by the number of
the message. *SendRpc* is a source of the graph of the worker that sent them: gradients come into it there.
*RecvRpc* is where gradients leave the graph of the worker that received them, back to the send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import FunctionMeta

from torchestra.rpc.thread_state import thread_state

_EARLY = 1 << 62  # in the order in which autograd runs nodes that are ready


class SendRpc(NamedTuple):
    """Tensors that a worker has sent.

    Attributes:
        peer: the rank that received them.
        order: how many messages the context had seen here before.
        token: a tensor that depends on the tensors sent, from which backward begins.
        kinds: the shape, dtype and layout of each.
    """

    message: int
    peer: int
    order: int
    token: torch.Tensor
    kinds: list[tuple[torch.Size, torch.dtype, torch.layout]]

    def zeros(self, slot: int) -> torch.Tensor:
        """Return a gradient of zeros for one of the tensors."""
        shape, dtype, layout = self.kinds[slot]
        return torch.zeros(shape, dtype=dtype, layout=layout)


class RecvRpc(NamedTuple):
    """Tensors that a worker has received.

    Attributes:
        peer: the rank that sent them.
        order: how many messages the context had seen here before.
        node: the node of autograd; None for a message that could not be read.
    """

    message: int
    peer: int
    order: int
    node: Any


class _SendFunction:
    """Forward makes a token from the tensors sent; backward returns the gradients received for them."""

    @staticmethod
    def forward(ctx: Any, message: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.message = message
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        assert thread_state.graph_task is not None
        return (None, *thread_state.graph_task.gradients_for(ctx.message))


class _RecvFunction:
    """Forward makes received tensors depend on the message; backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, message: int, tensors: list[torch.Tensor]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.message = message
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        task = thread_state.graph_task
        if task is None:
            raise RuntimeError(
                "backward() reached a tensor that was received from another worker: call"
                " torchestra.autograd.backward(context_id, [loss]) instead of loss.backward()"
            )
        task.send_back(ctx.message, gradients)
        return None, None, None


def _function(name: str, behaviour: type) -> Any:
    # The nodes have the names of torch.distributed's, for tools that show graphs and profiles.
    members = {"forward": behaviour.__dict__["forward"], "backward": behaviour.__dict__["backward"]}
    return FunctionMeta(f"torch::distributed::autograd::{name}", (torch.autograd.Function,), members)


_send: Any = _function("SendRpc", _SendFunction)
_receive: Any = _function("RecvRpc", _RecvFunction)
_anchor = torch.empty(0, requires_grad=True)

SendNode: type = _send._backward_cls
RecvNode: type = _receive._backward_cls


def record_send(message: int, peer: int, order: int, tensors: Sequence[torch.Tensor]) -> SendRpc:
    """Record tensors that are being sent, whose gradients will come from the peer."""
    with torch.enable_grad():
        token = _send.apply(message, *tensors)
    # The later a message was sent, the earlier its gradients are waited for; see graph_task.py.
    token.grad_fn._set_sequence_nr(order)
    kinds = [(tensor.shape, tensor.dtype, tensor.layout) for tensor in tensors]
    return SendRpc(message, peer, order, token, kinds)


def record_recv(message: int, peer: int, order: int, tensors: list[torch.Tensor]) -> RecvRpc:
    """Make received tensors depend on the message."""
    with torch.enable_grad():
        _receive.apply(_anchor, message, tensors)
    node = tensors[0].grad_fn
    node._set_sequence_nr(_EARLY)  # type: ignore[union-attr]
    return RecvRpc(message, peer, order, node)
