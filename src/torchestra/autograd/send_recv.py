"""SendRpc and RecvRpc: where the graph of autograd leads from one worker to another.

For the tensors of one message that require gradients there is one node on each side, found by the number of
the message. *SendRpc* is a source of the graph of the worker that sent them: gradients come into it there.
*RecvRpc* is where gradients leave the graph of the worker that received them, back to the send.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import FunctionMeta

from torchestra.rpc.thread_state import thread_state

if TYPE_CHECKING:
    from torchestra.autograd.contexts import Context

_EARLY = 1 << 62  # in the order in which autograd runs nodes that are ready


class SendRpc(NamedTuple):
    """Tensors that a worker has sent.

    Attributes:
        message: its number.
        peer: the rank that got it.
        order: how many messages the context had seen here before.
        token: a tensor that depends on the tensors sent: backward begins there.
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
        message: its number.
        peer: the rank that sent it.
        order: how many messages the context had seen here before.
        node: the node of autograd; None for a message that nobody could read any more.
    """

    message: int
    peer: int
    order: int
    node: Any


class _SendFunction:
    """Forward, of the tensors sent, gives a token; backward of that has the gradients that come for them."""

    @staticmethod
    def forward(ctx: Any, message: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.message = message
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        assert thread_state.graph_task is not None
        return (None, *thread_state.graph_task.gradients_for(ctx.message))


class _ReceiptFunction:
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
                "backward() has come to a tensor that was received from another worker: call"
                " torchestra.autograd.backward(context_id, [loss]) instead of loss.backward()"
            )
        task.send_back(ctx.message, gradients)
        return None, None, None


def _function(name: str, behaviour: type) -> Any:
    # The nodes are named as those of torch.distributed, for those who look at graphs and profiles.
    members = {"forward": behaviour.__dict__["forward"], "backward": behaviour.__dict__["backward"]}
    return FunctionMeta(f"torch::distributed::autograd::{name}", (torch.autograd.Function,), members)


_send: Any = _function("SendRpc", _SendFunction)
_receive: Any = _function("RecvRpc", _ReceiptFunction)
_anchor = torch.empty(0, requires_grad=True)

SendNode: type = _send._backward_cls
ReceiptNode: type = _receive._backward_cls


def record_send(message: int, peer: int, order: int, tensors: Sequence[torch.Tensor]) -> SendRpc:
    """Make tensors that are being sent depend on the gradients that will come."""
    with torch.enable_grad():
        token = _send.apply(message, *tensors)
    # The later a message was sent, the earlier its gradients are waited for; see graph_task.py.
    token.grad_fn._set_sequence_nr(order)
    kinds = [(tensor.shape, tensor.dtype, tensor.layout) for tensor in tensors]
    return SendRpc(message, peer, order, token, kinds)


def record_receipt(message: int, peer: int, order: int, tensors: list[torch.Tensor]) -> RecvRpc:
    """Make received tensors depend on the message."""
    with torch.enable_grad():
        _receive.apply(_anchor, message, tensors)
    node = tensors[0].grad_fn
    node._set_sequence_nr(_EARLY)  # type: ignore[union-attr]
    return RecvRpc(message, peer, order, node)


class ContextMark(NamedTuple):
    """The mark of a message: the context, and its own number if tensors within are attached to the graph."""

    context: int
    message: int | None


class SendRecorder:
    """The tensors in a message that is being pickled, within a context.

    A parameter takes part if it is an argument or result itself, or in a list, tuple or dict that is; the
    parameters of a module that is sent are copied with it.
    """

    __slots__ = ("_content", "_context", "_direct", "_is_call", "_tensors", "_to")

    def __init__(self, context: Context, to: int, content: object, is_call: bool) -> None:
        self._context = context
        self._to = to
        self._content = content
        self._is_call = is_call
        self._tensors: list[torch.Tensor] = []
        self._direct: set[int] | None = None

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor that requires gradients takes part; then it will get those that come."""
        if isinstance(tensor, torch.nn.Parameter):
            if self._direct is None:
                self._direct = {id(each) for each in _parameters(self._content)}
            if id(tensor) not in self._direct:
                return False
        self._tensors.append(tensor)
        return True

    def close(self) -> ContextMark | None:
        """All is pickled: return the mark of the message, None where there is no need."""
        tensors, self._tensors, self._content = self._tensors, [], None
        if not tensors:
            return ContextMark(self._context.number, None) if self._is_call else None
        return ContextMark(self._context.number, self._context.note_send(self._to, tensors))

    def sent(self) -> None:
        """Note that the message was sent."""
        self._context.see_release(self._to)


def _parameters(content: object) -> Iterator[torch.nn.Parameter]:
    if isinstance(content, torch.nn.Parameter):
        yield content
    elif isinstance(content, (tuple, list)):
        for each in content:
            yield from _parameters(each)
    elif isinstance(content, dict):
        yield from _parameters(list(content.values()))
